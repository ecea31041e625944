"""A job on nodes that fail, simulated: what a recovery policy sees, decides and gets for it.

This is a simulation, event by event and without rounding to steps. Failures come from a trace.
Left out: saves beside the work, failures of the storage, a node that is swapped before it fails.
How long a repair takes is known when it begins.
"""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True)
class Job:
    """What is known of a job and its cluster before it starts; the means are stated, not promised.

    nodes         of the whole job
    replica       nodes that hold one copy of the model: the job runs on a multiple of it
    mean_seconds  between failures of these `nodes`
    restart_seconds, reshard_seconds  each start takes the first; the second comes on top where
                  the number of nodes is another than at the last checkpoint
    reboot_seconds, repair_seconds, broken  a failed node is away for the first on average; a
                  `broken` share of them for the second
    """

    nodes: int
    replica: int
    mean_seconds: float
    checkpoint_seconds: float
    restart_seconds: float
    reshard_seconds: float
    reboot_seconds: float
    repair_seconds: float
    broken: float

    @property
    def most_spares(self):
        """Spares that can be had."""
        return self.nodes // 8


class Event(NamedTuple):
    """At `seconds` this node fails, and is away for `away` seconds; None: it only warns."""

    seconds: float
    node: int
    away: float | None


@dataclass(frozen=True)
class State:
    """What a policy sees when something has happened, `now` seconds after the start.

    event     "start", "failure", "warning" (a node of the job may fail in 2 to 20 minutes; half
              of the warnings are false) or "back" (a node was repaired)
    up        nodes that could run, spares among them
    running   nodes on which the job runs or restarts; 0: it stands, and its unsaved work is lost
    last      nodes at the last checkpoint, or at the start
    unsaved   seconds of work since the last checkpoint
    ahead     seconds of a restart or a checkpoint that are left before it works
    failures  seconds at which nodes have failed so far, the last one last
    back      seconds until each broken node is back, the soonest first
    """

    job: Job
    event: str
    now: float
    up: int
    running: int
    last: int
    unsaved: float = 0.0
    ahead: float = 0.0
    failures: tuple = ()
    back: tuple = ()


class Decision(NamedTuple):
    """What a policy wants until the next event.

    nodes     to run on: a multiple of job.replica, at most job.nodes and state.up; 0: stand and
              wait. Where the job runs on another number, it saves first, then restarts
    interval  seconds of work between two checkpoints
    spares    nodes that are held and paid for besides job.nodes, in the whole run; the answer to
              "start" counts, others are not looked at
    save      begin a checkpoint now
    """

    nodes: int
    interval: float
    spares: int = 0
    save: bool = False


class BadDecision(ValueError):
    """A Decision that can't be obeyed; the text says why."""


class _Run:
    """A job under way: the work that is saved, and what it does at the moment."""

    def __init__(self, job, spares):
        self.job, self.interval = job, job.mean_seconds
        self.up, self.working = set(range(job.nodes + spares)), set(range(job.nodes))
        self.running, self.last = 0, job.nodes
        self.saved = self.unsaved = self.since = 0.0  # node-seconds, twice; seconds
        self.ahead = []  # [is it a checkpoint?, seconds left] of what comes before more work

    def advance(self, seconds):
        """So much time has gone by, without any event."""
        while seconds > 0 and (self.ahead or self.running):
            if self.ahead:
                is_save, left = self.ahead[0]
                self.ahead[0][1] = left - seconds
                seconds -= left
                if seconds >= 0:
                    self.ahead.pop(0)
                    if is_save:
                        self.saved, self.unsaved, self.since = self.saved + self.unsaved, 0.0, 0.0
                continue
            if not self.since:  # whole rounds at once
                rounds = seconds // (self.interval + self.job.checkpoint_seconds)
                self.saved += rounds * self.interval * self.running
                seconds -= rounds * (self.interval + self.job.checkpoint_seconds)
            work = min(seconds, max(0.0, self.interval - self.since))
            self.since, self.unsaved = self.since + work, self.unsaved + work * self.running
            seconds -= work
            if seconds > 0:
                self.ahead = [[True, self.job.checkpoint_seconds]]

    def fails(self, node):
        """The node is away; if the job ran on it, it stands, and what was not saved is lost."""
        self.up.discard(node)
        if node in self.working:
            self.working.discard(node)
            self.running, self.ahead, self.unsaved, self.since = 0, [], 0.0, 0.0

    def obey(self, decision):
        """The job does as it was decided.

        error  BadDecision where that can't be
        """
        job, nodes = self.job, decision.nodes
        if not 0 <= nodes <= min(job.nodes, len(self.up)) or nodes % job.replica:
            raise BadDecision(f"nodes={nodes}: a multiple of {job.replica}, at most {job.nodes}, "
                             f"and {len(self.up)} are up")
        if not 0 < decision.interval < math.inf:
            raise BadDecision(f"interval={decision.interval} must be above 0 and finite")
        self.interval = decision.interval
        if self.since and not self.ahead and (decision.save or nodes != self.running):
            self.ahead = [[True, job.checkpoint_seconds]]
        if nodes == self.running:
            return
        saving = [each for each in self.ahead if each[0]]
        start = job.restart_seconds + (job.reshard_seconds if nodes != self.last else 0)
        self.ahead = saving + ([[False, start]] if nodes else [])
        self.running, self.last = nodes, nodes or self.last
        if len(self.working) > nodes:
            self.working = set(sorted(self.working)[:nodes])
        self.working.update(sorted(self.up - self.working)[:nodes - len(self.working)])


def run_policy(policy, job, trace, seconds):
    """The score of a policy: useful work, in node-seconds, for each node-second that is paid.

    policy  State -> Decision, asked at the start and at each event
    trace   [Event] in the order of time
    error   BadDecision
    """
    seen, down = (), []
    spares = policy(State(job, "start", 0.0, job.nodes, 0, job.nodes)).spares
    if not 0 <= spares <= job.most_spares:
        raise BadDecision(f"spares={spares}: 0 to {job.most_spares} can be had")
    run, now = _Run(job, spares), 0.0

    def ask(event):
        run.obey(policy(State(job, event, now, len(run.up), run.running, run.last, run.since,
                              sum(left for _, left in run.ahead), seen,
                              tuple(sorted(until - now for until, _ in down)))))

    ask("start")
    for at, node, away in (*trace, Event(seconds, -1, None)):
        while down and down[0][0] <= at:
            until, back = heapq.heappop(down)
            run.advance(until - now)
            now = until
            run.up.add(back)
            ask("back")
        run.advance(at - now)
        now = at
        if node not in run.up or (away is None and node not in run.working):
            continue
        if away is not None:
            run.fails(node)
            seen += (now,)
            if away:
                heapq.heappush(down, (now + away, node))
            else:
                run.up.add(node)
        ask("warning" if away is None else "failure")
    return run.saved / ((job.nodes + spares) * seconds)


# --- traces ---------------------------------------------------------------------------------------

class Regime(NamedTuple):
    """A job, and how its cluster really behaves: what a policy is not told.

    reach   the part of an oracle's score that the check wants
    rate    times as many failures as are stated
    burst   (days from one burst to the next, days that it lasts, times as many failures)
    """

    job: Job
    days: int
    reach: float
    rate: float = 1.0
    burst: tuple = (1, 0, 1)


GPU_HOURS = 54 * 24 * 16384 / 419  # of a GPU for each unexpected interruption; Llama 3, table 5
OPT_HOURS = 12 * 124  # of a node for each machine that is lost; OPT-175B: 124 nodes, 2 a day
# Nodes have 8 GPUs. The rates that are stated are those two; all else is assumed.
REGIMES = {
    "rare failures": Regime(Job(16, 8, GPU_HOURS / 128 * HOUR, 600, 600, 300, 1200, DAY, 0.5),
                            240, 0.94),
    "2,048 nodes": Regime(Job(2048, 16, GPU_HOURS / 16384 * HOUR, 20, 600, 300, 900, DAY, 0.5),
                          54, 0.92),
    "bursts": Regime(Job(256, 16, GPU_HOURS / 2048 * HOUR, 120, 600, 300, 600, DAY / 2, 0.2),
                     60, 0.86, burst=(4, 1, 30)),
    "slow repairs": Regime(Job(124, 31, OPT_HOURS / 124 * HOUR, 180, 900, 600, 1800, 4 * DAY, 0.8),
                           60, 0.90),
    "slow restarts": Regime(Job(32, 16, OPT_HOURS / 32 * HOUR, 300, 600, 2400, 180, 4 * HOUR, 0.15),
                            90, 0.89, rate=3),
    "slow checkpoints": Regime(Job(512, 512, GPU_HOURS / 4096 * HOUR, 1200, 900, 600, 600,
                                   8 * HOUR, 0.4), 60, 0.62, rate=4),
}


def make_trace(regime, seed=0):
    """[Event] of a regime: failures at random, on any node that is up, and warnings.

    One failure of five has a warning, 2 to 20 minutes before; as many warnings are false.
    """
    job, days, _, rate, (every, lasts, times) = regime
    random, events, until = np.random.default_rng(seed), [], {}
    nodes = job.nodes + job.most_spares
    most = rate * max(times, 1) * nodes / job.nodes / job.mean_seconds  # failures a second
    now = random.exponential(1 / most)
    while now < days * DAY:
        in_burst = now / DAY % every < lasts
        node, away = int(random.integers(nodes)), random.exponential(
            job.repair_seconds if random.random() < job.broken else job.reboot_seconds)
        lead, share = random.uniform(120, 1200), random.random()
        if share < (1 if in_burst else 1 / max(times, 1)) and until.get(node, 0) < now:
            until[node] = now + away
            events.append(Event(now, node, away))
            for at, who in ((now - lead, node), (random.uniform(0, days * DAY),
                                                 int(random.integers(nodes)))):
                if random.random() < 0.2 and at > 0:
                    events.append(Event(at, who, None))
        now += random.exponential(1 / most)
    return sorted(events)
