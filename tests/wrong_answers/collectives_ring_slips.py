"""Lab 02, rings: slips that a check once let through, or took for another mistake.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch
import torch.distributed as dist

from ranklab.collectives import sendrecv, ring_all_gather, ring_reduce_scatter


def _r(group):
    rank, R = (dist.get_rank(group), dist.get_world_size(group))
    return (rank, R, (rank + 1) % R, (rank - 1) % R)


def _scatter(x, group=None, out=None, chunk=torch.Tensor.tensor_split, sums=None, halves=1):
    rank, R, right, left = _r(group)
    mine = chunk(x.flatten(), R)
    if sums is None and out is not None:
        sums = out.view(-1).tensor_split(R)
    partial = mine[rank - 1].clone()
    for step in range(1, R):
        i = (rank - 1 - step) % R
        arriving = torch.empty_like(mine[i]) if sums is None else sums[i]
        for a, b in zip(partial.tensor_split(halves), arriving.tensor_split(halves)):
            sendrecv(a, right, b, left, group)
        partial = arriving.add_(mine[i])
    return partial


def _gather(shard, group=None, out=None, halves=1):
    rank, R, right, left = _r(group)
    out = shard.new_empty(R * shard.numel()) if out is None else out
    parts = out.view(-1).tensor_split(R)
    parts[rank].copy_(shard.flatten())
    for step in range(1, R):
        have, want = parts[(rank - step + 1) % R], parts[(rank - step) % R]
        for a, b in zip(have.tensor_split(halves), want.tensor_split(halves)):
            sendrecv(a, right, b, left, group)
    return out


def ring_reduce_scatter__equal_out(x, group=None, out=None):
    """that of `out`"""
    R = dist.get_world_size(group)
    return _scatter(x, group, out, sums=None if out is None else out.view(R, -1))


def ring_reduce_scatter__returns_out(x, group=None, out=None):
    """returns shape \\(7,\\)"""
    got = _scatter(x, group, out)
    return got if out is None else out


def ring_reduce_scatter__none_with_out(x, group=None, out=None):
    """returns None"""
    got = _scatter(x, group, out)
    return got if out is None else None


def ring_reduce_scatter__two_messages(x, group=None, out=None):
    """One message a step"""
    return _scatter(x, group, out, halves=2)


def ring_reduce_scatter__extra_empty(x, group=None, out=None):
    """backend's own barrier"""
    rank, R, right, left = _r(group)
    got = _scatter(x, group, out)
    if R > 1:
        dist.barrier(group)
    return got


def ring_all_gather__beside_out(shard, group=None, out=None):
    """new tensor elsewhere"""
    return _gather(shard, group, None if out is None else torch.empty_like(out))


def ring_all_gather__cat(shard, group=None, out=None):
    """new tensor elsewhere"""
    rank, R, right, left = _r(group)
    n = R * shard.numel() if out is None else out.numel()
    sizes = [t.numel() for t in torch.empty(n).tensor_split(R)]
    parts = [None] * R
    parts[rank] = shard.flatten()
    for step in range(1, R):
        w = (rank - step) % R
        arriving = shard.new_empty(sizes[w])
        parts[w] = sendrecv(parts[(w + 1) % R], right, arriving, left, group)
    got = torch.cat(parts)
    return got if out is None else got.view(out.shape)


def ring_all_gather__two_messages(shard, group=None, out=None):
    """One message a step"""
    return _gather(shard, group, out, halves=2)


def ring_all_gather__float_out(shard, group=None, out=None):
    """same type"""
    rank, R, right, left = _r(group)
    return _gather(shard, group, torch.empty(R * shard.numel()) if out is None else out)


def ring_all_reduce__none_with_out(x, group=None, out=None):
    """returns None"""
    place = x.new_empty(x.shape) if out is None else out
    got = ring_all_gather(ring_reduce_scatter(x, group, place), group, place)
    return got if out is None else None


def ring_all_reduce__not_a_ring(x, group=None, out=None):
    """neighbours only"""
    out = x.new_empty(x.shape) if out is None else out
    rank, R, _, _ = _r(group)
    mine = x.flatten().tensor_split(R)
    total = mine[rank].clone()
    for s in range(1, R):
        to, source = (rank + s) % R, (rank - s) % R
        total += sendrecv(mine[to], to, torch.empty_like(total), source, group)
    parts = out.view(-1).tensor_split(R)
    parts[rank].copy_(total)
    for s in range(1, R):
        sendrecv(parts[rank], (rank + s) % R, parts[(rank - s) % R], (rank - s) % R, group)
    return out


def ring_all_reduce__kept_buffer(x, group=None, out=None, kept={}):
    """new in each call"""
    if out is None:
        out = kept.setdefault((x.shape, x.dtype), x.new_empty(x.shape))
    return ring_all_gather(ring_reduce_scatter(x, group, out), group, out)
