"""Lab 08: what goes wrong in a layer whose outputs are cut."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.tensor_parallel import ColumnParallelLinear
from ranklab.tensor_parallel.regions import copy_to_region

WEIGHT = "split_parameter(linear.weight, 0, group, parts)"
BIAS = "split_parameter(linear.bias, 0, group, parts)"
ENTER = "self.enter(x, self.group)"
PART = "torch.nn.Parameter(linear.{}.chunk(dist.get_world_size(group))[dist.get_rank(group)])"


def _wrong(*edits, says, **named):
    return mutant(ColumnParallelLinear, *edits, says=says, dist=dist, torch=torch,
                  copy_to_region=copy_to_region, **named)


WRONG = [
    _wrong(ENTER, "x", says="x enters by self.enter"),
    _wrong(WEIGHT, "split_parameter(linear.weight, 1, group, parts)", says="dim 0"),
    _wrong(BIAS, "linear.bias", says="a column layer cuts it"),
    _wrong(WEIGHT, "split_parameter(linear.weight, 0, group)", BIAS,
           "split_parameter(linear.bias, 0, group)", says="parts"),
    _wrong(ENTER, "copy_to_region(x, self.group)", says="of shape .*self.enter",
           called="always_copies"),
    _wrong("self.group, self.enter = group, enter", "self.group, self.enter, self.linear = group, "
           "enter, linear", says="linear.weight.*parts only"),
    _wrong(WEIGHT, PART.format("weight"), says="in memory|which part"),
    _wrong(WEIGHT, PART.format("weight").replace(")[", ")[").replace("linear.weight",
           "linear.weight.detach().clone()"), says="which part|in memory", called="chunked_copy"),
    _wrong(WEIGHT, "torch.nn.Parameter(split_parameter(linear.weight, 0, group, parts).detach())",
           says="which part of the whole|it is frozen", called="a_parameter_of_its_own"),
    _wrong(WEIGHT, "split_parameter(linear.weight, 0, None, parts)", BIAS,
           "split_parameter(linear.bias, 0, None, parts)", says="Pass `group` on|group"),
    _wrong("self.weight, self.bias)", "self.weight) + self.bias", says="'Tensor' and 'NoneType'"),
    _wrong("self.weight, self.bias)", "self.weight, self.bias if x.dim() == 3 else None)",
           says="x of two dims: the value"),
    _wrong("self.weight = split_parameter", "self.weight = linear.weight = split_parameter",
           says="`linear` is changed"),
    _wrong("self.group, self.enter = group, enter", "self.group, self.enter, self.whole = group, "
           "enter, [linear]", says="keeps the whole weight", called="kept_in_a_list"),
    _wrong("self.weight, self.bias)", "self.weight, self.bias).float()", says="float64",
           called="float32_only"),
    _wrong(ENTER, "self.enter(x)", says="Pass `group` on", called="enters_all_ranks"),
    _wrong(ENTER, "self.enter(self.enter(x, self.group), self.group)", says="gradient of x|of shape"
           "|4 times what is right", called="enters_twice"),
    _wrong(f"F.linear({ENTER}, self.weight, self.bias)", "torch.cat([y for y in _all(F.linear("
           f"{ENTER}, self.weight, self.bias), self.group)], -1)", says="the value is of shape",
           called="gathers_its_outputs", _all=lambda y, group: torch.distributed.nn.all_gather(
               y, group=group or dist.group.WORLD)),
]
