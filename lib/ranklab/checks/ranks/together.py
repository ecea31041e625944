"""all_ranks_finite: one answer for all ranks, by one collective."""

import torch
import torch.distributed as dist

from ranklab.checks.ranks.ring import MEMBERS, in_group
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.engine import device

FINITE, NAN, INF, HUGE = 1.5, float("nan"), float("inf"), 3e38
CASES = (  # of the first rank, of the last rank, what it is, the right answer
    (FINITE, FINITE, "all losses finite", True),
    (HUGE, HUGE, "two ranks have 3e38, which is finite", True),
    (FINITE, INF, "the last rank has infinity", False),
    (NAN, FINITE, "the first rank has NaN", False),
    (FINITE, NAN, "the last rank has NaN", False),
    (-INF, FINITE, "the first rank has minus infinity", False),
)
SAME_CALLS = ("All ranks must make the same calls: reduce first, on every rank, and look at the "
              "result then.")
GROUP = "Reduce over the group: pass group=group on, and ask for the size of the group."


def _finite_trial(all_ranks_finite, members=None):
    """[(answer, is the loss unchanged, calls) of each case], or None on who is no member."""
    found = [_one_loss(all_ranks_finite, case, members) for case in range(len(CASES))]
    return None if None in found else found


def _one_loss(all_ranks_finite, case, members):
    rank, size = dist.get_rank(), dist.get_world_size()
    of_first, of_last, _, _ = CASES[case]
    of_me = {0: of_first, size - 1: of_last} if of_last is not FINITE else {0: of_first}
    value = of_me.get(rank, FINITE)
    loss = torch.tensor(value, device=device())
    seen = in_group(all_ranks_finite, loss, members=members)
    if seen is None:
        return None
    answer, traffic = seen
    same = torch.equal(loss.nan_to_num(), torch.tensor(value, device=device()).nan_to_num())
    return answer, same, dict(traffic.calls)


def check_all_ranks_finite(all_ranks_finite):
    for size in (1, 2, 3, 4):
        seen = _decide(all_ranks_finite, size)
        for case in range(len(CASES)):
            _compare_finite([of_rank[case] for of_rank in seen], case, size)
    yield "the same answer on all of 1, 2, 3, 4 ranks: NaN and infinity on one rank are seen by all"
    yield "the loss is unchanged; one collective"
    seen = _decide(all_ranks_finite, 4, MEMBERS)  # rank 0 is no member, rank 3 is the last one
    for case, (_, of_last, situation, _) in enumerate(CASES):
        answers, right = [of_rank[case][0] for of_rank in seen], of_last in (FINITE, HUGE)
        if answers != [right] * 2:
            raise Mistake(f"{situation}: the group of ranks 1 and 3 answers {answers}; right is "
                          f"{right}, as rank 0 is no member", GROUP)
    yield "right in a group that is not all ranks"


def _decide(all_ranks_finite, size, members=None):
    try:
        seen = on_ranks(_finite_trial, all_ranks_finite, members, ranks=size, timeout=5)
    except Mistake as mistake:
        if "does not end" not in mistake.what:
            raise
        raise Mistake(mistake.what, GROUP if members else SAME_CALLS) from None
    return [of_rank for of_rank in seen if of_rank]


def _compare_finite(seen, case, size):
    _, _, situation, right = CASES[case]
    answers = [answer for answer, _, _ in seen]
    calls = [sum(made.values()) for _, _, made in seen]
    for rank, answer in enumerate(answers):
        if not isinstance(answer, bool):
            raise Mistake(f"it returned a {type(answer).__name__} on rank {rank} of {size}",
                          "Return a bool, on every rank. (all_reduce works in place and returns "
                          "None.)")
    if not all(same for _, same, _ in seen):
        raise Mistake("the loss was changed",
                      "all_reduce works in place. Reduce a flag of your own, not the loss.")
    where = f"{situation} ({size} rank{'s' if size > 1 else ''})"
    if len(set(calls)) > 1:
        raise Mistake(f"{where}: the ranks made {calls} calls", SAME_CALLS)
    if any(answer != right for answer in answers):
        hint = _why_wrong(answers, case, set().union(*(made for _, _, made in seen)))
        raise Mistake(f"{where}: the ranks answer {answers}; right is {right}", hint)
    if max(calls) > 1:
        raise Mistake(f"each rank made {max(calls)} calls",
                      "One all_reduce of one number is enough.")


def _why_wrong(answers, case, names):
    of_first, of_last, _, _ = CASES[case]
    if case == 0:
        return ("The flag must be 1 for finite. And keep it: all_reduce changes it in place and "
                "returns None.")
    if case == 1:
        return "The sum of finite losses may overflow. Reduce a flag (0 or 1), not the losses."
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
