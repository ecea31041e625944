"""all_ranks_finite: one answer for all ranks, by one collective."""

import torch
import torch.distributed as dist

from ranklab.checks.handles import all_awaited
from ranklab.checks.ranks.ring import MEMBERS, OF, THE_GROUP, in_group
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import on_ranks
from ranklab.engine import device

FINITE, NAN, INF, HUGE = 1.5, float("nan"), float("inf"), 1.5e308  # the largest is 1.8e308
CASES = (  # of the first rank, of the last rank, what it is, the right answer
    (FINITE, FINITE, "all losses finite", True),
    (HUGE, HUGE, "two ranks have 1.5e308 in float64, which is finite", True),
    (FINITE, INF, "the last rank has infinity", False),
    (NAN, FINITE, "the first rank has NaN", False),
    (FINITE, NAN, "the last rank has NaN", False),
    (-INF, FINITE, "the first rank has minus infinity", False),
    (FINITE, FINITE, "all losses finite again, after the calls with NaN", True),
)
SAME_CALLS = ("All ranks must make the same calls: reduce first, on every rank, and look at the "
              "result then.")
GRAPH = ("The loss has a graph, and backward comes after this: torch.isfinite(loss) gives a tensor "
         "of its own, without a graph; detach_() would cut the loss off.")
GROUP = "Reduce over the group: pass group=group on, and ask for the size of the group."


def _finite_trial(all_ranks_finite, members=None):
    """[(answer, is the loss unchanged, calls, calls not awaited) of each case], or None on a
    rank that is no member.
    """
    found = [_one_loss(all_ranks_finite, case, members) for case in range(len(CASES))]
    return None if None in found else found


def _one_loss(all_ranks_finite, case, members):
    rank, size = dist.get_rank(), dist.get_world_size()
    of_first, of_last, _, _ = CASES[case]
    of_me = {0: of_first, size - 1: of_last} if of_last is not FINITE else {0: of_first}
    value = of_me.get(rank, FINITE)
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
    return answer, same and weight.grad is not None, dict(traffic.calls), missing


def check_all_ranks_finite(all_ranks_finite):
    for size in (1, 2, 3, 4):
        seen = _decide(all_ranks_finite, size)
        for case in range(len(CASES)):
            _compare_finite([of_rank[case] for of_rank in seen], case, size)
    yield "the same answer on all of 1, 2, 3, 4 ranks: NaN and infinity on one rank are seen by all"
    yield "the loss is unchanged; one collective"
    seen = _decide(all_ranks_finite, OF, MEMBERS)  # rank 0 is no member, rank 4 is the last one
    for case, (_, of_last, situation, _) in enumerate(CASES):
        answers, right = [of_rank[case][0] for of_rank in seen], of_last in (FINITE, HUGE)
        if answers != [right] * len(MEMBERS):
            raise Mistake(f"{situation}: {THE_GROUP} answers {answers}; right is {right}, as "
                          "rank 0 is no member", GROUP)
    yield "right in a group that is not all ranks"


def _decide(all_ranks_finite, size, members=None):
    try:
        seen = on_ranks(_finite_trial, all_ranks_finite, members, ranks=size, timeout=5)
    except Mistake as mistake:
        if "requires grad" in mistake.what:
            raise Mistake(mistake.what, GRAPH) from None
        if "does not end" not in mistake.what:
            raise
        raise Mistake(mistake.what, GROUP if members else SAME_CALLS) from None
    return [of_rank for of_rank in seen if of_rank]


def _compare_finite(seen, case, size):
    _, _, situation, right = CASES[case]
    answers = [one[0] for one in seen]
    calls = [sum(made.values()) for _, _, made, _ in seen]
    for rank, answer in enumerate(answers):
        if not isinstance(answer, bool):
            raise Mistake(f"it returned a {type(answer).__name__} on rank {rank} of {size}",
                          "Return a bool, on every rank. (all_reduce works in place and returns "
                          "None.)")
    if not all(same for _, same, _, _ in seen):
        raise Mistake("the loss was changed", "all_reduce works in place. Reduce a flag of your "
                      f"own, not the loss. {GRAPH}")
    where = f"{situation} ({size} rank{'s' if size > 1 else ''})"
    all_awaited(max(missing for _, _, _, missing in seen), where)
    if len(set(calls)) > 1:
        raise Mistake(f"{where}: the ranks made {calls} calls", SAME_CALLS)
    if any(answer != right for answer in answers):
        hint = _why_wrong(answers, case, set().union(*(made for _, _, made, _ in seen)))
        raise Mistake(f"{where}: the ranks answer {answers}; right is {right}", hint)
    if max(calls) > 1:
        raise Mistake(f"each rank made {max(calls)} calls",
                      "One all_reduce of one number is enough.")


def _why_wrong(answers, case, names):
    of_first, of_last, _, _ = CASES[case]
    if case == 0:
        return ("The flag must be 1 for finite. And keep it: all_reduce changes it in place and "
                "returns None.")
    if case == 1 and len(answers) == 1:
        return "One finite number, and yet: it is float64, too large for float32. Keep its type."
    if case == 1:
        return "The sum of finite losses may overflow. Reduce a flag (0 or 1), not the losses."
    if case == len(CASES) - 1:
        return "Something is kept from an earlier call. Make the flag inside, new in each call."
    if names & {"reduce", "broadcast"}:
        return (f"{', '.join(sorted(names))}: one rank alone decides or knows. all_reduce takes "
                "the flags of all ranks and leaves the result on all of them.")
    if len(set(answers)) > 1 or not names:
        return ("Each rank looks at its own loss only, or reads the flag before all_reduce is "
                "done. That is the bug you came to mend: reduce the flag over all ranks, then "
                "look.")
    if {of_first, of_last} & {INF, -INF} and (len(answers) == 1 or of_first == -INF):
        return "Infinity is not finite, either, and minus infinity: torch.isfinite sees both."
    if case == 4:
        return ("NaN was seen on the first rank, and is lost here: MIN and MAX compare, and a "
                "comparison with NaN is always False. Reduce a flag (0 or 1), not the losses.")
    return "One rank that is not finite decides for all: the MIN over ranks of a 0/1 flag."
