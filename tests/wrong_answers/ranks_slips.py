"""Lab 00: slips that a check once let through, or took for another mistake.

The first line of each docstring is a pattern that the check's output must hold.
"""

import numpy as np
import torch
import torch.distributed as dist


def _n(group):
    rank, size = (dist.get_rank(group), dist.get_world_size(group))
    return (rank, size, (rank + 1) % size, (rank - 1) % size)


def shard_range__a_generator(n, rank, size):
    """can be read twice"""
    each, rest = divmod(n, size)
    start = rank * each + min(rank, rest)
    return (i for i in range(start, start + each + (rank < rest)))


def shard_range__floats(n, rank, size):
    """not whole numbers"""
    each, rest = (n / size // 1, n % size)
    start = rank * each + min(rank, rest)
    return np.arange(start, start + each + (rank < rest))


def shard_range__starts_at_one(n, rank, size):
    """parts are shifted"""
    each, rest = divmod(n, size)
    start = rank * each + min(rank, rest)
    return range(start + 1, start + each + (rank < rest) + 1)


def pass_the_token__int32(group=None):
    """the token has 8"""
    rank, size, after, before = _n(group)
    token = torch.zeros(1, dtype=torch.int32)
    if size == 1:
        return 1
    if rank == 0:
        dist.send(token + 1, group=group, group_dst=after)
        dist.recv(token, group=group, group_src=before)
    else:
        dist.recv(token, group=group, group_src=before)
        dist.send(token + 1, group=group, group_dst=after)
    return token.item()


def pass_the_token__kept(group=None, token=torch.zeros(1, dtype=torch.int64)):
    """a second call returned"""
    rank, size, after, before = _n(group)
    if size == 1:
        return 1
    if rank == 0:
        dist.send(token + 1, group=group, group_dst=after)
        dist.recv(token, group=group, group_src=before)
    else:
        dist.recv(token, group=group, group_src=before)
        dist.send(token + 1, group=group, group_dst=after)
    return token.item()


def pass_the_token__wrong_way(group=None):
    """other way round"""
    rank, size, before, after = _n(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank == 0:
        dist.send(token + 1, group=group, group_dst=after)
        dist.recv(token, group=group, group_src=before)
    else:
        dist.recv(token, group=group, group_src=before)
        dist.send(token + 1, group=group, group_dst=after)
    return token.item()


def pass_the_token__adds_twice(group=None):
    """All see 1 too many"""
    rank, size, after, before = _n(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank == 0:
        token += 1
        dist.send(token + 1, group=group, group_dst=after)
        dist.recv(token, group=group, group_src=before)
    else:
        dist.recv(token, group=group, group_src=before)
        dist.send(token + 1, group=group, group_dst=after)
    return token.item()


def pass_the_token__world_root(group=None):
    """ranks are counted anew"""
    rank, size, after, before = _n(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if dist.get_rank() == 0:
        dist.send(token + 1, group=group, group_dst=after)
        dist.recv(token, group=group, group_src=before)
    else:
        dist.recv(token, group=group, group_src=before)
        dist.send(token + 1, group=group, group_dst=after)
    return token.item()


def ring_shift__float_buffer(x, group=None):
    """longer than the buffer"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    got = torch.empty(x.shape)
    w = dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    w.wait()
    return got


def ring_shift__as_float(x, group=None):
    """x's type and shape"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    x = x.float()
    got = torch.empty_like(x)
    w = dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    w.wait()
    return got


def ring_shift__flat(x, group=None):
    """x's type and shape"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    got = torch.empty(x.numel(), dtype=x.dtype)
    w = dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    w.wait()
    return got


def ring_shift__first_element(x, group=None):
    """return all of it"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    w = dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    w.wait()
    return got[:1]


def ring_shift__in_two_halves(x, group=None):
    """2 messages for one x"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    for a, b in zip(x.chunk(2), got.chunk(2)):
        w = dist.isend(a, group=group, group_dst=after)
        dist.recv(b, group=group, group_src=before)
        w.wait()
    return got


def ring_shift__kept_buffer(x, group=None, kept={}):
    """came in a later call"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    got = kept.setdefault((x.shape, x.dtype), torch.empty_like(x))
    w = dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    w.wait()
    return got


def ring_shift__reversed(x, group=None):
    """not x that was sent"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    w = dist.isend(x.flip(0), group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    w.wait()
    return got


def ring_shift__waits_for_the_receive_only(x, group=None):
    """wait for all of them|before the message was in it"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x, group=group, group_peer=after),
        dist.P2POp(dist.irecv, got, group=group, group_peer=before)])
    works[-1].wait()
    return got


def all_ranks_finite__less_than_inf(loss, group=None):
    """minus infinity"""
    flag = (loss < float('inf')).int()
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def all_ranks_finite__max_of_loss(loss, group=None):
    """comparison with NaN"""
    worst = loss.abs()
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return bool(torch.isfinite(worst))


def all_ranks_finite__rank_0_only(loss, group=None):
    """NoneType on rank 1"""
    flag = torch.isfinite(loss).int()
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    if dist.get_rank(group) == 0:
        return bool(flag)


def all_ranks_finite__reduce_to_0(loss, group=None):
    """one rank alone decides"""
    flag = torch.isfinite(loss).int()
    dist.reduce(flag, group_dst=0, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)
