"""Wrong answers to join_uneven."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.data_parallel import join_uneven

LAST = "model.buffers_from = last = going_on.item()"
HAND_OVER = "broadcast_parameters(model.module, last, model.group)"
RESET = "model.joining, model.buffers_from = False, 0"

WRONG = [
    mutant(join_uneven, "ReduceOp.MAX", "ReduceOp.MIN",
           says="no rank's batches are thrown away"),
    mutant(join_uneven, "iter(batches)", "iter(batches[:len(batches)])",
           says="A loader may have no length"),
    mutant(join_uneven, "iter(batches)", "iter(list(batches))",
           says="An epoch need not fit into memory"),
    mutant(join_uneven, "next(batches, None)", "next(batches)",
           says=r"next\(batches, None\) gives None"),
    mutant(join_uneven, "-1 if batch is None else rank", "rank if batch else -1",
           says="`batch is None`, not `if batch`"),
    mutant(join_uneven, "-1 if", "0 if", "going_on < 0", "going_on == 0 and batch is None",
           says="until the result is -1"),
    mutant(join_uneven, "    else:\n                yield batch", "    yield batch",
           says="A None was yielded where a batch was expected"),
    mutant(join_uneven, "yield batch", "return batch", says="It must be a generator"),
    mutant(join_uneven, LAST, "last = going_on.item()",
           says="the buffers of `model.buffers_from` count"),
    mutant(join_uneven, "model.module, last", "model.module, 0",
           says="that of rank 0, when its own batches were over .*of a rank that took part"),
    mutant(join_uneven, "model.module, last", "model.module, going_on.item()",
           says="Keep the last result before it"),
    mutant(join_uneven, HAND_OVER, "pass",
           says="when its own batches were over At the end broadcast_parameters"),
    mutant(join_uneven, LAST, f"{LAST}\n            {HAND_OVER}",
           says="the model's weights once, at the end"),
    mutant(join_uneven, "get_rank(model.group)", "get_rank()",
           says=r"dist.get_rank\(model.group\)"),
    mutant(join_uneven, "last, model.group)", "last)",
           says="Pass model.group on to every collective"),
    mutant(join_uneven, "model.joining = True", "pass",
           says="inside the loop model.joining is not True"),
    mutant(join_uneven, "try:", "if True:", "finally:", "if True:",
           says="left by a break model.joining is True, .*in a `finally`"),
    mutant(join_uneven, RESET, "model.joining = False",
           says="after the loop model.joining is False, model.buffers_from is 1"),
    mutant(join_uneven, HAND_OVER, "pass", RESET, f"{RESET}\n        {HAND_OVER}",
           says="before the `finally`"),
]


def join_uneven__each_for_itself(batches, model):
    """must go on taking part"""
    yield from batches


def join_uneven__repeats_the_last_batch(batches, model):
    """must not repeat one"""
    batches = list(batches)
    count = torch.tensor(len(batches))
    dist.all_reduce(count, dist.ReduceOp.MAX, group=model.group)
    for k in range(count):
        yield batches[k % len(batches)] if batches else (9, torch.zeros(4, 6))
