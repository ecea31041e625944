"""Lab 08: what goes wrong where a tensor enters the region, f."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.tensor_parallel import copy_to_region
from ranklab.tensor_parallel.regions import RegionFunction

CALL = "RegionFunction.apply(x, group, identity, all_reduce_sum)"


def _wrong(new, says, **named):
    return mutant(copy_to_region, CALL, new, says=says, dist=dist, torch=torch, **named)


def _in_place(gradient, group):
    dist.all_reduce(gradient, group=group)
    return gradient


def _summed(gradient, group):
    return _in_place(gradient.clone(), group)


WRONG = [
    _wrong("x", "gradient of x .*backward sums what comes"),
    _wrong("RegionFunction.apply(x, group, all_reduce_sum, identity)", "forward sends nothing"),
    _wrong("RegionFunction.apply(x, group, all_reduce_sum, all_reduce_sum)",
           "forward sends nothing", called="both_ways"),
    _wrong("RegionFunction.apply(x, None, identity, all_reduce_sum)",
           "Pass `group` on", called="all_ranks"),
    _wrong("RegionFunction.apply(x, group, identity, lambda g, group: all_reduce_sum(g, group) / "
           "dist.get_world_size(group))", "gradient of x is 1/4 of what is right",
           called="the_mean"),
    _wrong("RegionFunction.apply(RegionFunction.apply(x, group, identity, all_reduce_sum), group, "
           "identity, all_reduce_sum)",
           "is 4 times what is right", called="enters_twice"),
    _wrong("RegionFunction.apply(x.float(), group, identity, all_reduce_sum)", "not "
                                         "torch.float64|not "
           "torch.bfloat16", called="another_type"),
    _wrong("RegionFunction.apply(x, group, identity, in_place)", "the gradient given is changed",
           in_place=_in_place),
    _wrong("RegionFunction.apply(x.detach().requires_grad_(), group, identity, all_reduce_sum)",
           "gradient of x", called="detached"),
]


def copy_to_region__hook_on_x_itself(x, group=None):
    """A hook on x itself sees the gradients from outside"""
    if x.requires_grad:
        x.register_hook(lambda gradient: _summed(gradient, group))
    return x


def copy_to_region__hook_where_x_is_frozen(x, group=None):
    """x may need no gradient"""
    y = x.view_as(x)
    y.register_hook(lambda gradient: _summed(gradient, group))
    return y


def copy_to_region__everybody_into_one(x, group=None):
    """gradient of x|as it is"""
    return RegionFunction.apply(x.clone().zero_(), group, lambda x, group: x, lambda g, group: g)
