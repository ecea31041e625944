"""Attention over several ranks: each has some of the heads, and no head needs another."""

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
    """`attention`, changed in place, computes this rank's heads; it is returned.

    Its children q, k, v and out are nn.Linear, and its head_size is D. Each rank has H/tp heads of
    q, in rank order, and the heads of k and v that they need: with grouped queries, H/KV heads of q
    share one. x enters once for all three.
    cost   what enter and leave send; if the ranks do not divide KV, also an all-reduce of k's and
           of v's gradients in backward
    error  ValueError if the ranks do not divide H, or KV does not divide H
    lab    08
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
    """`module`'s first argument, or `hidden_states`, goes through `enter` before its forward."""

    def hook(module, args, kwargs):
        if args:
            return (enter(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


class KeyValueHeads(nn.Module):
    """Computes those heads of `linear` that this rank's query heads need.

    needed  for each query head of this rank, the number of its head in `linear`. A head that
            several ranks need is on each of them, and its gradient is the sum of theirs.
            ValueError if these are not the heads that the rank's query heads need.
    shape   (..., C) -> (..., heads * D): each needed head once; but if some are needed more often
            than others, one head for each query head
    cost    if ranks share heads: backward an all-reduce of the whole weight's gradient
    """

    def __init__(self, linear, needed, head_size, group=None):
        super().__init__()
        self.group, self.head_size = group, head_size
        self.split = heads_split(linear.out_features, needed, head_size, group)
        self.weight, self.bias = take(linear.weight, self.split), take(linear.bias, self.split)
        held = sorted(set(needed))
        is_even = len({needed.count(head) for head in held}) == 1
        self.repeats = None if is_even else [held.index(head) for head in needed]

    def forward(self, x):
        y = F.linear(x, self.shared(self.weight), self.shared(self.bias))
        if self.repeats is None:
            return y
        heads = y.unflatten(-1, (-1, self.head_size))  # (B, T, held, D)
        return heads[..., self.repeats, :].flatten(-2)

    def shared(self, parameter):
        """The parameter; its gradient will be summed over all ranks that hold it."""
        if parameter is None or set(self.split.copies) == {1}:
            return parameter
        return RegionFunction.apply(parameter, self.group, identity, self.summed_where_held)

    def summed_where_held(self, gradient, group):
        """all_reduce of the whole gradient, of which each rank has a part; this rank's part."""
        whole = gradient.new_zeros(self.split.size, *gradient.shape[1:])
        for start, part in self.split.pieces_of(gradient):
            whole[start : start + len(part)] = part
        whole = all_reduce_sum(whole, group)
        return torch.cat([whole[start:stop] for start, stop in self.split.ranges])


def heads_split(size, needed, head_size, group=None):
    """The ShardSpec of a matrix of heads where this rank has those in `needed`, a range for each.

    The heads of all ranks follow from this rank's: query heads are split evenly, in rank order.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    heads, mine = size // head_size, len(needed)
    sharing = R * mine // heads  # query heads to a head
    holders = [{query // mine for query in range(head * sharing, (head + 1) * sharing)}
               for head in range(heads)]  # fmt: skip
    held = [head for head in range(heads) if rank in holders[head]]
    right = [query * heads // (R * mine) for query in range(rank * mine, (rank + 1) * mine)]
    if R * mine % heads == 0 and list(needed) != right:
        raise ValueError(f"the query heads of rank {rank} need the key heads {right}, not {needed}")
    ranges = tuple((head * head_size, (head + 1) * head_size) for head in held)
    return ShardSpec(0, size, ranges, tuple(len(holders[head]) for head in held))
