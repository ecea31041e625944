"""Lab 00: what goes wrong when all ranks decide together."""

import numpy as np
import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.ranks import all_ranks_finite

FLAG = "torch.isfinite(loss).all().to(torch.int32)"
REDUCE = "dist.all_reduce(finite, dist.ReduceOp.MIN, group=group)"
RETURN = "return bool(finite)"
LOOKS = "return bool(torch.isfinite(finite))"

WRONG = [
    mutant(all_ranks_finite, REDUCE, "", says="its own loss only"),
    mutant(all_ranks_finite, "finite =", "if not torch.isfinite(loss):\n        return False\n"
           "    finite =", says="All ranks must make the same calls"),
    mutant(all_ranks_finite, "MIN", "MAX", says="MIN over ranks"),
    mutant(all_ranks_finite, "group=group", "", says="Pass `group` on"),
    mutant(all_ranks_finite, REDUCE, f"finite = {REDUCE}", says="returns None"),
    mutant(all_ranks_finite, RETURN, "return finite", says="Return a bool"),
    mutant(all_ranks_finite, REDUCE, REDUCE.replace("all_reduce(finite,", "reduce(finite, 0,"),
           "group=group", "group=group", says="one rank alone decides"),
    mutant(all_ranks_finite, "torch.isfinite(loss)", "~torch.isnan(loss)",
           says="minus infinity are not finite"),
    mutant(all_ranks_finite, "torch.isfinite(loss)", "(loss < torch.inf)", says="minus infinity"),
    mutant(all_ranks_finite, "(loss)", "(loss.float())", says="float64"),
    mutant(all_ranks_finite, "(loss)", "(loss.detach_())", says="cut the loss off"),
    mutant(all_ranks_finite, "torch.isfinite(loss)", "torch.tensor(np.isfinite(loss.numpy()))",
           says="has a graph", np=np),
    mutant(all_ranks_finite, FLAG, "loss", "MIN", "SUM", RETURN, LOOKS,
           says="Reduce a flag of your own"),
    mutant(all_ranks_finite, FLAG, "loss.clone()", "MIN", "SUM", RETURN, LOOKS,
           says="may overflow"),
    mutant(all_ranks_finite, FLAG, "loss.abs()", "MIN", "MAX", RETURN, LOOKS,
           says="comparison with NaN"),
    mutant(all_ranks_finite, "group=None", "group=None, kept=torch.ones((), dtype=torch.int32)",
           FLAG, "kept.mul_(torch.isfinite(loss))", says="kept from another call"),
    mutant(all_ranks_finite, REDUCE, "dist.kept = " + REDUCE[:-1] + ", async_op=True)",
           says="never waited for"),
]


def all_ranks_finite__gathers_objects(loss, group=None):
    """calls"""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, bool(torch.isfinite(loss)), group=group)
    return all(found)
