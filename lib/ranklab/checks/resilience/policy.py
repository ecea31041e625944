"""The check of recovery_policy: its score on traces, beside Daly's and an oracle's."""

from functools import cache

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.resilience.interval import check_goodput, check_optimal_interval
from ranklab.resilience.cluster import BadDecision, Decision, run_policy
from ranklab.resilience.interval import goodput, optimal_interval
from ranklab.resilience.policy import daly_policy, oracle, recovery_policy, with_librarys
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


TIMES = (
    Exercise(optimal_interval, check_optimal_interval, hints=(
        "What do short intervals cost you, and what do long ones cost you?",
        "Young: checkpoints cost C / T, lost work costs T / 2 M, and the sum is smallest at "
        "sqrt(2 C M). Daly adds terms for checkpoints that are not short.",
        "x = sqrt(C / (2 M)); sqrt(2 C M) * (1 + x / 3 + x**2 / 9) - C; and M where C is 2 M or "
        "more",
    )),
    Exercise(goodput, check_goodput, hints=(
        "How long does it take on average until a round of work and checkpoint has gone well?",
        "With random failures, L seconds go well with a chance of e^(-L/M). It takes "
        "M (e^(L/M) - 1) on average until they do, if you can begin again at once.",
        "Each failure adds a restart, which takes M (e^(R/M) - 1) itself, so a round takes "
        "M e^(R/M) (e^((T + C)/M) - 1). Return T divided by that, without a large power of e",
    )),
    Exercise(recovery_policy, check_recovery_policy, hints=(
        "Begin with the decisions that cost most: how many nodes, and how many spares? Print "
        "the scores of simple policies on each trace.",
        "Estimate the mean time until the next failure from state.now and state.failures. For "
        "each choice compute how much work is done until then, in node-seconds.",
        "For each choice of nodes now, and each time in state.back at which the job could grow: "
        "nodes * seconds, less restarts. For the spares: the number of nodes away is a Poisson "
        "number, with the mean: mean time away / mean time between failures.",
    )),
)
