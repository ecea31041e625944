"""The check of plan_buckets: as good as the best of all plans; the score is printed."""

import itertools
import random
import time

from ranklab.checks.exercise import Exercise
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.data_parallel.plan import (
    block_timeline, bucket_times, capped_buckets, exposed_seconds, plan_buckets,
)

SLOWER, LIMIT = 1.01, 2  # how much longer than the best may be exposed; seconds for 300 gradients
PAIRS = (1.0, 0.1), (0.1, 0.1), (3.0, 0.02), (0.0, 0.2), (0.5, 0.0), (0.01, 1.0)  # alpha, beta
# What is said.
LISTS = ("Return a list of lists of indices, each index once and in order ([] for 0 gradients): "
         "gradients are sent in the order in which they become ready.")
COPIES = "The arguments belong to the caller: copy them."
TOO_MANY = "n gradients have 2^(n-1) plans, too many to try them all."
SEARCH = ("Fix the last bucket. What must you know about all those before it? If you already do "
          "this, compare your end times with those of bucket_times.")
ONE_BUCKET = "A single bucket leaves only when backward is over. What could be sent earlier?"
ONE_EACH = "One message per gradient pays alpha every time: combine some of them."
FREE_LINK = ("You assume that the link is always free. A bucket starts when its last gradient is "
             "ready and the previous bucket has ended: the max of the two times.")
NO_ALPHA = "Every bucket pays alpha, even a small one."
SWAPPED = "alpha is paid once for each bucket, beta for each byte."
FIRST = "A bucket is sent when its LAST gradient is ready, not its first."
WRONG_AIMS = {  # what all plans would make smallest, if the mistake of the sentence were made
    ONE_BUCKET: lambda plan, *case: len(plan),
    ONE_EACH: lambda plan, *case: -len(plan),
    FREE_LINK: lambda plan, *case: max(bucket_times([each], *case)[0][1] for each in plan),
    NO_ALPHA: lambda plan, ready, nbytes, alpha, beta:
        bucket_times(plan, ready, nbytes, 0, beta)[-1][1],
    SWAPPED: lambda plan, ready, nbytes, alpha, beta:
        bucket_times(plan, ready, nbytes, beta, alpha)[-1][1],
    FIRST: lambda plan, *case: bucket_times([each[::-1] for each in plan], *case)[-1][1],
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


def _short_timelines(count):
    dice = random.Random(0)
    return [_timeline(dice, dice.randint(1, 9), dice.choice(PAIRS)) for _ in range(count)]


def _timeline(dice, n, pair, unit=1):
    """`n` gradients: some ready together, some large, some after a pause; times in `unit`."""
    steps = [dice.choice((0.0, 0.1, 1.0, dice.random(), 5.0 * dice.random())) for _ in range(n)]
    nbytes = [dice.choice((1, 2, 5, 10, 40)) for _ in range(n)]
    return list(itertools.accumulate(unit * s for s in steps)), nbytes, *(unit * a for a in pair)


def _plans(n):
    cuts = (cut for count in range(n) for cut in itertools.combinations(range(1, n), count))
    return ([list(range(a, b)) for a, b in zip([0, *cut], [*cut, n])] for cut in cuts)


def _smallest(aim, case):
    """Return the smallest aim(plan, *case) of all plans."""
    return min(aim(plan, *case) for plan in _plans(len(case[0])))


def _least(ready, nbytes, alpha, beta):
    """Return the smallest exposed_seconds, even for many gradients."""
    ends, before = [0.0], [0, *itertools.accumulate(nbytes)]
    for j, when in enumerate(ready, 1):
        ends.append(min(max(when, end) + alpha + (before[j] - before[i]) * beta
                        for i, end in enumerate(ends)))
    return ends[-1] - ready[-1]


def _near_the_best(plan_buckets, case):
    """Return the plan of `case`, found in time and nearly the best, or raise a Mistake."""
    n, arguments, started = len(case[0]), ([*case[0]], [*case[1]], *case[2:]), time.process_time()
    plan = _valid(plan_buckets(*arguments), n)
    spent, exposed = time.process_time() - started, exposed_seconds(plan, *case)
    expect(spent <= LIMIT, f"{n} gradients take {spent:.1f} s, more than {LIMIT}",
           TOO_MANY)
    expect(arguments == case, "its arguments have changed", COPIES)
    least = _least(*case) if n > 9 else _smallest(exposed_seconds, case)
    if exposed > SLOWER * least + 1e-12:
        ready, nbytes, alpha, beta = case
        text = f"{n} gradients, {len(plan)} buckets" if n > 9 else (
            f"ready={[round(when, 2) for when in ready]}, {nbytes=}, the buckets {plan}")
        expect(False, f"{text}, {alpha=:.3g}, {beta=:.3g}: {exposed:.4g} s exposed after backward; "
               f"{least:.4g} s are possible", _hint(plan_buckets))
    return plan


def _valid(plan, n):
    expect(isinstance(plan, list) and all(isinstance(each, list) for each in plan)
           and sum(plan, []) == [*range(n)] and [] not in plan, f"for {n} gradients it returned "
           f"{str(plan)[:60]}", LISTS)
    return plan


def _hint(plan_buckets):
    """Return the wrong aim for which all its plans would be best, if that is a common mistake."""
    tried = [(plan_buckets(*case), *case) for case in _short_timelines(60)]
    return next((hint for hint, aim in WRONG_AIMS.items() if all(
        aim(*each) <= _smallest(aim, each[1:]) for each in tried)), SEARCH)


def the_best_cap(ready, nbytes, alpha, beta):
    caps = [capped_buckets(nbytes, max(1, sum(nbytes) * k // 50)) for k in range(1, 51)]
    return ready and min(caps, key=lambda plan: exposed_seconds(plan, ready, nbytes, alpha, beta))


def whatever_is_ready(ready, nbytes, alpha, beta):
    """Send whatever is ready when the link is free."""
    buckets, start, free = [], 0, 0.0
    while start < len(ready):
        now = max(free, ready[start])
        stop = max(i for i, when in enumerate(ready, 1) if when <= now)
        buckets.append(list(range(start, stop)))
        free = now + alpha + sum(nbytes[start:stop]) * beta
        start = stop
    return buckets


def the_best_of_all(ready, *more):
    return ready and min(_plans(len(ready)), key=lambda plan: exposed_seconds(plan, ready, *more))


STARTS, BUCKET, BEGIN = "in range(j))", "list(range(starts[stop], stop))", "    ends, starts"
PLAN = Exercise(
    plan_buckets, check_plan_buckets, mistakes=(
        Slip(SEARCH, the_best_cap, whatever_is_ready, (STARTS, "in range(max(0, j - 5), j))"),
             (BEGIN, "    ready, alpha, beta = [round(1e6 * when) for when in ready], round("  # us
              f"1e6 * alpha), 1e6 * beta\n{BEGIN}")),
        Slip(ONE_BUCKET, (STARTS, "in range(1))")),
        Slip(ONE_EACH, (STARTS, "in range(j - 1, j))")),
        Slip(FREE_LINK, ("max(ends[i], last)", "last")),
        Slip(NO_ALPHA, ("+ alpha +", "+")),
        Slip(SWAPPED, ("+ alpha +", "+ beta +", "* beta, i)", "* alpha, i)")),
        Slip(FIRST, ("max(ends[i], last)", "max(ends[i], ready[i])")),
        Slip(LISTS, (f"insert(0, {BUCKET})", f"append({BUCKET})"),
             (BUCKET, "(starts[stop], stop)")),
        Slip(COPIES, ("    return", "    ready.clear()\n    return")),
        Slip(TOO_MANY, the_best_of_all),
        Slip("plan_buckets(ready=[], nbytes=[]", ("[0.0], [0]", "[0 * ready[0]], [0]")),
    ), hints=(
        "Fix the last bucket. What do you need to know about all the buckets before it?",
        "Only when they have all arrived; earlier is better. So keep the earliest end for the "
        "first j gradients. Try every start i of the last bucket: it begins after the end that you "
        "kept for the first i.",
        "ends = [0.0]; for j in 1 .. n: end of (i) = max(ends[i], ready[j - 1]) + alpha + "
        "sum(nbytes[i:j]) * beta; keep the smallest, and its i. Then walk back from n: the last "
        "bucket is i .. n - 1, and the one before it ends at i.",
    ))
