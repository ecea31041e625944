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
)
SAME_CALLS = ("All ranks must make the same calls: reduce first, on every rank, and look at the "
              "result then.")


def _finite_trial(all_ranks_finite, case, members=None):
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
    return answer, same, sum(traffic.calls.values())


def check_all_ranks_finite(all_ranks_finite):
    for case in range(len(CASES)):
        for size in (1, 2, 3, 4):
            _compare_finite(_decide(all_ranks_finite, case, size), case, size)
    yield "the same answer on all of 1, 2, 3, 4 ranks: NaN and infinity on one rank are seen by all"
    yield "the loss is unchanged; one collective"
    # Rank 0 has NaN, but is no member.
    seen = _decide(all_ranks_finite, 3, 4, MEMBERS)
    if [answer for answer, _, _ in seen] != [True, True]:
        raise Mistake("the group of ranks 1 and 3 answers False; only rank 0 has NaN",
                      "Reduce over the group: pass group=group on.")
    yield "right in a group that is not all ranks"


def _decide(all_ranks_finite, case, size, members=None):
    try:
        seen = on_ranks(_finite_trial, all_ranks_finite, case, members, ranks=size, timeout=5)
    except Mistake as mistake:
        if "does not end" not in mistake.what:
            raise
        hint = "Reduce over the group: pass group=group on." if members else SAME_CALLS
        raise Mistake(mistake.what, hint) from None
    return [of_rank for of_rank in seen if of_rank]


def _compare_finite(seen, case, size):
    _, _, situation, right = CASES[case]
    answers = [answer for answer, _, _ in seen]
    calls = [n for _, _, n in seen]
    if any(not isinstance(answer, bool) for answer in answers):
        raise Mistake(f"it returned a {type(answers[0]).__name__}",
                      "Return a bool. (all_reduce works in place and returns None.)")
    if not all(same for _, same, _ in seen):
        raise Mistake("the loss was changed",
                      "all_reduce works in place. Reduce a flag of your own, not the loss.")
    where = f"{situation} ({size} rank{'s' if size > 1 else ''})"
    if len(set(calls)) > 1:
        raise Mistake(f"{where}: the ranks made {calls} calls", SAME_CALLS)
    if any(answer != right for answer in answers):
        hint = _why_wrong(answers, case, calls)
        raise Mistake(f"{where}: the ranks answer {answers}; right is {right}", hint)
    if max(calls) > 1:
        raise Mistake(f"each rank made {max(calls)} calls",
                      "One all_reduce of one number is enough.")


def _why_wrong(answers, case, calls):
    if case == 0:
        return ("The flag must be 1 for finite. And keep it: all_reduce changes it in place and "
                "returns None.")
    if case == 1:
        return "The sum of finite losses may overflow. Reduce a flag (0 or 1), not the losses."
    if len(set(answers)) > 1 or not any(calls):
        return ("Each rank looks at its own loss only. That is the bug you came to mend: reduce "
                "the flag over all ranks.")
    if case == 2 and len(answers) == 1:
        return "Infinity is not finite, either: torch.isfinite sees both."
    return "One rank that is not finite decides for all: the MIN over ranks of a 0/1 flag."
