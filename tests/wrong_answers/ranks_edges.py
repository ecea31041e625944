"""Lab 00: answers that were right on a group of two, in a first call or by chance, and wrong leads.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch
import torch.distributed as dist


def _n(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return rank, size, (rank + 1) % size, (rank - 1) % size


def pass_the_token__twice_round(group=None):
    """The token went round twice"""
    rank, size, after, before = _n(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    for turn in range(2):
        if rank or turn:
            dist.recv(token, group=group, group_src=before)
        dist.send(token + 1, group=group, group_dst=after)
    if rank == 0:
        dist.recv(token, group=group, group_src=before)
    return token.item()


def pass_the_token__even_ranks_first(group=None):
    """rank 2 sends before it has received"""
    rank, size, after, before = _n(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank % 2 == 0:
        dist.send(token + 1, group=group, group_dst=after)
        dist.recv(token, group=group, group_src=before)
    else:
        dist.recv(token, group=group, group_src=before)
        dist.send(token + 1, group=group, group_dst=after)
    return token.item()


def pass_the_token__two_in_a_group(group=None):
    """ranks are counted anew"""
    rank, size, after, before = _n(group)
    if group is not None:  # right for two members only
        after = before = 1 - min(rank, 1)
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


def pass_the_token__send_not_awaited(group=None):
    """never waited for"""
    rank, size, after, before = _n(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank:
        dist.recv(token, group=group, group_src=before)
    value = token.item()
    pass_the_token__send_not_awaited.kept = sent = token + 1
    pass_the_token__send_not_awaited.handle = dist.isend(sent, group=group, group_dst=after)
    if rank == 0:
        dist.recv(token, group=group, group_src=before)
        return token.item()
    return value


def ring_shift__itself_when_alone(x, group=None):
    """x itself, not a new tensor"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x
    got = torch.empty_like(x)
    work = dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    work.wait()
    return got


def ring_shift__awaits_the_last_only(x, group=None):
    """never waited for"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    works = [dist.isend(x, group=group, group_dst=after),
             dist.irecv(got, group=group, group_src=before)]
    works[-1].wait()
    dist.barrier(group)  # so that it is right by chance, always
    return got


def ring_shift__swaps_in_a_group(x, group=None):
    """group of ranks 1, 3 and 4 .*rank after it"""
    rank, size, after, before = _n(group)
    if size == 1:
        return x.clone()
    if group is not None:
        after, before = before, after
    got = torch.empty_like(x)
    work = dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    work.wait()
    return got


def ring_shift__floats_are_float32(x, group=None):
    """x's type and shape"""
    rank, size, after, before = _n(group)
    x = x.float() if x.is_floating_point() else x
    got = torch.empty_like(x)
    if size == 1:
        return x.clone()
    work = dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    work.wait()
    return got


def all_ranks_finite__by_numpy(loss, group=None):
    """has a graph"""
    import numpy as np
    flag = torch.tensor(int(np.isfinite(loss.numpy())))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def all_ranks_finite__cuts_the_graph(loss, group=None):
    """has a graph"""
    flag = torch.isfinite(loss.detach_()).int()
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def all_ranks_finite__as_float32(loss, group=None):
    """float64"""
    flag = torch.isfinite(loss.float()).int()
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def all_ranks_finite__keeps_its_flag(loss, group=None, flag=torch.ones(1, dtype=torch.int32)):
    """kept from an earlier call"""
    flag.mul_(torch.isfinite(loss).int())
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def all_ranks_finite__not_awaited(loss, group=None):
    """never waited for"""
    flag = torch.isfinite(loss).int()
    all_ranks_finite__not_awaited.kept = flag, dist.all_reduce(
        flag, dist.ReduceOp.MIN, group=group, async_op=True)
    return bool(flag)


def all_ranks_finite__gathers_objects(loss, group=None):
    """calls"""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, bool(torch.isfinite(loss)), group=group)
    return all(found)


def all_ranks_finite__two_in_a_group(loss, group=None):
    """over the group"""
    flag = torch.isfinite(loss).int()
    if group is None:
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)
    rank, size, _, _ = _n(group)
    other = torch.empty_like(flag)
    if rank < 2:  # the other of two members
        work = dist.isend(flag, group=group, group_dst=1 - rank)
        dist.recv(other, group=group, group_src=1 - rank)
        work.wait()
        flag *= other
    return bool(flag)
