"""A linear layer over several ranks, split by outputs (column) or by inputs (row).

The names come from the paper, which writes Y = X A. torch stores A transposed, (out, in), so a
column of A is a row of `weight`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab.tensor_parallel.regions import identity, copy_to_region, reduce_from_region
from ranklab.tensor_parallel.split import split_parameter


class ColumnParallelLinear(nn.Module):
    """Compute this rank's 1/R of the outputs of `linear`.

                         A                      Y
                   rank 0   rank 1        rank 0   rank 1
        +-----+   +-------+-------+      +-------+-------+
        |  X  | x |  A_0  |  A_1  |  =   | X A_0 | X A_1 |    each rank keeps its columns
        +-----+   +-------+-------+      +-------+-------+

    enter: brings x into the region, called as enter(x, group); identity if x is there already, as
        for q, k and v.
    parts: see even_split.
    weight, bias: each has its ShardSpec (split_of), for the gradient norm and for checkpoints.
    Shape: (..., in) -> (..., out/tp).
    Cost: what enter sends: for copy_to_region nothing in forward, one all-reduce of x in backward.
    Raises: ValueError if the number of ranks does not divide the outputs.
    Lab: 08
    """

    def __init__(self, linear, group=None, enter=copy_to_region, parts=None):
        super().__init__()
        self.group, self.enter = group, enter
        self.weight = split_parameter(linear.weight, 0, group, parts)  # (out/tp, in)
        self.bias = split_parameter(linear.bias, 0, group, parts)

    def forward(self, x):
        return F.linear(self.enter(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Compute `linear` from this rank's 1/R of the inputs, as ColumnParallelLinear outputs them.

              X              A                    Y
        rank 0 rank 1     +-----+
        +-----+-----+     | A_0 | rank 0
        | X_0 | X_1 |  x  +-----+         =  X_0 A_0 + X_1 A_1
        +-----+-----+     | A_1 | rank 1     rank 0    rank 1     summed by one all-reduce
                          +-----+

    leave: sums the output over ranks and takes it out of the region; called as leave(y, group).
    outside: applied to the bias before it is added, as outside(bias, group): copy_to_region where
        each rank has its own tokens outside the region, because then each knows only a part of the
        bias's gradient.
    Shape: (..., in/tp) -> (..., out).
    Cost: what leave sends: for reduce_from_region one all-reduce in forward, nothing in backward.
    Raises: ValueError if the number of ranks does not divide the inputs.
    Lab: 08
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
    """A ColumnParallelLinear that computes the weight's gradient during the all-reduce of x's.

    Cost: as with copy_to_region, which it contains; the all-reduce is asynchronous.
    """

    def __init__(self, linear, group=None):
        super().__init__(linear, group)

    def forward(self, x):
        y = Overlapped.apply(x, self.weight, self.group)
        return y if self.bias is None else y + self.bias


class Overlapped(torch.autograd.Function):
    """Compute x @ weight.T; in backward, compute the weight's gradient while x's is summed."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        x_grad = gradient @ weight
        handle = dist.all_reduce(x_grad, group=ctx.group, async_op=True)
        weight_grad = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        handle.wait()
        return x_grad, weight_grad, None
