"""all_ranks_finite: one answer for all ranks, by one collective."""

import math
from functools import partial

import torch

from ranklab.checks.beside import KEPT, expect, on_groups
from ranklab.checks.failures import STUCK
from ranklab.checks.handles import Waits, all_awaited
from ranklab.engine import device
from ranklab.meter import Traffic

FINITE, NAN, INF, HUGE = 1.5, float("nan"), float("inf"), 1.5e308  # the largest is 1.8e308
LOST = ("Only the rank that has NaN or infinity noticed it. MIN and MAX of losses compare them, "
        "and a comparison with NaN is always False. Reduce a flag (0 or 1) by MIN over ranks: then "
        "one rank that is not finite decides for all.")
BOTH = "Infinity and minus infinity are not finite either: torch.isfinite sees both."
CASES = (  # of the first rank, of the last rank, what it is, what is usually wrong there
    (FINITE, FINITE, "all losses finite", "The flag must be 1 for finite. And keep it: all_reduce "
     "changes it in place and returns None."),
    (HUGE, HUGE, "two ranks have 1.5e308 in float64, which is finite", "It is too large for "
     "float32: keep its type. And the sum of finite losses may overflow: reduce a flag (0 or 1), "
     "not the losses."),
    (FINITE, INF, "the last rank has infinity", f"{BOTH} {LOST}"),
    (NAN, FINITE, "the first rank has NaN", LOST),
    (FINITE, NAN, "the last rank has NaN", LOST),
    (-INF, FINITE, "the first rank has minus infinity", BOTH),
    (FINITE, FINITE, "all losses finite again, after the calls with NaN", KEPT),
)
GRAPH = ("The loss has a graph, and backward comes after this: torch.isfinite(loss) gives a tensor "
         "of its own, without a graph; detach_() would cut the loss off.")
ONE_DECIDES = ("{}: one rank alone decides or knows. all_reduce takes the flags of all ranks and "
               "leaves the result on all of them.")
FAILURES = {"RuntimeError: .*requires grad.*": GRAPH,
            STUCK: "All ranks must make the same calls: reduce first, on every rank, and look at "
            "the result then.",
            "ValueError: Global rank 0 is not part of group .*": ONE_DECIDES.format("Rank 0")}


def _trial(all_ranks_finite, ranks):
    for of_first, of_last, situation, hint in CASES:
        if ranks.group and 0 in ranks.members:  # whatever the other group has meanwhile
            of_first = of_last = FINITE
            situation, hint = "all losses of this group finite", ""
        values = [of_first, *[FINITE] * (ranks.size - 2), of_last][:ranks.size]
        dtype = torch.float64 if of_first == HUGE else torch.float32
        weight = torch.tensor(values[ranks.index], device=device(), dtype=dtype, requires_grad=True)
        loss = weight * 1  # as a model's loss, it has a graph
        with Traffic() as traffic, Waits() as waits:
            answer = all_ranks_finite(loss, **ranks.keywords)
        same = torch.equal(loss.detach().nan_to_num(), weight.detach().nan_to_num())
        if loss.requires_grad:
            loss.backward()
        yield partial(_compare, f"{situation}, {ranks}", answer, all(map(math.isfinite, values)),
                      same and weight.grad is not None, traffic.calls,
                      waits.missing(sum(traffic.calls.values())), hint)


def _compare(where, answer, right, is_kept, calls, missing, hint):
    expect(isinstance(answer, bool), f"it returned a {type(answer).__name__}, {where}",
           "Return a bool, on every rank. (all_reduce works in place and returns None.)")
    expect(is_kept, f"the loss was changed: {where}", "all_reduce works in place. Reduce a flag of "
           f"your own, not the loss. {GRAPH}")
    all_awaited(missing, where)
    if not calls:
        hint = "Each rank looks at its own loss only: reduce the flag over all ranks, then look."
    if others := sorted({"reduce", "broadcast"}.intersection(calls)):
        hint = ONE_DECIDES.format(", ".join(others))
    expect(answer == right, f"{where}: the answer is {answer}; right is {right}", hint)
    expect(sum(calls.values()) <= 1, f"{where}: it made {sum(calls.values())} calls",
           "One all_reduce of one number is enough.")


def check_all_ranks_finite(all_ranks_finite):
    on_groups(_trial, all_ranks_finite, failures=FAILURES, timeout=5)
    yield "the same answer on all of 1, 2, 3, 4 ranks: NaN and infinity on one rank are seen by all"
    yield "the loss is unchanged; one collective"
    yield "right in a group that is not all ranks"
