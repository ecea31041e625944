"""Attention over several ranks: each has some of the heads, which do not depend on each other."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab.ranks import shard_range
from ranklab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ranklab.tensor_parallel.regions import (
    RegionFunction, identity, copy_to_region, reduce_from_region, all_reduce_sum,
)
from ranklab.tensor_parallel.split import ShardSpec, take


def parallel_attention(attention, group=None, enter=copy_to_region, leave=reduce_from_region):
    """Make `attention` compute only this rank's heads, in place; return it.

    Its children q, k, v and out are nn.Linear, and its head_size is D. Each rank has H/tp heads of
    q, in rank order, and the heads of k and v that these need: with grouped queries, H/KV heads of
    q share one head of k and v. x enters the region once, for q, k and v together.
    Cost: what enter and leave send; if the ranks do not divide KV, also an all-reduce of k's and
        of v's gradients in backward.
    Raises: ValueError if the ranks do not divide H, or KV does not divide H.
    Lab: 08
    """
    D, rank, R = attention.head_size, dist.get_rank(group), dist.get_world_size(group)
    H, KV = attention.q.out_features // D, attention.k.out_features // D
    if H % R or H % KV:
        raise ValueError(f"tp={R} and n_kv_head={KV} must divide n_head={H}")
    needed = [head // (H // KV) for head in shard_range(H, rank, R)]  # one for each of my heads
    attention.q = ColumnParallelLinear(attention.q, group, identity)
    attention.k = KeyValueHeads(attention.k, needed, D, group)
    attention.v = KeyValueHeads(attention.v, needed, D, group)
    attention.out = RowParallelLinear(attention.out, group, leave)
    enter_before(attention, enter, group)
    return attention


def enter_before(module, enter, group=None):
    """Pass the module's first argument, or `hidden_states`, through `enter` before its forward."""

    def hook(module, args, kwargs):
        if args:
            return (enter(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


class KeyValueHeads(nn.Module):
    """Compute the heads of `linear` that this rank's query heads need.

    needed: for each query head of this rank, the number of its head in `linear`. A head needed by
        several ranks is copied to each of them, and its gradient is summed over them.
    Shape: (..., C) -> (..., heads * D): each needed head once; but if some are needed more often
        than others, one head for each query head.
    Cost: if ranks share heads, an all-reduce of the whole weight's gradient in backward.
    Raises: ValueError if these are not the heads that the rank's query heads need.
    """

    def __init__(self, linear, needed, head_size, group=None):
        super().__init__()
        self.group, self.head_size = group, head_size
        self.split = heads_split(linear.out_features, needed, head_size, group)
        self.weight, self.bias = take(linear.weight, self.split), take(linear.bias, self.split)
        heads = sorted(set(needed))
        is_even = len({needed.count(head) for head in heads}) == 1
        self.repeats = None if is_even else [heads.index(head) for head in needed]

    def forward(self, x):
        weight, bias = (self.with_summed_gradient(p) for p in (self.weight, self.bias))
        y = F.linear(x, weight, bias)
        if self.repeats is None:
            return y
        heads = y.unflatten(-1, (-1, self.head_size))  # (B, T, heads, D)
        return heads[..., self.repeats, :].flatten(-2)

    def with_summed_gradient(self, parameter):
        """Return the parameter; its gradient will be summed over all ranks that hold it."""
        if parameter is None or set(self.split.copies) == {1}:
            return parameter
        return RegionFunction.apply(parameter, self.group, identity, self.sum_over_holders)

    def sum_over_holders(self, gradient, group):
        """All-reduce the whole gradient, zero outside each rank's part; return this rank's part."""
        full = gradient.new_zeros(self.split.size, *gradient.shape[1:])
        for start, part in self.split.pieces_of(gradient):
            full[start : start + len(part)] = part
        full = all_reduce_sum(full, group)
        return torch.cat([full[start:stop] for start, stop in self.split.ranges])


def heads_split(size, needed, head_size, group=None):
    """Make the ShardSpec of a matrix of heads of which this rank has those in `needed`.

    It has one range for each head. This rank's heads determine those of all ranks, because query
    heads are split evenly, in rank order.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    heads, n = size // head_size, len(needed)  # n query heads a rank
    sharing = R * n // heads  # query heads to a head
    holders = [{query // n for query in range(head * sharing, (head + 1) * sharing)}
               for head in range(heads)]  # fmt: skip
    local_heads = [head for head in range(heads) if rank in holders[head]]
    expected = [query * heads // (R * n) for query in range(rank * n, (rank + 1) * n)]
    if R * n % heads == 0 and list(needed) != expected:
        raise ValueError(f"the query heads of rank {rank} need the key heads {expected}, not "
                         f"{needed}")
    ranges = tuple((head * head_size, (head + 1) * head_size) for head in local_heads)
    return ShardSpec(0, size, ranges, tuple(len(holders[head]) for head in local_heads))
