"""A linear layer over several ranks: its outputs cut (column), or its inputs cut (row).

The names are those of the paper, which writes y = x A. torch keeps A transposed, (out, in): a
column of A is a row of `weight`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab.tensor_parallel.regions import identity, copy_to_region, reduce_from_region
from ranklab.tensor_parallel.split import split_parameter


class ColumnParallelLinear(nn.Module):
    """`linear`, of whose outputs this rank computes 1/R.

    enter  how x gets into the region; identity where it is there already, as for q, k and v
    parts  see even_split
    weight, bias  know their ShardSpec (split_of), for the gradient's norm and for checkpoints
    shape  (..., in) -> (..., out/tp)
    cost   that of enter: copy_to_region sends nothing forward, one all-reduce of x backward
    error  ValueError where the ranks do not divide the outputs
    lab    08
    """

    def __init__(self, linear, group=None, enter=copy_to_region, parts=None):
        super().__init__()
        self.group, self.enter = group, enter
        self.weight = split_parameter(linear.weight, 0, group, parts)  # (out/tp, in)
        self.bias = split_parameter(linear.bias, 0, group, parts)

    def forward(self, x):
        return F.linear(self.enter(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """`linear`, of whose inputs this rank has 1/R: what ColumnParallelLinear put out.

    leave    how the sum over ranks gets out of the region
    outside  what the bias goes through, (parameter, group) -> parameter: it is added outside. Where
             each rank has its tokens there, that is copy_to_region: each knows a part of its
             gradient.
    shape    (..., in/tp) -> (..., out)
    cost     that of leave: reduce_from_region sends one all-reduce forward, nothing backward
    error    ValueError where the ranks do not divide the inputs
    lab      08
    """

    def __init__(self, linear, group=None, leave=reduce_from_region, outside=identity):
        super().__init__()
        self.group, self.leave, self.outside = group, leave, outside
        self.weight = split_parameter(linear.weight, 1, group)  # (out, in/tp)
        self.bias = linear.bias  # whole on each rank, and added once

    def forward(self, x):
        y = self.leave(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.outside(self.bias, self.group)


class OverlappedColumnLinear(ColumnParallelLinear):
    """ColumnParallelLinear; in backward the weight's gradient is computed while x's is summed.

    cost   as with copy_to_region; the all-reduce is asynchronous
    """

    def forward(self, x):
        y = Overlapped.apply(x, self.weight, self.group)
        return y if self.bias is None else y + self.bias


class Overlapped(torch.autograd.Function):
    """x @ weight.T; backward sends x's gradient first, and computes the weight's meanwhile."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight
        handle = dist.all_reduce(of_x, group=ctx.group, async_op=True)
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        handle.wait()
        return of_x, of_weight, None
