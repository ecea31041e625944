"""The check of plan_buckets: as good as the best of all plans; it prints the score."""

import itertools
import random
import time

from ranklab.checks.beside import expect
from ranklab.data_parallel.plan import block_timeline, bucket_times, exposed_seconds

SLOWER, LIMIT = 1.01, 2  # how much longer than the best may be exposed; seconds for 300 gradients
PAIRS = (1.0, 0.1), (0.1, 0.1), (3.0, 0.02), (0.0, 0.2), (0.5, 0.0), (0.01, 1.0)  # alpha, beta
SEARCH = "Fix the last bucket. What must be known of all those before it?"
WRONG_AIMS = {  # what all plans would make smallest, if the mistake of the hint were right
    "One bucket starts when backward is over. What could travel before?":
        lambda plan, *case: len(plan),
    "A message for each gradient pays alpha each time: put some together.":
        lambda plan, *case: -len(plan),
    "You count as if the link were always free. A bucket starts when its last gradient is ready "
    "and the bucket before it has ended: the max of both times.":
        lambda plan, *case: max(bucket_times([each], *case)[0][1] for each in plan),
    "alpha is paid for each bucket, also for a small one.":
        lambda plan, ready, nbytes, alpha, beta: bucket_times(plan, ready, nbytes, 0, beta)[-1][1],
    "A bucket is sent when its LAST gradient is ready, not its first.":
        lambda plan, *case: bucket_times([each[::-1] for each in plan], *case)[-1][1],
}


def check_plan_buckets(plan_buckets):
    _valid(plan_buckets([], [], 1.0, 1.0), 0)
    for case in _short_timelines(300):
        _near_the_best(plan_buckets, case)
    yield ("300 timelines of 1 to 9 gradients, six pairs of alpha and beta: as good as the best of "
           "all plans")
    for n in (12, 16, 18, 20, 40, 80, 300):  # step by step: a search of all plans is stopped early
        _near_the_best(plan_buckets, _timeline(random.Random(n), n, (3.0, 0.1), unit=1e-7))
    yield f"up to 300 gradients, in at most {LIMIT} s; arguments unchanged; now GPT-2's blocks:"
    for GBps in (200, 25, 12.5):
        case = *block_timeline(), 2e-4, 2 / (GBps * 1e9)
        exposed = exposed_seconds(_near_the_best(plan_buckets, case), *case)
        yield f"{GBps} GB/s: {1e3 * exposed:.3g} ms exposed after backward, at most 1% too much"


def _short_timelines(many):
    dice = random.Random(0)
    return [_timeline(dice, dice.randint(1, 9), dice.choice(PAIRS)) for _ in range(many)]


def _timeline(dice, n, pair, unit=1):
    """`n` gradients: some ready together, some large, some after a pause; times in `unit`."""
    steps = [dice.choice((0.0, 0.1, 1.0, dice.random(), 5.0 * dice.random())) for _ in range(n)]
    nbytes = [dice.choice((1, 2, 5, 10, 40)) for _ in range(n)]
    return list(itertools.accumulate(unit * s for s in steps)), nbytes, *(unit * a for a in pair)


def _smallest(aim, case):
    """The smallest aim(plan, *case) of all plans."""
    n = len(case[0])
    cuts = (cut for many in range(n) for cut in itertools.combinations(range(1, n), many))
    plans = ([list(range(a, b)) for a, b in zip([0, *cut], [*cut, n])] for cut in cuts)
    return min(aim(plan, *case) for plan in plans)


def _least(ready, nbytes, alpha, beta):
    """The smallest exposed_seconds, also for many gradients."""
    ends, before = [0.0], [0, *itertools.accumulate(nbytes)]
    for j, when in enumerate(ready, 1):
        ends.append(min(max(when, end) + alpha + (before[j] - before[i]) * beta
                        for i, end in enumerate(ends)))
    return ends[-1] - ready[-1]


def _near_the_best(plan_buckets, case):
    """The plan of `case`, found in time, with little more exposed than the best; else a Mistake."""
    n, given, started = len(case[0]), ([*case[0]], [*case[1]], *case[2:]), time.process_time()
    plan = _valid(plan_buckets(*given), n)
    spent, exposed = time.process_time() - started, exposed_seconds(plan, *case)
    expect(spent <= LIMIT, f"{n} gradients take {spent:.1f} s, more than {LIMIT}", "n gradients "
           "have 2^(n-1) plans, so you can't look at all.")
    expect(given == case, "its arguments have changed", "They are the caller's: copy them.")
    least = _least(*case) if n > 9 else _smallest(exposed_seconds, case)
    if exposed > SLOWER * least + 1e-12:
        ready, nbytes, alpha, beta = case
        what = f"{n} gradients, {len(plan)} buckets" if n > 9 else (
            f"ready={[round(when, 2) for when in ready]}, {nbytes=}, the buckets {plan}")
        expect(False, f"{what}, {alpha=:.3g}, {beta=:.3g}: {exposed:.4g} s exposed after backward; "
               f"{least:.4g} s are possible", _hint(plan_buckets))
    return plan


def _valid(plan, n):
    expect(isinstance(plan, list) and all(isinstance(each, list) for each in plan)
           and sum(plan, []) == [*range(n)] and [] not in plan, f"for {n} gradients it returned "
           f"{str(plan)[:60]}", "Return a list of lists of indices, each once, in order, for 0 "
           "gradients []: gradients travel in the order of their times.")
    return plan


def _hint(plan_buckets):
    """What all its plans would be the best for, if that is a usual mistake."""
    tried = [(plan_buckets(*case), *case) for case in _short_timelines(60)]
    return next((hint for hint, aim in WRONG_AIMS.items() if all(
        aim(*each) <= _smallest(aim, each[1:]) for each in tried)), SEARCH)
