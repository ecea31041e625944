"""Lab 02: answers that were right on a group of two, without `out` or by chance, and wrong leads.

The first line of each docstring is a pattern that the check's output must hold.
"""

import math

import numpy as np
import torch
import torch.distributed as dist

from ranklab.collectives import sendrecv, ring_all_gather, ring_all_reduce, ring_reduce_scatter


def _r(group):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    return rank, R, (rank + 1) % R, (rank - 1) % R


def _copy(x):
    return x.clone(memory_format=torch.contiguous_format)


def _broadcast(out, src, group, send=dist.send, recv=dist.recv):
    rank, R, _, _ = _r(group)
    place, have = (rank - src) % R, 1
    while have < R and out.numel():
        if place < have and place + have < R:
            send(out, group=group, group_dst=(rank + have) % R)
        elif have <= place < 2 * have:
            recv(out, group=group, group_src=(rank - have) % R)
        have *= 2
    return out


def _scatter(x, group=None, out=None, kept=None):
    rank, R, right, left = _r(group)
    mine = x.flatten().tensor_split(R)
    sums = None if out is None else out.view(-1).tensor_split(R)
    partial = mine[rank - 1].clone()
    for step in range(1, R):
        i = (rank - 1 - step) % R
        arriving = torch.empty_like(mine[i]) if sums is None else sums[i]
        if sums is None and kept is not None:
            arriving = kept.setdefault((i, R, mine[i].numel(), x.dtype), arriving)
        partial = sendrecv(partial, right, arriving, left, group).add_(mine[i])
    return partial


def _gather(shard, group, out):
    rank, R, right, left = _r(group)
    chunks = out.view(-1).tensor_split(R)
    chunks[rank].copy_(shard.flatten())
    for step in range(1, R):
        sendrecv(chunks[(rank - step + 1) % R], right, chunks[(rank - step) % R], left, group)
    return out


def _all_reduce(x, group=None, out=None):
    out = x.new_empty(x.shape) if out is None else out
    return _gather(_scatter(x, group, out), group, out)


def _server(x, server, group, total):
    rank, R, _, _ = _r(group)
    if rank != server and x.numel():
        dist.send(total, group=group, group_dst=server)
        dist.recv(total, group=group, group_src=server)
    elif x.numel():
        arriving = torch.empty_like(total)
        for worker in set(range(R)) - {server}:
            dist.recv(arriving, group=group, group_src=worker)
            total += arriving
        for worker in set(range(R)) - {server}:
            dist.send(total, group=group, group_dst=worker)
    return total


def _doubling(x, group, total, fold_group):
    rank, R, _, _ = _r(group)
    power = 2 ** (R.bit_length() - 1)
    other, nothing = torch.empty_like(total), total.new_empty(0)
    if rank >= power:
        sendrecv(total, rank - power, nothing, rank - power, fold_group)
        return sendrecv(nothing, rank - power, total, rank - power, fold_group)
    if rank + power < R:
        total += sendrecv(nothing, rank + power, other, rank + power, fold_group)
    step = 1
    while step < power:
        total += sendrecv(total, rank ^ step, other, rank ^ step, group)
        step *= 2
    if rank + power < R:
        sendrecv(total, rank + power, nothing, rank + power, fold_group)
    return total


# --- tree_broadcast -----------------------------------------------------------------------------


def tree_broadcast__receives_into_x(x, src=0, group=None):
    """x itself is changed.*copy of x"""
    return _broadcast(x if x.is_contiguous() else x.contiguous(), src, group)


def tree_broadcast__not_awaited(x, src=0, group=None):
    """never waited for|Keep the handle"""
    rank, R, _, _ = _r(group)
    handles = tree_broadcast__not_awaited.handles = []

    def send(out, **to):
        handles.append((out, dist.isend(out, **to)))

    return _broadcast(_copy(x), src, group, send=send)


def tree_broadcast__x_itself_on_src(x, src=0, group=None):
    """x itself, not a new tensor"""
    out = _broadcast(_copy(x), src, group)
    return x if dist.get_rank(group) == src else out


def tree_broadcast__x_itself_when_alone(x, src=0, group=None):
    """x itself, not a new tensor"""
    return x if dist.get_world_size(group) == 1 else _broadcast(_copy(x), src, group)


def tree_broadcast__kept_buffer(x, src=0, group=None, kept={}):
    """new in each call"""
    out = kept.setdefault((x.shape, x.dtype), _copy(x))
    return _broadcast(out.copy_(x), src, group)


def tree_broadcast__both_send(x, src=0, group=None):
    """here nobody does: only"""
    rank, R, right, left = _r(group)
    out = _copy(x)
    if R > 1 and x.numel():
        dist.send(out, group=group, group_dst=right)
        dist.recv(out, group=group, group_src=left)
    return out


# --- the ring -----------------------------------------------------------------------------------


def ring_reduce_scatter__in_float(x, group=None, out=None):
    """came in, torch.float32 went out"""
    return _scatter(x.float(), group, out)


def ring_reduce_scatter__kept_buffers(x, group=None, out=None, kept={}):
    """new in each call"""
    partial = _scatter(x, group, out, kept)
    return partial if dist.get_world_size(group) > 1 else partial.clone()


def ring_reduce_scatter__view_when_alone(x, group=None, out=None):
    """x itself, not a new tensor"""
    return _scatter(x, group, out) if dist.get_world_size(group) > 1 else x.view(-1)


def ring_all_gather__kept_buffer(shard, group=None, out=None, kept={}):
    """new in each call"""
    n = dist.get_world_size(group) * shard.numel()
    if out is None:
        out = kept.setdefault((n, shard.dtype), shard.new_empty(n))
    return _gather(shard, group, out)


def ring_all_gather__clears_out(shard, group=None, out=None):
    """shard lies in `out` already"""
    out = shard.new_empty(dist.get_world_size(group) * shard.numel()) if out is None else out
    return _gather(shard, group, out.zero_())


def ring_all_gather__alone_it_leaves_out(shard, group=None, out=None):
    """result is not in it on rank 0 of 1"""
    rank, R, _, _ = _r(group)
    if R == 1:
        return shard.clone()
    return _gather(shard, group, shard.new_empty(R * shard.numel()) if out is None else out)


def ring_all_gather__out_without_the_group(shard, group=None, out=None):
    """together with `out`"""
    if out is None:
        return _gather(shard, group, shard.new_empty(
            dist.get_world_size(group) * shard.numel()))
    return _gather(shard, None, out)


def ring_all_reduce__forgets_to_hand_out_on(x, group=None, out=None):
    """hand `out` to both"""
    return ring_all_gather(ring_reduce_scatter(x, group), group).view(x.shape)


def ring_all_reduce__makes_no_out(x, group=None, out=None):
    """hand `out` to both"""
    return ring_all_gather(ring_reduce_scatter(x, group, out), group, out).view(x.shape)


def ring_all_reduce__whole_clone(x, group=None, out=None):
    """x.contiguous\\(\\)"""
    rank, R, right, left = _r(group)
    passing, total = x.clone(), x.clone()
    for _ in range(R - 1):
        passing = sendrecv(passing, right, torch.empty_like(passing), left, group)
        total += passing
    return total if out is None else out.copy_(total)


def ring_all_reduce__out_without_the_group(x, group=None, out=None):
    """together with `out`"""
    return _all_reduce(x, group if out is None else None, out)


def ring_all_reduce__itself_when_alone(x, group=None, out=None):
    """x itself, not a new tensor"""
    return x if dist.get_world_size(group) == 1 else _all_reduce(x, group, out)


def ring_all_reduce__alone_it_leaves_out(x, group=None, out=None):
    """result is not in it on rank 0 of 1"""
    return x.clone() if dist.get_world_size(group) == 1 else _all_reduce(x, group, out)


def ring_all_reduce__two_in_a_group(x, group=None, out=None):
    """Hand `group` on"""
    if group is None:
        return _all_reduce(x, None, out)
    rank, R, _, _ = _r(group)
    other = torch.empty_like(x)  # right for two members
    if rank < 2:
        sendrecv(x, 1 - rank, other, 1 - rank, group)
    return x + other


def hierarchical_all_reduce__itself_when_alone(x, inside=None, across=None):
    """x itself, not a new tensor"""
    if dist.get_world_size() == 1:
        return x
    shard = ring_all_reduce(ring_reduce_scatter(x, inside), across)
    return ring_all_gather(shard, inside, out=x.new_empty(x.shape))


# --- server and doubling --------------------------------------------------------------------------


def parameter_server__into_x(x, server=0, group=None):
    """x itself is changed.*copy of x"""
    return _server(x, server, group, x if x.is_contiguous() else _copy(x))


def parameter_server__answers_not_awaited(x, server=0, group=None):
    """never waited for|Keep the handle"""
    rank, R, _, _ = _r(group)
    total, workers = _copy(x), set(range(R)) - {server}
    if rank == server and x.numel():
        arriving = torch.empty_like(total)
        for worker in workers:
            dist.recv(arriving, group=group, group_src=worker)
            total += arriving
        parameter_server__answers_not_awaited.kept = total, [
            dist.isend(total, group=group, group_dst=worker) for worker in workers]
    elif x.numel():
        dist.send(total, group=group, group_dst=server)
        dist.recv(total, group=group, group_src=server)
    return total


def recursive_doubling__into_x(x, group=None):
    """x itself is changed.*copy of x"""
    return _doubling(x, group, x if x.is_contiguous() else _copy(x), group)


def recursive_doubling__folds_outside_the_group(x, group=None):
    """Hand `group` on"""
    return _doubling(x, group, _copy(x), None)


def recursive_doubling__not_pairs(x, group=None):
    """the same two numbers"""
    rank, R, _, _ = _r(group)
    if R & R - 1:
        return _doubling(x, group, _copy(x), group)
    total, step = _copy(x), 1
    while step < R:
        source = (rank - step) % R
        total = total + sendrecv(total, (rank + step) % R, torch.empty_like(total), source, group)
        step *= 2
    return total


# --- the cost model -------------------------------------------------------------------------------


def _fit(sizes, seconds):
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(set(sizes.tolist())) < 2:
        raise ValueError("two different sizes or more")
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    return tuple(np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0])


def fit_alpha_beta__last_of_repeats(sizes, seconds):
    """each of them counts"""
    last = dict(zip(sizes, seconds))
    return _fit(list(last), list(last.values()))


def fit_alpha_beta__first_of_repeats(sizes, seconds):
    """each of them counts"""
    sizes, first = np.unique(np.asarray(sizes), return_index=True)
    return _fit(sizes, np.asarray(seconds)[first])


def fit_alpha_beta__fastest_of_repeats(sizes, seconds):
    """each of them counts"""
    best = {}
    for size, time in zip(sizes, seconds):
        best[size] = min(time, best.get(size, math.inf))
    return _fit(list(best), list(best.values()))


def crossover_bytes__of_a_chunk(ranks, alpha, beta):
    """the size of one chunk"""
    rounds = math.ceil(math.log2(ranks))
    rounds += ranks != 2**rounds
    more = rounds - 2 * (ranks - 1) / ranks
    steps = 2 * (ranks - 1) - rounds
    return steps * alpha / (more * beta) / ranks if more > 0 else math.inf


def crossover_bytes__bits(ranks, alpha, beta):
    """these are bits"""
    rounds = math.ceil(math.log2(ranks))
    rounds += ranks != 2**rounds
    more = rounds - 2 * (ranks - 1) / ranks
    steps = 2 * (ranks - 1) - rounds
    return 8 * steps * alpha / (more * beta) if more > 0 else math.inf
