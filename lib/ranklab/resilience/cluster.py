"""A job on nodes that fail, simulated: what a recovery policy sees and decides, and its score.

The simulation goes from event to event, without rounding to steps. Failures come from a trace.
Left out: saves in the background, storage failures, and replacing a node before it fails. The
length of a repair is known when it begins.
"""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Job:
    """What is known about a job and its cluster before it starts; the stated means may be wrong.

    nodes         number of nodes of the whole job
    replica       nodes that hold one copy of the model: the job runs on a multiple of it
    mean_seconds  mean time between failures of these `nodes`
    restart_seconds  time of each start
    reshard_seconds  extra time if the number of nodes has changed since the last start
    reboot_seconds   mean time for which a failed node is unavailable
    repair_seconds   the same for a node that is really broken
    broken           share of the failed nodes that are really broken
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
        """The largest number of spares that you can get."""
        return self.nodes // 8


class Event(NamedTuple):
    """At `seconds` this node fails, and is unavailable for `away` seconds; None: only a warning."""

    seconds: float
    node: int
    away: float | None


@dataclass(frozen=True)
class State:
    """What a policy sees at an event, `now` seconds after the start.

    event     "start", "failure", "warning" (a node of the job may fail in 2 to 20 minutes; half
              of the warnings are false) or "back" (a node was repaired)
    up        nodes that could run, including spares
    running   nodes on which the job runs or restarts; 0: it is stopped, its unsaved work lost
    last      nodes of the last start; before the first start, all nodes
    unsaved   seconds of work since the last checkpoint
    ahead     seconds of a restart or a checkpoint that are left before the job works again
    failures  times of all node failures so far, in seconds, in order
    back      seconds until each failed node is back, the soonest first
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
    """A policy's choice until the next event.

    nodes     number to run on: a multiple of job.replica, at most job.nodes and state.up; 0: stop
              and wait. If this changes the number of nodes, the job first saves, then restarts
    interval  seconds of work between two checkpoints
    spares    nodes held and paid for in addition to job.nodes, during the whole run; only the
              answer to "start" counts
    save      whether to begin a checkpoint now
    """

    nodes: int
    interval: float
    spares: int = 0
    save: bool = False


class BadDecision(ValueError):
    """A Decision that can't be carried out; the message says why."""


class _Run:
    """A running job: its saved work, and its current state."""

    def __init__(self, job, spares):
        self.job, self.interval = job, job.mean_seconds
        self.up, self.working = set(range(job.nodes + spares)), set(range(job.nodes))
        self.running, self.last = 0, job.nodes
        self.saved = self.unsaved = self.since = 0.0  # node-seconds, twice; seconds
        self.ahead = []  # [is it a checkpoint?, seconds left] of what comes before more work

    def advance(self, seconds):
        """Simulate `seconds` without any event."""
        while seconds > 0 and (self.ahead or self.running):
            if self.ahead:
                is_save, remaining = self.ahead[0]
                self.ahead[0][1] = remaining - seconds
                seconds -= remaining
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

    def fail(self, node):
        """Remove the node; if the job ran on it, stop the job and lose its unsaved work."""
        self.up.discard(node)
        if node in self.working:
            self.working.discard(node)
            self.running, self.ahead, self.unsaved, self.since = 0, [], 0.0, 0.0

    def obey(self, decision):
        """Carry out the decision.

        Raises: BadDecision if that is impossible.
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
    """Simulate a job under a policy; return the policy's score.

    policy: State -> Decision, called at the start and at each event.
    trace: [Event] in order of time.
    Returns: useful node-seconds of work per node-second paid for.
    Raises: BadDecision if the policy makes an impossible decision.
    """
    failures, repairs = (), []  # seconds of each failure; a heap of (when it is back, node)
    spares = policy(State(job, "start", 0.0, job.nodes, 0, job.nodes)).spares
    if not 0 <= spares <= job.most_spares:
        raise BadDecision(f"spares={spares}: 0 to {job.most_spares} can be had")
    run, now = _Run(job, spares), 0.0

    def ask(event):
        run.obey(policy(State(job, event, now, len(run.up), run.running, run.last, run.since,
                              sum(remaining for _, remaining in run.ahead), failures,
                              tuple(sorted(until - now for until, _ in repairs)))))

    ask("start")
    for at, node, away in (*trace, Event(seconds, -1, None)):
        while repairs and repairs[0][0] <= at:
            until, repaired = heapq.heappop(repairs)
            run.advance(until - now)
            now = until
            run.up.add(repaired)
            ask("back")
        run.advance(at - now)
        now = at
        if node not in run.up or (away is None and node not in run.working):
            continue
        if away is not None:
            run.fail(node)
            failures += (now,)
            if away:
                heapq.heappush(repairs, (now + away, node))
            else:
                run.up.add(node)
        ask("warning" if away is None else "failure")
    return run.saved / ((job.nodes + spares) * seconds)
