"""Lab 08: what goes wrong where a tensor leaves the region, g."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from mutants import mutant

from ranklab.tensor_parallel import reduce_from_region

CALL = "RegionFunction.apply(x, group, all_reduce_sum, identity)"


def _wrong(new, says, **named):
    return mutant(reduce_from_region, CALL, new, says=says, dist=dist, torch=torch, **named)


def _in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


WRONG = [
    _wrong("torch.distributed.nn.all_reduce(x, group=group or dist.group.WORLD)",
           "torch.distributed.nn's all_reduce sums it again"),
    _wrong("RegionFunction.apply(x, group, all_reduce_sum, all_reduce_sum)",
           "passes it on as it is", called="both_ways"),
    _wrong("x", "parts of one sum"),
    _wrong("RegionFunction.apply(x, group, identity, all_reduce_sum)",
           "parts of one sum", called="the_wrong_way"),
    _wrong("RegionFunction.apply(x, group, in_place, identity)",
           "x is changed", in_place=_in_place),
    _wrong("RegionFunction.apply(x, None, all_reduce_sum, identity)",
           "Pass `group` on", called="all_ranks"),
    _wrong("RegionFunction.apply(x / dist.get_world_size(group), group, all_reduce_sum, identity)",
           "the value is 1/4 of what is right.* no mean"),
    _wrong("RegionFunction.apply(x, group, all_reduce_sum, lambda g, group: g / "
           "dist.get_world_size(group))",
           "gradient of x is 1/4 of what is right", called="a_share_of_the_gradient"),
    _wrong("RegionFunction.apply(x.detach(), group, all_reduce_sum, identity)", "gradient of x is "
                                          "None",
           called="detached"),
]


def reduce_from_region__gathered_and_added(x, group=None):
    """forward sends"""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    total = torch.stack(parts).sum(0)
    return x + (total - x.detach())
