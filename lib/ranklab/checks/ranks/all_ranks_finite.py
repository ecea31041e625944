"""all_ranks_finite: one answer for all ranks, by one collective."""

import math

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.handles import all_awaited
from ranklab.checks.ranks.ring_shift import LIMIT, MEMBERS, OF, THE_GROUP, in_group
from ranklab.checks.ranks.shard_range import as_text
from ranklab.checks.trial import on_ranks
from ranklab.engine import device

FINITE, NAN, INF, HUGE = 1.5, float("nan"), float("inf"), 1.5e308  # the largest is 1.8e308
CASES = (  # of the first rank, of the last rank, what it is
    (FINITE, FINITE, "all losses finite"),
    (HUGE, HUGE, "two ranks have 1.5e308 in float64, which is finite"),
    (FINITE, INF, "the last rank has infinity"),
    (NAN, FINITE, "the first rank has NaN"),
    (FINITE, NAN, "the last rank has NaN"),
    (-INF, FINITE, "the first rank has minus infinity"),
    (FINITE, FINITE, "all losses finite again, after the calls with NaN"),
)
SAME_CALLS = ("All ranks must make the same calls: reduce first, on every rank, and look at the "
              "result then.")
GRAPH = ("The loss has a graph, and backward comes after this: torch.isfinite(loss) gives a tensor "
         "of its own, without a graph; detach_() would cut the loss off.")
GROUP = ("Reduce over the group, which rank 0 is not in: pass group=group on, and ask for the size "
         "of the group.")


def _finite_trial(all_ranks_finite, members=None):
    """[(answer, is the loss unchanged, its calls, calls not waited for) of each case]; empty on a
    rank that is no member.
    """
    return [seen for case in CASES if (seen := _one_loss(all_ranks_finite, *case, members))]


def _one_loss(all_ranks_finite, of_first, of_last, _, members):
    rank, value = dist.get_rank(), FINITE
    if rank == 0:
        value = of_first
    if rank == dist.get_world_size() - 1 and of_last != FINITE:
        value = of_last
    dtype = torch.float64 if of_first == HUGE else torch.float32
    weight = torch.tensor(value, device=device(), dtype=dtype, requires_grad=True)
    loss = weight * 1  # as a model's loss, it has a graph
    seen = in_group(all_ranks_finite, loss, members=members)
    if seen is None:
        return None
    answer, traffic, missing = seen
    same = torch.equal(loss.detach().nan_to_num(), weight.detach().nan_to_num())
    if loss.requires_grad:
        loss.backward()
    return answer, same and weight.grad is not None, traffic.calls, missing


def check_all_ranks_finite(all_ranks_finite):
    for size in (1, 2, 3, 4):
        _compare_finite(all_ranks_finite, size)
    yield "the same answer on all of 1, 2, 3, 4 ranks: NaN and infinity on one rank are seen by all"
    yield "the loss is unchanged; one collective"
    _compare_finite(all_ranks_finite, OF, MEMBERS)
    yield "right in a group that is not all ranks"


def _decide(all_ranks_finite, size, members=None):
    with hinted({"RuntimeError: .*requires grad.*": GRAPH,
                 "hang: .*": GROUP if members else SAME_CALLS}):
        seen = on_ranks(_finite_trial, all_ranks_finite, members, ranks=size, timeout=LIMIT)
    return [of_rank for of_rank in seen if of_rank]


def _compare_finite(all_ranks_finite, size, members=None):
    seen = _decide(all_ranks_finite, size, members)
    for case, (of_first, of_last, situation) in enumerate(CASES):
        right = math.isfinite(of_last) and (bool(members) or math.isfinite(of_first))
        where = f"{situation} ({THE_GROUP if members else as_text(size)})"
        answers, same, made, missing = zip(*(of_rank[case] for of_rank in seen))
        for rank, answer in enumerate(answers):
            if not isinstance(answer, bool):
                raise Mistake(f"it returned a {type(answer).__name__} on rank {rank} of {size}",
                              "Return a bool, on every rank. (all_reduce works in place and "
                              "returns None.)")
        if not all(same):
            raise Mistake("the loss was changed", "all_reduce works in place. Reduce a flag of "
                          f"your own, not the loss. {GRAPH}")
        all_awaited(max(missing), where)
        calls = [sum(of_rank.values()) for of_rank in made]
        if len(set(calls)) > 1:
            raise Mistake(f"{where}: the ranks made {calls} calls",
                          GROUP if members else SAME_CALLS)
        if set(answers) != {right}:
            hint = GROUP if members else _why_wrong(answers, case, set().union(*made))
            raise Mistake(f"{where}: the ranks answer {list(answers)}; right is {right}", hint)
        if calls[0] > 1:
            raise Mistake(f"each rank made {calls[0]} calls",
                          "One all_reduce of one number is enough.")


def _why_wrong(answers, case, names):
    size, infinite = len(answers), {-INF, INF} & set(CASES[case][:2])
    hints = (  # the first that fits
        (case == 0, "The flag must be 1 for finite. And keep it: all_reduce changes it in place "
                    "and returns None."),
        (case == 1 and size == 1, "One finite number, and yet: it is float64, too large for "
                                  "float32. Keep its type."),
        (case == 1, "The sum of finite losses may overflow. Reduce a flag (0 or 1), not the "
                    "losses."),
        (case == len(CASES) - 1, "Something is kept from an earlier call. Make the flag inside, "
                                 "new in each call."),
        (names & {"reduce", "broadcast"},
         f"{', '.join(sorted(names))}: one rank alone decides or knows. all_reduce takes the flags "
         "of all ranks and leaves the result on all of them."),
        (len(set(answers)) > 1 or not names,
         "Each rank looks at its own loss only, or reads the flag before all_reduce is done. That "
         "is the bug you came to mend: reduce the flag over all ranks, then look."),
        (infinite and (size == 1 or -INF in infinite),
         "Infinity is not finite, either, and minus infinity: torch.isfinite sees both."),
        (case == 4, "NaN was seen on the first rank, and is lost here: MIN and MAX compare, and a "
                    "comparison with NaN is always False. Reduce a flag (0 or 1), not the losses."),
        (True, "One rank that is not finite decides for all: the MIN over ranks of a 0/1 flag."))
    return next(hint for fits, hint in hints if fits)
