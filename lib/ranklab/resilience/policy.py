"""What to do when nodes fail: how often to save, how many spares to hold, to shrink or to wait."""

import bisect
import math

from ranklab.formulas.resilience import optimal_interval
from ranklab.resilience.cluster import Decision, run_policy


def recovery_policy(state):
    """Decide what the job does after an event: State -> Decision.

    It is called at the start and at each event, and keeps nothing between calls.
    Its score, by run_policy, is the useful work per node-second that is paid for. In each of
    REGIMES it must be at least the share `reach` of an oracle's score, on traces different from
    those in the lab.
    Lab: 14
    """
    job, now = state.job, state.running
    # The stated mean counts as one failure at that rate; the last eight real failures count more.
    recent = state.failures[-8:]
    since = state.now - (recent[0] if len(state.failures) > 8 else 0)
    mean = (job.mean_seconds + since) / (1 + len(recent))

    def fits(up):
        return min(job.nodes, up // job.replica * job.replica)

    def change(old, new):  # seconds until a job on `old` nodes works on `new` ones
        reshard = job.reshard_seconds * (new != (old or state.last))
        return (job.restart_seconds + reshard + job.checkpoint_seconds * (old > 0)) * (old != new)

    # Node-seconds until the next failure: on these nodes, then perhaps on more after repairs.
    best = -1.0, 0
    for nodes in {now, fits(state.up)}:
        cost = change(now, nodes)
        best = max(best, (nodes * (mean - cost), nodes))
        for number, after in enumerate(state.back, 1):
            later = fits(state.up + number)
            work = nodes * max(0, after - cost) + later * (mean - after - change(nodes, later))
            best = max(best, (work, nodes))

    def idle(spares):  # the idle share of the bill; the number of failed nodes is Poisson
        away = job.broken * job.repair_seconds + (1 - job.broken) * job.reboot_seconds
        away, lost = away / job.mean_seconds, spares
        chance = math.exp(-away)
        for n in range(spares + 50):
            if n >= spares:  # a failure makes the job smaller, and later it must grow again
                again = job.nodes * change(job.nodes, 0) / job.mean_seconds
                lost += chance * (job.nodes - fits(job.nodes + spares - n) + again)
            chance *= away / (n + 1)
        return lost / (job.nodes + spares)

    spares = min(range(job.most_spares + 1), key=idle) if state.event == "start" else 0
    in_time = (1200 - job.checkpoint_seconds) / (1200 - 120) / 2  # half of the warnings are true
    save = state.event == "warning" and in_time * state.unsaved > job.checkpoint_seconds
    return Decision(best[1], optimal_interval(job.checkpoint_seconds, mean), spares, save)


# --- rivals: what the policy is compared with -----------------------------------------------------

def daly_policy(state):
    """Decide on Daly's interval for the stated mean and no spares; wait for all nodes."""
    job = state.job
    nodes = job.nodes if state.up >= job.nodes else 0
    return Decision(nodes, optimal_interval(job.checkpoint_seconds, job.mean_seconds))


def with_librarys(policy, part):
    """Return the policy with one part of each Decision taken from recovery_policy."""
    return lambda state: policy(state)._replace(**{part: getattr(recovery_policy(state), part)})


def oracle(job, trace, seconds):
    """Return (score, spares) of a policy that knows the trace.

    It has the best number of spares, saves one checkpoint just before each failure, and, of all
    ways to start, wait or grow, takes the one that does most work until that failure. (A strong
    rival, but we have not proved that it is the best possible.)
    """
    counts = sorted({round(job.most_spares * k**2 / 100) for k in range(11)})
    policies = ((_oracle_policy(job, trace, spares, seconds), spares) for spares in counts)
    return max((run_policy(policy, job, trace, seconds), spares) for policy, spares in policies)


def _oracle_policy(job, trace, spares, seconds):
    """Return the oracle's policy for this number of spares."""
    ends = [each.seconds for each in trace if each.away is not None
            and each.node < job.nodes + spares] + [seconds, math.inf]

    def policy(state):
        until_failure = ends[bisect.bisect(ends, state.now)] - state.now
        backs = [after for after in state.back if after < until_failure][:4]

        def best(at, running, last, back):
            """Return (node-seconds until the failure, nodes to run on, seconds of the change).

            back: number of failed nodes that are back at second `at`.
            """
            fits = min(job.nodes, (state.up + back) // job.replica * job.replica)
            end, options = (*backs, until_failure)[back], []
            for nodes in {running, fits}:
                cost = (nodes != running) * (
                    job.restart_seconds + job.reshard_seconds * (nodes != last)
                    + job.checkpoint_seconds * (running > 0))
                work = nodes * (end - at - cost)
                if back < len(backs):
                    work += best(end, nodes, nodes or last, back + 1)[0]
                options.append((work, nodes, cost))
            return max(options)

        _, nodes, cost = best(0.0, state.running, state.last, 0)
        pause = cost or state.ahead
        interval = ((0.0 if pause else state.unsaved) + until_failure - pause
                    - job.checkpoint_seconds - 1)
        return Decision(nodes, interval if interval > 60 else 1e9, spares)

    return policy
