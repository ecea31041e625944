"""The nine verbs in their simplest form: what each of them means, in sends and receives.

Nothing here is clever. In broadcast, reduce, gather and scatter one rank talks to all the others;
in the `all` verbs every rank talks to every other. ring.py and tree.py spread the work better.
If a result has a part for each rank, the parts are stacked: (R, ...).
"""

import torch
import torch.distributed as dist

from ranklab.collectives.wire import sendrecv
from ranklab.engine import device


def broadcast(x, src=0, group=None):
    """Copy rank src's `x` to every rank.

    Cost: src sends R-1 times x's bytes.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = x.clone(memory_format=torch.contiguous_format)
    for r in range(R):
        if r != src and rank == src:
            dist.send(out, group=group, group_dst=r)
        elif r != src and rank == r:
            dist.recv(out, group=group, group_src=src)
    return out


def gather(x, dst=0, group=None):
    """Collect every rank's `x` on rank dst, stacked; return None on the others.

    Cost: every rank but dst sends x once.
    """
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
    """Sum `x` over ranks on rank dst; return None on the others.

    Cost: every rank but dst sends x once.
    """
    stacked = gather(x, dst, group)
    return None if stacked is None else stacked.sum(dim=0, dtype=x.dtype)


def scatter(x, like, src=0, group=None):
    """Send rank src's x[r] to rank r; on the other ranks x may be None.

    like: a tensor of a piece's shape, dtype and device, because receivers must know what to expect.
    Cost: src sends R-1 pieces.
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
    """Send piece r of `x` to rank r; return the pieces from all ranks, stacked: a transpose.

    Cost: each rank sends (R-1)/R of x's bytes.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    x = x.contiguous()  # (R, ...): piece r is for rank r
    out = torch.empty_like(x)  # (R, ...): piece r came from rank r
    out[rank] = x[rank]
    for shift in range(1, R):  # in round `shift` all ranks send equally far: none is overloaded
        to, source = (rank + shift) % R, (rank - shift) % R
        sendrecv(x[to], to, out[source], source, group)
    return out


def all_gather(x, group=None):
    """Collect every rank's `x` on every rank, stacked.

    Cost: each rank sends R-1 times x's bytes.
    """
    R = dist.get_world_size(group)
    return all_to_all(x.expand(R, *x.shape), group)


def reduce_scatter(x, group=None):
    """Sum `x` over ranks; return x[r] of the sum on rank r.

    Cost: each rank sends (R-1)/R of x's bytes.
    """
    return all_to_all(x, group).sum(dim=0, dtype=x.dtype)


def all_reduce(x, group=None):
    """Sum `x` over ranks; return the sum on every rank.

    Cost: rank 0 sends R-1 times x's bytes; every other rank sends x once.
    """
    total = reduce(x, 0, group)
    return broadcast(x if total is None else total, 0, group)


def barrier(group=None):
    """Wait until every rank has called this.

    Cost: each rank sends ceil(log2 R) messages of one byte.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    token, step = torch.zeros(1, dtype=torch.uint8, device=device()), 1
    while step < R:  # after round k, I have heard (through others) from the 2^k ranks before me
        sendrecv(token, (rank + step) % R, token.clone(), (rank - step) % R, group)
        step *= 2

