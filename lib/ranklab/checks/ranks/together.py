"""all_ranks_finite: one answer for all ranks, by one collective."""

import torch
import torch.distributed as dist

from ranklab.course.exercise import Mistake, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

FINITE, NAN, INF, HUGE = 1.5, float("nan"), float("inf"), 3e38


def _finite_trial(all_ranks_finite):
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for of_first, of_last in ((FINITE, FINITE), (NAN, FINITE), (FINITE, INF), (HUGE, HUGE)):
        value = of_first if rank == 0 else of_last if rank == size - 1 else FINITE
        loss = torch.tensor(value, device=device())
        with Traffic() as traffic:
            answer = all_ranks_finite(loss)
        same = torch.equal(loss.nan_to_num(), torch.tensor(value, device=device()).nan_to_num())
        found.append((answer, same, traffic.sent_messages, dict(traffic.calls)))
    return found


def check_all_ranks_finite(all_ranks_finite):
    for size in (1, 2, 3, 4):
        seen = on_ranks(_finite_trial, all_ranks_finite, ranks=size, timeout=5)
        for case, right in enumerate((True, False, size == 1, True)):
            answers = [of_rank[case][0] for of_rank in seen]
            _compare_finite(answers, right, case, size)
        for rank, of_rank in enumerate(seen):
            if not all(same for _, same, _, _ in of_rank):
                raise Mistake(f"rank {rank} of {size}: the loss was changed",
                              "all_reduce works in place. Reduce a flag of your own, not the loss.")
    yield "the same answer on all of 1, 2, 3, 4 ranks: NaN and infinity on one rank are seen by all"
    yield "the loss is unchanged"
    for rank, of_rank in enumerate(seen):
        calls = of_rank[0][3]
        if sum(calls.values()) != 1:
            raise Mistake(f"rank {rank} made {sum(calls.values())} calls: {calls}",
                          "One all_reduce of one number is enough.")
    yield "one collective"


def _compare_finite(answers, right, case, size):
    case_name = ("all losses finite", "rank 0 has NaN", "the last rank has infinity",
                 "two ranks have 3e38, which is finite")[case]
    if any(not isinstance(answer, bool) for answer in answers):
        raise Mistake(f"it returned a {type(answers[0]).__name__}", "Return a bool.")
    if all(answer == right for answer in answers):
        return
    if len(set(answers)) > 1:
        hint = ("The ranks disagree: each looks at its own loss only. That is the bug you came to "
                "mend. Reduce the flag over all ranks.")
    elif case == 3:
        hint = "The sum of finite losses may overflow. Reduce a flag (0 or 1), not the losses."
    else:
        hint = "One rank that is not finite decides for all: the MIN over ranks of a 0/1 flag."
    raise Mistake(f"{case_name} ({size} ranks): the ranks answer {answers}; right is {right} on "
                  "all", hint)
