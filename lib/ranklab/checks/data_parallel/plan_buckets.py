"""The check of plan_buckets: as good as the best of all plans; it prints the score."""

import itertools
import random
import time

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.data_parallel.plan import (
    block_timeline, bucket_times, capped_buckets, exposed_seconds, least_exposed,
)

SLOWER, LIMIT = 1.01, 2  # how much longer than the best may be exposed; seconds for 300 gradients
LINKS = {  # of a step of 64 GPUs: alpha of an all-reduce, and 2 bytes sent for each of its bytes
    "200 GB/s": (1e-4, 2 / 200e9), "25 GB/s": (2e-4, 2 / 25e9),
    "12.5 GB/s": (2e-4, 2 / 12.5e9), "25 GB/s, 1 ms": (1e-3, 2 / 25e9),
}
SIZES = 5, 6, 4, 7, 3, 8, 9, 2, 1  # of two or three gradients a plan says little of its mistake
PAIRS = (1.0, 0.1), (0.1, 0.1), (3.0, 0.02), (0.0, 0.2), (0.5, 0.0), (0.01, 1.0)  # alpha, beta
SEARCH = "Fix the last bucket. What must be known of all those before it?"

WRONG_ENDS = {  # when the last all-reduce would end, if the mistake of the hint were right
    "You count as if the link were always free. A bucket waits for the one before it: it starts at "
    "max(its last ready, the end before).": lambda plan, ready, nbytes, alpha, beta: max(
        ready[each[-1]] + alpha + sum(nbytes[i] for i in each) * beta for each in plan),
    "alpha is paid for each bucket, also for a small one.":
        lambda plan, ready, nbytes, alpha, beta: bucket_times(plan, ready, nbytes, 0, beta)[-1][1],
    "A bucket is sent when its LAST gradient is ready, not its first.":
        lambda plan, *case: bucket_times([each[::-1] for each in plan], *case)[-1][1],
}


def check_plan_buckets(plan_buckets):
    _valid(plan_buckets([], [], 1.0, 1.0), 0)
    dice = random.Random(0)
    for number in range(300):
        case = _timeline(dice, number)
        _near_the_best(plan_buckets, case, _least_by_all_plans(*case))
    yield "300 timelines of 1 to 9 gradients, six pairs of alpha and beta: as good as all plans"
    for n in (12, 16, 18, 20, 40, 80, 300):  # step by step: a search of all plans is stopped early
        case = _long_timeline(dice, n, unit=1e-6 if n == 40 else 1)  # of seconds: all is relative
        _near_the_best(plan_buckets, case, _least(*case))
    yield f"up to 300 gradients, in at most {LIMIT} s; arguments unchanged; now GPT-2's blocks:"
    for name, link in LINKS.items():
        case = *block_timeline(), *link
        plan = _near_the_best(plan_buckets, case, _least(*case))
        yield f"{name}: {_score(plan, case)}"


def _timeline(dice, number):
    """Up to 9 gradients: some ready together, some large, some after a long pause."""
    n = SIZES[number % 9]
    steps = [dice.choice((0.0, 0.1, 1.0, dice.random(), 5.0 * dice.random())) for _ in range(n)]
    nbytes = [dice.choice((1, 2, 5, 10, 40)) for _ in range(n)]
    return list(itertools.accumulate(steps)), nbytes, *PAIRS[number // 9 % len(PAIRS)]


def _long_timeline(dice, n, unit):
    ready = sorted(dice.uniform(0, 0.05) * unit for _ in range(n))
    nbytes = [int(10 ** dice.uniform(3, 7)) for _ in range(n)]
    return ready, nbytes, 3e-4 * unit, 0.04 / n / 1e6 * unit


def _least_by_all_plans(ready, *rest):
    return min(exposed_seconds(plan, ready, *rest) for plan in _all_plans(len(ready)))


def _all_plans(n):
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [i for i, is_cut in enumerate(cuts, 1) if is_cut]
        yield [list(range(a, b)) for a, b in zip([0, *ends], [*ends, n])]


def _least(ready, nbytes, alpha, beta):
    """The same for many gradients. (A test holds it against all plans.)"""
    ends = [0.0]
    for j, when in enumerate(ready):
        size, best = 0, float("inf")
        for i in range(j, -1, -1):
            size += nbytes[i]
            best = min(best, max(when, ends[i]) + alpha + size * beta)
        ends.append(best)
    return ends[-1] - ready[-1]


def _near_the_best(plan_buckets, case, least):
    """The plan of `case`, found in time, with little more exposed than `least`; else a Mistake."""
    n, given, started = len(case[0]), ([*case[0]], [*case[1]], *case[2:]), time.process_time()
    plan = _valid(plan_buckets(*given), n)
    spent = time.process_time() - started
    expect(spent <= LIMIT, f"{n} gradients take {spent:.1f} s, more than {LIMIT}", "n gradients "
           f"have 2^(n-1) plans, so you can't look at all. {SEARCH}")
    expect(given[:2] == case[:2], "its arguments have changed", "They are the caller's: copy them.")
    exposed, (ready, nbytes, alpha, beta) = exposed_seconds(plan, *case), case
    if exposed > SLOWER * least + 1e-12:
        what = f"{n} gradients, {len(plan)} buckets" if n > 9 else (
            f"ready={[round(when, 2) for when in ready]}, {nbytes=}, the buckets {plan}")
        raise Mistake(f"{what}, {alpha=:.3g}, {beta=:.3g}: {exposed:.4g} s exposed after backward; "
                      f"{least:.4g} s are possible", _hint(plan_buckets))
    return plan


def _valid(plan, n):
    expect(isinstance(plan, list) and all(isinstance(each, list) for each in plan),
           f"it returned {str(plan)[:60]}", "Return a list of lists of indices.")
    expect(sum(plan, []) == [*range(n)] and [] not in plan,
           f"{n} gradients: the buckets are {str(plan)[:60]}", "Each index once, in order, for 0 "
           "gradients []: gradients travel in the order of their times, and a bucket is a message.")
    return plan


def _hint(plan_buckets):
    """What all its plans would be the best for, if that is a usual mistake."""
    dice = random.Random(1)
    cases = [_timeline(dice, number) for number in range(40)]
    plans = [_valid(plan_buckets(*case), len(case[0])) for case in cases]
    if all(len(plan) == 1 for plan in plans):
        return "One bucket starts when backward is over. What could travel before?"
    if all(len(plan) == len(case[0]) for plan, case in zip(plans, cases)):
        return "A message for each gradient pays alpha each time: put some together."
    for hint, end in WRONG_ENDS.items():
        if all(end(plan, *case) <= min(end(other, *case) for other in _all_plans(len(case[0])))
               for plan, case in zip(plans, cases)):
            return hint
    return SEARCH


def _score(plan, case):
    n = len(case[0])
    others = {"25 MB": capped_buckets(case[1]), "one": [[*range(n)]],
              "each alone": [[i] for i in range(n)]}
    rest = ", ".join(f"{name} {1e3 * exposed_seconds(p, *case):.3g}" for name, p in others.items())
    return (f"{1e3 * exposed_seconds(plan, *case):.3g} ms exposed; library "
            f"{1e3 * _least(*case):.3g}, {rest}, bound {1e3 * least_exposed(*case):.3g}")
