"""Lab 02, the rest: slips that a check once let through, or took for another mistake.

The first line of each docstring is a pattern that the check's output must hold.
"""

import math

import numpy as np
import torch
import torch.distributed as dist

from ranklab.collectives import (
    sendrecv, parameter_server, ring_all_gather, ring_all_reduce,
    ring_reduce_scatter, tree_broadcast,
)


def _r(group):
    rank, R = (dist.get_rank(group), dist.get_world_size(group))
    return (rank, R, (rank + 1) % R, (rank - 1) % R)


def _ps(x, server, group):
    rank, R, _, _ = _r(group)
    total = x.clone(memory_format=torch.contiguous_format)
    if not x.numel():
        return total
    if rank != server:
        dist.send(total, group=group, group_dst=server)
        dist.recv(total, group=group, group_src=server)
    else:
        b = torch.empty_like(total)
        for w in range(R):
            if w != server:
                dist.recv(b, group=group, group_src=w)
                total += b
        for w in range(R):
            if w != server:
                dist.send(total, group=group, group_dst=w)
    return total


def _dbl(x, group, tell_all=False, power=None):
    rank, R, _, _ = _r(group)
    power = power or 2 ** (R.bit_length() - 1)
    total = x.clone(memory_format=torch.contiguous_format)
    other, nothing = (torch.empty_like(total), total.new_empty(0))
    if rank >= power:
        sendrecv(total, rank - power, nothing, rank - power, group)
    elif rank + power < R:
        total += sendrecv(nothing, rank + power, other, rank + power, group)
    if rank < power:
        step = 1
        while step < power:
            total += sendrecv(total, rank ^ step, other, rank ^ step, group)
            step *= 2
    if tell_all:
        return tree_broadcast(total, 0, group)
    if rank >= power:
        sendrecv(nothing, rank - power, total, rank - power, group)
    elif rank + power < R:
        sendrecv(total, rank + power, nothing, rank + power, group)
    return total


def _ls(s, t, w):
    s, t = (np.asarray(s, float), np.asarray(t, float))
    if len(set(s.tolist())) < 2:
        raise ValueError('two sizes')
    rows = np.stack([w(s, t), s * w(s, t)], axis=1)
    a, b = np.linalg.lstsq(rows, t * w(s, t), rcond=None)[0]
    return (float(a), float(b))


def tree_broadcast__sends_empty(x, src=0, group=None):
    """an empty x is sent"""
    rank, R, _, _ = _r(group)
    out, place, have = (x.clone(memory_format=torch.contiguous_format), (rank - src) % R, 1)
    while have < R:
        if place < have and place + have < R:
            dist.send(out, group=group, group_dst=(rank + have) % R)
        elif have <= place < 2 * have:
            dist.recv(out, group=group, group_src=(rank - have) % R)
        have *= 2
    return out


def tree_broadcast__two_messages(x, src=0, group=None):
    """in its own type"""
    rank, R, _, _ = _r(group)
    out, place, have = (x.clone(memory_format=torch.contiguous_format), (rank - src) % R, 1)
    while have < R and out.numel():
        if place < have and place + have < R:
            dist.send(out.float(), group=group, group_dst=(rank + have) % R)
        elif have <= place < 2 * have:
            b = out.float()
            dist.recv(b, group=group, group_src=(rank - have) % R)
            out.copy_(b)
        have *= 2
    return out


def tree_broadcast__log2_floor(x, src=0, group=None):
    """enough rounds"""
    rank, R, _, _ = _r(group)
    out, place, have = (x.clone(memory_format=torch.contiguous_format), (rank - src) % R, 1)
    for _ in range(int(math.log2(R))):
        if not out.numel():
            break
        if place < have and place + have < R:
            dist.send(out, group=group, group_dst=(rank + have) % R)
        elif have <= place < 2 * have and place < R:
            dist.recv(out, group=group, group_src=(rank - have) % R)
        have *= 2
    return out


def hierarchical_all_reduce__server_across(x, inside=None, across=None):
    """One rank carries more"""
    s = parameter_server(ring_reduce_scatter(x, inside), 0, across)
    return ring_all_gather(s, inside, out=x.new_empty(x.shape))


def hierarchical_all_reduce__leaders(x, inside=None, across=None):
    """One rank carries more"""
    t = ring_all_reduce(x, inside)
    if dist.get_rank(inside) == 0:
        t = ring_all_reduce(t, across)
    return tree_broadcast(t, 0, inside)


def fit_alpha_beta__by_size(sizes, seconds):
    """not by its size"""
    return _ls(sizes, seconds, lambda s, t: 1 / s)


def fit_alpha_beta__by_root(sizes, seconds):
    """or by a root"""
    return _ls(sizes, seconds, lambda s, t: t ** (-0.5))


def fit_alpha_beta__no_repeats(sizes, seconds):
    """may come twice"""
    if len(set(sizes)) < len(sizes):
        raise ValueError('sizes must differ')
    return _ls(sizes, seconds, lambda s, t: 1 / t)


def fit_alpha_beta__needs_three(sizes, seconds):
    """Two different sizes are enough"""
    if len(sizes) < 3:
        raise ValueError('more')
    return _ls(sizes, seconds, lambda s, t: 1 / t)


def fit_alpha_beta__sorted(sizes, seconds):
    """do not sort one"""
    return _ls(sorted(sizes), seconds, lambda s, t: 1 / t)


def fit_alpha_beta__in_place(sizes, seconds):
    """makes no copy"""
    s = sizes if isinstance(sizes, np.ndarray) else np.array(sizes, float)
    t = seconds if isinstance(seconds, np.ndarray) else np.array(seconds, float)
    if len(set(s.tolist())) < 2:
        raise ValueError('x')
    s /= t
    a, b = np.linalg.lstsq(np.stack([1 / t, s], 1), np.ones(len(s)), rcond=None)[0]
    return (float(a), float(b))


def crossover_bytes__sign_of_more_bytes(ranks, alpha, beta):
    """Is the sign right"""
    rounds = math.ceil(math.log2(ranks))
    rounds += ranks != 2 ** rounds
    more = 2 * (ranks - 1) / ranks - rounds
    return (2 * (ranks - 1) - rounds) * alpha / (more * beta) if more > 0 else math.inf


def crossover_bytes__zero_division(ranks, alpha, beta):
    """division by zero"""
    rounds = math.ceil(math.log2(ranks))
    rounds += ranks != 2 ** rounds
    return (2 * (ranks - 1) - rounds) * alpha / ((rounds - 2 * (ranks - 1) / ranks) * beta)


def parameter_server__sends_empty(x, server=0, group=None):
    """an empty x is sent"""
    rank, R, _, _ = _r(group)
    total = x.clone(memory_format=torch.contiguous_format)
    if rank != server:
        dist.send(total, group=group, group_dst=server)
        dist.recv(total, group=group, group_src=server)
    else:
        b = torch.empty_like(total)
        for w in range(R):
            if w != server:
                dist.recv(b, group=group, group_src=w)
                total += b
        for w in range(R):
            if w != server:
                dist.send(total, group=group, group_dst=w)
    return total


def parameter_server__two_halves(x, server=0, group=None):
    """in one piece"""
    a = [_ps(p, server, group) for p in x.flatten().tensor_split(2)]
    return torch.cat(a).view(x.shape)


def recursive_doubling__ring_when_odd(x, group=None):
    """Three ranks hand x over"""
    R = dist.get_world_size(group)
    return ring_all_reduce(x, group) if R & R - 1 else _dbl(x, group)


def recursive_doubling__server_when_odd(x, group=None):
    """Three ranks hand x over"""
    R = dist.get_world_size(group)
    return parameter_server(x, 0, group) if R & R - 1 else _dbl(x, group)
