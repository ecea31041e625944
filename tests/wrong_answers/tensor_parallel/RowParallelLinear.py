"""Lab 08: what goes wrong in a layer whose inputs are cut."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.tensor_parallel import RowParallelLinear
from ranklab.tensor_parallel.regions import copy_to_region, reduce_from_region

WEIGHT = "split_parameter(linear.weight, 1, group)"
LEAVE = "self.leave(F.linear(x, self.weight), self.group)"
ADD = "y if self.bias is None else y + self.outside(self.bias, self.group)"
OF_BIAS = "self.outside(self.bias, self.group)"


def _wrong(*edits, says, **named):
    return mutant(RowParallelLinear, *edits, says=says, dist=dist, torch=torch,
                  copy_to_region=copy_to_region, reduce_from_region=reduce_from_region, **named)


WRONG = [
    _wrong("if self.bias is None", "if self.bias is None or x.dim() == 2",
           says="x of two dims: the value"),
    _wrong(LEAVE, "self.leave(F.linear(x, self.weight, self.bias), self.group)", ADD, "y",
           says="y gets it R times"),
    _wrong(LEAVE, "self.leave(F.linear(x, self.weight, self.bias if dist.get_rank(self.group) == 0 "
           "else None), self.group)", ADD, "y", says="adds the whole bias outside"),
    _wrong("self.bias = linear.bias", "self.bias = None if linear.bias is None else torch.nn."
           "Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)",
           says="the bias is not that of linear"),
    _wrong("self.group, self.leave", "self.whole, self.group, self.leave", "= group, leave",
           "= [linear], group, leave", says="keeps the whole weight", called="kept_in_a_list"),
    _wrong(LEAVE, "F.linear(x, self.weight)", says="leaves by self.leave"),
    _wrong(WEIGHT, "split_parameter(linear.weight, 0, group)", says="dim 0|dim 1"),
    _wrong(OF_BIAS, "self.bias", says="Where each rank has its own tokens, that sums"),
    _wrong(LEAVE, "reduce_from_region(F.linear(x, self.weight), self.group)",
           says="each rank its tokens.*of shape.*leaves by self.leave"),
    _wrong("self.bias = linear.bias", "self.bias = split_parameter(linear.bias, 0, group)",
           says="a row layer keeps it whole"),
    _wrong(LEAVE, "self.leave(F.linear(x, self.weight, None if self.bias is None else self.bias / "
           "dist.get_world_size(self.group)), self.group)", ADD, "y",
           says="gradient of bias is 1/4 of what is right"),
    _wrong("F.linear(x, self.weight)", "F.linear(copy_to_region(x, self.group), self.weight)",
           says="gradient of x|backward sends", called="enters_as_well"),
    _wrong(LEAVE, "self.leave(F.linear(x, self.weight))", says="Pass `group` on"),
    _wrong(ADD, "y + self.outside(self.bias, self.group)", says="There may be no bias"),
    _wrong(OF_BIAS, "copy_to_region(self.bias, self.group)", says="gradient of bias is 4 times",
           called="always_sums_the_bias"),
    _wrong(ADD, "y", says="the value is .*the bias", called="no_bias"),
    _wrong("self.group, self.leave", "self.linear, self.group, self.leave", "= group, leave",
           "= linear, group, leave", says="linear.weight.*parts only"),
]
