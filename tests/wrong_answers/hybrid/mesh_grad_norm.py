"""Lab 12: what goes wrong in the norm of gradients that are all over a mesh."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.engine import device
from ranklab.mesh import mesh_grad_norm

REDUCE = "    dist.all_reduce(total, group=group)\n"
SQUARE = "gradient.double().square().sum() / copies"
RETURN = "return total.sqrt().float()"
LOOP = f"        total += {SQUARE}\n"


def _wrong(*edits, says, **named):
    return mutant(mesh_grad_norm, *edits, says=says, **named)


WRONG = [
    _wrong(" / copies", "", says="divide its square by copies"),
    _wrong(" / copies", " * copies", says="with copies as factors"),
    _wrong(REDUCE, "", says="that of this rank alone"),
    _wrong(REDUCE, "    total = total.sqrt()\n" + REDUCE, RETURN, "return total.float()",
           says="take the root last", called="the_norms_are_summed"),
    _wrong(SQUARE, "gradient.square().sum().double() / copies", says=r"gradient\.double\(\)"),
    _wrong(SQUARE, "gradient.float().square().sum() / copies", "dtype=torch.float64",
           "dtype=torch.float32", says=r"large.*gradient\.double\(\)", called="in_float32"),
    _wrong("group=group", "op=dist.ReduceOp.AVG, group=group", called="a_mean",
           says="take the root last|Avg|AVG"),
    _wrong(", group=group)", ")", says="in the group|does not end"),
    _wrong(SQUARE, "(gradient.double() / gradient.abs().max()).square().sum() * gradient.abs().max("
           ").double()**2 / copies", says="zeros, .* is nan.*The norm of zeros is 0",
           called="scaled_by_the_largest"),
    _wrong(RETURN, "return total.float()", says="take the root last", called="no_root"),
    _wrong(RETURN, "return total.sqrt().item()", says="take the root last", called="a_number"),
    _wrong(RETURN, "return total.sqrt()", says="float64, not torch.float32"),
    _wrong(SQUARE, "(gradient.double().norm() / copies)**2", says="take the root last",
           called="norms_divided_by_copies"),
    _wrong(SQUARE, "gradient.double().norm() / copies", RETURN, "return total.float()",
           says="take the root last", called="norms_are_added"),
    _wrong(REDUCE, "", LOOP, f"{LOOP}        dist.all_reduce(total, group=group)\n",
           says="does not end|not one of 8", called="an_all_reduce_for_each_gradient"),
    _wrong(REDUCE, "    total = total.sqrt().nan_to_num(0, 0, 0)**2\n" + REDUCE,
           says="all must skip the step, or none"),
    _wrong(SQUARE, "gradient.mul_(1.0).div_(2).double().square().sum() * 4 / copies",
           says="a gradient is changed"),
    _wrong(REDUCE, "    total = total.float()\n" + REDUCE, says=r"gradient\.double\(\)",
           called="float32_travels"),
    _wrong("    total = torch.zeros((), dtype=torch.float64, device=device())\n",
           "    if not held:\n        return torch.zeros(())\n    total = torch.zeros((), dtype="
           "torch.float64, device=device())\n", says="also one that holds nothing"),
    _wrong("total = torch.zeros((), dtype=torch.float64, device=device())", "total = 0",
           says=r"Begin with torch\.zeros"),
]


def mesh_grad_norm__gathered_for_each_rank(held, group=None):
    """messages of .* bytes, not one of 8"""
    total = torch.zeros(2, dtype=torch.float64, device=device())
    for gradient, copies in held:
        total[0] += gradient.double().square().sum() / copies
        total[1] += gradient.numel()
    dist.all_reduce(total, group=group)
    return total[0].sqrt().float()
