"""The nine verbs in their plainest form: what each of them means, in sends and receives.

Nothing here is clever. In broadcast, reduce, gather and scatter one rank talks to all the others;
in the `all` verbs every rank talks to every other. ring.py and tree.py spread the work better.
Where a result has a part for each rank, the parts are stacked: (R, ...).
"""

import torch
import torch.distributed as dist

from ranklab.collectives.wire import sendrecv
from ranklab.engine import device


def broadcast(x, src=0, group=None):
    """Every rank ends with rank src's `x`. cost: src sends R-1 times x's bytes."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = x.clone(memory_format=torch.contiguous_format)
    for r in range(R):
        if r != src and rank == src:
            dist.send(out, group=group, group_dst=r)
        elif r != src and rank == r:
            dist.recv(out, group=group, group_src=src)
    return out


def gather(x, dst=0, group=None):
    """Rank dst ends with every rank's `x`, stacked; the others with None. cost: each sends x."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if rank != dst:
        dist.send(x.contiguous(), group=group, group_dst=dst)
        return None
    out = x.new_empty(R, *x.shape)  # (R, ...)
    out[dst] = x
    for r in range(R):
        if r != dst:
            dist.recv(out[r], group=group, group_src=r)
    return out


def reduce(x, dst=0, group=None):
    """Rank dst ends with the sum over ranks of `x`; the others with None. cost: each sends x."""
    stacked = gather(x, dst, group)
    return None if stacked is None else stacked.sum(dim=0, dtype=x.dtype)


def scatter(x, like, src=0, group=None):
    """Rank r ends with rank src's x[r]; elsewhere x may be None. cost: src sends R-1 pieces.

    `like` is any tensor of one piece's shape, type and device: receivers must know what comes.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if rank != src:
        out = like.new_empty(like.shape)
        dist.recv(out, group=group, group_src=src)
        return out
    for r in range(R):
        if r != src:
            dist.send(x[r].contiguous(), group=group, group_dst=r)
    return x[src].clone()


def all_to_all(x, group=None):
    """Rank r ends with the r-th piece of every rank: a transpose. cost: (R-1)/R of x's bytes."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    x = x.contiguous()  # (R, ...): piece r is for rank r
    out = torch.empty_like(x)  # (R, ...): piece r came from rank r
    out[rank] = x[rank]
    for shift in range(1, R):  # in round `shift` everybody sends that far: no rank is crowded
        to, source = (rank + shift) % R, (rank - shift) % R
        sendrecv(x[to], to, out[source], source, group)
    return out


def all_gather(x, group=None):
    """Every rank ends with every rank's `x`, stacked. cost: R-1 times x's bytes per rank."""
    R = dist.get_world_size(group)
    return all_to_all(x.expand(R, *x.shape), group)


def reduce_scatter(x, group=None):
    """Rank r ends with the sum over ranks of x[r]. cost: (R-1)/R of x's bytes per rank."""
    return all_to_all(x, group).sum(dim=0, dtype=x.dtype)


def all_reduce(x, group=None):
    """Every rank ends with the sum over ranks of `x`. cost: rank 0 sends R-1 times x's bytes."""
    total = reduce(x, 0, group)
    return broadcast(x if total is None else total, 0, group)


def barrier(group=None):
    """No rank returns before every rank has come. cost: log2 R messages of one byte per rank."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    token, step = torch.zeros(1, dtype=torch.uint8, device=device()), 1
    while step < R:  # after round k, I have heard (through others) from the 2^k ranks before me
        sendrecv(token, (rank + step) % R, token.clone(), (rank - step) % R, group)
        step *= 2

