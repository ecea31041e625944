"""The check of recovery_policy: its score on traces, beside Daly's and an oracle's."""

from functools import cache

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.resilience.cluster import BadDecision, Decision, run_policy
from ranklab.resilience.policy import daly_policy, oracle, with_librarys
from ranklab.resilience.traces import DAY, REGIMES, make_trace

SEED = 14  # not the lab's own traces
PARTS = {
    "spares": "A spare costs money all the time, and saves the nodes that idle when one is away. "
              "How many nodes are away on average, and how often are there more?",
    "interval": "How often do failures really come? Begin with the stated mean, and learn from "
                "state.failures.",
    "nodes": "Compare node-seconds until the next failure is likely: run on fewer nodes now, wait "
             "for a repair that is near, grow again when the node is back.",
}


def check_recovery_policy(policy):
    seen = []
    for name, regime in REGIMES.items():
        score, (best, spares), daly = _score(policy, name), *_rivals(name)
        if score < regime.reach * best:
            with_part = {part: _score(with_librarys(policy, part), name) for part in PARTS}
            part = max(with_part, key=with_part.get)
            raise Mistake(f"{name}: {score:.3f} of the bill is useful work, less than "
                          f"{regime.reach:.0%} of the {best:.3f} of an oracle", f"With the "
                          f"library's `{part}` it would be {with_part[part]:.3f}. {PARTS[part]}")
        seen.append(f"{name}: {score:.3f}, {score / best:.0%} of the oracle's {best:.3f} (with "
                    f"{spares} spares); Daly's and waiting {daly:.3f}")
    expect(_score(policy, "slow restarts") == _score(policy, "slow restarts"), "the same trace "
           "again has another score", "Decide from `state` alone: keep nothing between "
           "calls, and draw no random numbers.")
    yield "valid decisions, and the same ones for the same trace"
    yield from seen


def _score(policy, name):
    def ask(state):
        decision = policy(state)
        expect(isinstance(decision, Decision), f"{name}: a {type(decision).__name__} is returned "
               f"at {state.event!r}", "Return a Decision, at each event.")
        return decision

    try:
        return run_policy(ask, REGIMES[name].job, _trace(name), REGIMES[name].days * DAY)
    except BadDecision as bad:
        raise Mistake(f"{name}: {bad}", "See Decision for what can be decided.") from None


@cache
def _trace(name):
    return make_trace(REGIMES[name], SEED)


@cache
def _rivals(name):
    """((the oracle's score, its spares), the score of Daly's interval with waiting)"""
    job, seconds = REGIMES[name].job, REGIMES[name].days * DAY
    return oracle(job, _trace(name), seconds), _score(daly_policy, name)
