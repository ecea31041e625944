"""The check of recovery_policy: its score on traces, compared with Daly's and an oracle's."""

import random
from functools import cache

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.resilience.cluster import BadDecision, Decision, run_policy
from ranklab.resilience.policy import daly_policy, oracle, recovery_policy, with_librarys
from ranklab.resilience.traces import DAY, REGIMES, make_trace

SEED = 14  # not the lab's own traces
PARTS = {
    "spares": "A spare always costs money, but keeps the other nodes from idling when one is down. "
              "How many nodes are down on average, and how often are more down?",
    "interval": "How often do failures really happen? Begin with the stated mean, and learn from "
                "state.failures.",
    "nodes": "Compare the node-seconds until the next likely failure: run on fewer nodes now, wait "
             "for a repair that is near, or grow again when the node is back.",
}
DECISION = "Return a Decision at every event."
POSSIBLE = "See Decision for which decisions are valid."
STATE_ALONE = ("Decide from `state` alone: keep nothing between calls, and draw no random numbers.")


def check_recovery_policy(policy):
    lines = []
    for name, regime in REGIMES.items():
        score, (best, spares), daly = _score(policy, name), *_rivals(name)
        if score < regime.reach * best:
            with_part = {part: _score(with_librarys(policy, part), name) for part in PARTS}
            part = max(with_part, key=with_part.get)
            raise Mistake(f"{name}: {score:.3f} of the bill is useful work, less than "
                          f"{regime.reach:.0%} of the {best:.3f} of an oracle", f"With the "
                          f"library's `{part}` it would be {with_part[part]:.3f}. {PARTS[part]}")
        lines.append(f"{name}: {score:.3f}, {score / best:.0%} of the oracle's {best:.3f} (with "
                     f"{spares} spares); Daly's and waiting {daly:.3f}")
    expect(_score(policy, "slow restarts") == _score(policy, "slow restarts"),
           "the same trace gets a different score the second time", STATE_ALONE)
    yield "valid decisions, and the same ones for the same trace"
    yield from lines


def _score(policy, name):
    def ask(state):
        decision = policy(state)
        expect(isinstance(decision, Decision), f"{name}: a {type(decision).__name__} is returned "
               f"at {state.event!r}", DECISION)
        return decision

    try:
        return run_policy(ask, REGIMES[name].job, _trace(name), REGIMES[name].days * DAY)
    except BadDecision as bad:
        raise Mistake(f"{name}: {bad}", POSSIBLE) from None


@cache
def _trace(name):
    return make_trace(REGIMES[name], SEED)


@cache
def _rivals(name):
    """Return ((the oracle's score, its spares), the score of Daly's interval with waiting)."""
    job, seconds = REGIMES[name].job, REGIMES[name].days * DAY
    return oracle(job, _trace(name), seconds), _score(daly_policy, name)


INTERVAL = "optimal_interval(job.checkpoint_seconds, mean)"
SPARES = 'min(range(job.most_spares + 1), key=idle) if state.event == "start" else 0'
NODES = "Decision(best[1],"
POLICY = Exercise(
    recovery_policy, check_recovery_policy, mistakes=(
        Slip(PARTS["interval"], (INTERVAL, "600.0"), (INTERVAL, "3600.0"), (INTERVAL, "6 * 3600.0"),
             (INTERVAL, INTERVAL.replace("mean", "job.mean_seconds"))),
        Slip(PARTS["spares"], (SPARES, "0"), (SPARES, "-(-job.nodes // 10)"),
             (SPARES, "job.nodes // 24")),
        Slip(PARTS["nodes"], (NODES, "Decision(job.nodes * (state.up >= job.nodes),"),
             (NODES, "Decision(fits(state.up),"),
             (NODES, "Decision(state.running or fits(state.up),")),
        Slip(POSSIBLE, ("up // job.replica * job.replica", "up"), (NODES, "Decision(job.nodes,"),
             (SPARES, "job.nodes"), (INTERVAL, "0.0")),
        Slip(DECISION, (NODES, "(best[1],"), (NODES, f'state.event == "failure" and {NODES}')),
        Slip(STATE_ALONE, (INTERVAL, f"{INTERVAL} * random.uniform(0.95, 1.05)"), random=random),
    ), hints=(
        "Begin with the decisions that cost the most: how many nodes, and how many spares? Print "
        "the scores of simple policies on each trace.",
        "Estimate the mean time until the next failure from state.now and state.failures. For each "
        "choice, compute how much work is done until then, in node-seconds.",
        "For each choice of nodes now, and each time in state.back at which the job could grow, "
        "compute nodes * seconds, minus restarts. For the spares: the number of nodes that are "
        "down is Poisson distributed, with mean (mean time down / mean time between failures).",
    ))
