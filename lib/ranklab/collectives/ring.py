"""Around the ring: the algorithms whose busiest rank sends the fewest bytes.

`x` is cut into R chunks, as equal as possible (torch.tensor_split: if R does not divide the length,
the first chunks are longer by one). Rank r talks to only two ranks: it sends to r + 1 and receives
from r - 1. So every link is busy in every step, and no rank is special.
"""

import torch
import torch.distributed as dist

from ranklab.collectives.wire import sendrecv


def ring_reduce_scatter(x, group=None, out=None):
    """Sum `x` over ranks, and leave chunk r of the sum on rank r, in x's dtype; `x` is unchanged.

    If `out` is given, it is as large as `x`. Partial sums are received into it, and the result is
    chunk r of `out`. Without `out` the result is a new tensor. The same holds on a single rank.
    Shape: any shape of n elements -> (n/R,).
    Cost: sends all chunks but one: (R-1)/R of x's bytes, in R-1 messages.
    Paper: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms", first half
    Lab: 02
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    chunks = x.flatten().tensor_split(R)  # chunk i: this rank's share of what rank i will own
    sums = out.view(-1).tensor_split(R) if out is not None else None
    partial = chunks[rank - 1]  # it has the longest way to go: R-1 steps to reach its owner
    for step in range(1, R):
        i = (rank - 1 - step) % R
        buffer = sums[i] if sums else torch.empty_like(chunks[i])
        sendrecv(partial, (rank + 1) % R, buffer, (rank - 1) % R, group)
        partial = buffer.add_(chunks[i])
    if R == 1:  # it is a part of x still
        partial = sums[0].copy_(partial) if sums else partial.clone()
    return partial


def ring_all_gather(shard, group=None, out=None):
    """Gather the shards of all ranks on every rank, in rank order; `shard` is unchanged.

    If `out` is given, the result is written to it, `out` is returned, and `shard` may already be
    its own chunk of `out`. If shards differ in length, `out` must be given, because its size tells
    how long each of them is.
    Shape: (n/R,) -> (n,), or the shape of `out`.
    Cost: sends all chunks but one: (R-1)/R of the result's bytes, in R-1 messages.
    Lab: 02
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if out is None:
        out = shard.new_empty(R * shard.numel())
    chunks = out.view(-1).tensor_split(R)
    chunks[rank].copy_(shard.flatten())
    for step in range(1, R):  # pass on what came last; my own shard goes first
        have, want = (rank - step + 1) % R, (rank - step) % R
        sendrecv(chunks[have], (rank + 1) % R, chunks[want], (rank - 1) % R, group)
    return out


def ring_all_reduce(x, group=None, out=None):
    """Return the sum over ranks of `x`, in x's shape, on every rank; `x` itself is unchanged.

    If `out` is given, it has x's shape (and is never `x`); the result is written to it, and `out`
    is returned. Without `out` the result is a new tensor. All ranks get the same bits.
    Cost: sends 2(R-1)/R of x's bytes per rank, in 2(R-1) messages. Where only ranks do the adding,
        they can't send less in total (arXiv 2602.22482, by a cut-set bound).
    Paper: Patarasuk & Yuan 2009
    Lab: 02
    """
    if out is None:
        out = x.new_empty(x.shape)
    shard = ring_reduce_scatter(x, group, out)
    return ring_all_gather(shard, group, out)
