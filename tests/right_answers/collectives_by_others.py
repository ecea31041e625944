"""Lab 02: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import math
from fractions import Fraction
import numpy as np
import torch
import torch.distributed as dist
from ranklab.collectives import sendrecv


def tree_broadcast__doubling(x, src=0, group=None):
    """Places 0..have-1 send to place + have; dist.send and recv."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    place = (rank - src) % R
    have = 1
    while have < R:
        if place < have:
            if place + have < R:
                dist.send(out, group=group, group_dst=(place + have + src) % R)
        elif place < 2 * have:
            dist.recv(out, group=group, group_src=(place - have + src) % R)
        have *= 2
    return out


def tree_broadcast__binomial_far_first(x, src=0, group=None):
    """MPI's binomial tree: the first message goes farthest, a place receives from itself without
    its lowest bit.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = x.clone(memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    place = (rank - src) % R
    bit = 1
    while bit < R and not place & bit:
        bit <<= 1
    if place:
        dist.recv(out, group=group, group_src=(place - bit + src) % R)
    bit >>= 1
    while bit:
        if place + bit < R:
            dist.send(out, group=group, group_dst=(place + bit + src) % R)
        bit >>= 1
    return out


def ring_reduce_scatter__right(x, group=None, out=None):
    """To the right with sendrecv; without out each step receives into fresh memory."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    mine = x.flatten().tensor_split(R)
    sums = out.view(-1).tensor_split(R) if out is not None else None
    if R == 1:
        return sums[0].copy_(mine[0]) if sums is not None else mine[0].clone()
    sending = mine[(rank - 1) % R]
    for step in range(R - 1):
        i = (rank - 2 - step) % R
        into = sums[i] if sums is not None else torch.empty_like(mine[i])
        sendrecv(sending, (rank + 1) % R, into, (rank - 1) % R, group)
        into += mine[i]
        sending = into
    return sending


def ring_reduce_scatter__left(x, group=None, out=None):
    """Partial sums travel to the left neighbour; one buffer that holds a copy of x."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    mine = x.flatten().tensor_split(R)
    buffer = out.view(-1) if out is not None else torch.empty_like(x.flatten())
    sums = buffer.tensor_split(R)
    sums[(rank + 1) % R].copy_(mine[(rank + 1) % R])
    for step in range(1, R):
        send, get = (rank + step) % R, (rank + step + 1) % R
        sendrecv(sums[send], (rank - 1) % R, sums[get], (rank + 1) % R, group)
        sums[get].add_(mine[get])
    return sums[rank] if out is not None else sums[rank].clone()


def ring_all_gather__right(shard, group=None, out=None):
    """To the right with sendrecv, into views of out."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if out is None:
        out = shard.new_empty(R * shard.numel())
    chunks = out.view(-1).tensor_split(R)
    chunks[rank].copy_(shard.flatten())
    for step in range(R - 1):
        sendrecv(chunks[(rank - step) % R], (rank + 1) % R,
                 chunks[(rank - step - 1) % R], (rank - 1) % R, group)
    return out


def ring_all_gather__left_isend(shard, group=None, out=None):
    """To the left with isend and irecv, empty shards are messages too (R - 1 messages, as the
    contract says).
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if out is None:
        out = shard.new_empty(R * shard.numel())
    chunks = out.view(-1).tensor_split(R)
    chunks[rank].copy_(shard.reshape(-1))
    for step in range(R - 1):
        sent = dist.isend(chunks[(rank + step) % R], group=group, group_dst=(rank - 1) % R)
        got = dist.irecv(chunks[(rank + step + 1) % R], group=group, group_src=(rank + 1) % R)
        got.wait()
        sent.wait()
    return out


def ring_all_reduce__right(x, group=None, out=None):
    """Reduce-scatter then all-gather, to the right, in a flat buffer; out may be non-contiguous."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = total.view(-1).tensor_split(R)
    right, left = (rank + 1) % R, (rank - 1) % R
    for step in range(R - 1):
        get = chunks[(rank - 2 - step) % R]
        get += sendrecv(chunks[(rank - 1 - step) % R], right, torch.empty_like(get), left, group)
    for step in range(R - 1):
        sendrecv(chunks[(rank - step) % R], right, chunks[(rank - step - 1) % R], left, group)
    return total if out is None else out.copy_(total)


def ring_all_reduce__rank_owns_the_next_chunk(x, group=None, out=None):
    """Baidu's numbering: rank r starts with its own chunk r and owns chunk r+1 after the first
    half.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = total.view(-1).tensor_split(R)
    right, left = (rank + 1) % R, (rank - 1) % R
    for step in range(R - 1):
        get = chunks[(rank - step - 1) % R]
        get += sendrecv(chunks[(rank - step) % R], right, torch.empty_like(get), left, group)
    for step in range(R - 1):
        sendrecv(chunks[(rank + 1 - step) % R], right, chunks[(rank - step) % R], left, group)
    if out is not None:
        out.copy_(total)
        return out
    return total


def alpha_beta_time__table(algorithm, nbytes, ranks, alpha, beta):
    """A dict of steps and bytes, with bit_length for the logarithm."""
    log2 = (ranks - 1).bit_length()
    table = {
        "ring": (2 * (ranks - 1), nbytes / ranks),
        "parameter_server": (2 * (ranks - 1), nbytes),
        "tree_broadcast": (log2, nbytes),
        "recursive_doubling": (log2 + (ranks & (ranks - 1) != 0), nbytes),
    }
    if algorithm not in table:
        raise ValueError(f"unknown algorithm {algorithm!r}")
    steps, each = table[algorithm]
    return steps * (alpha + each * beta)


def alpha_beta_time__step_by_step(algorithm, nbytes, ranks, alpha, beta):
    """if ... elif, adds up one step after the other in a loop with fsum."""
    rounds, reach = 0, 1
    while reach < ranks:
        rounds, reach = rounds + 1, 2 * reach
    if algorithm == "ring":
        steps, size = 2 * ranks - 2, nbytes / ranks
    elif algorithm == "parameter_server":
        steps, size = 2 * ranks - 2, nbytes
    elif algorithm == "tree_broadcast":
        steps, size = rounds, nbytes
    elif algorithm == "recursive_doubling":
        steps, size = rounds + (1 if reach != ranks else 0), nbytes
    else:
        raise ValueError(algorithm)
    return math.fsum(alpha + size * beta for _ in range(steps))


def all_to_all_v__rotations(pieces, group=None):
    """R - 1 rotations with sendrecv: first all lengths, then all pieces."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    pieces = [p.contiguous() for p in pieces]
    lengths = torch.tensor([p.numel() for p in pieces], dtype=torch.int64, device=pieces[0].device)
    arriving = lengths.clone()
    for step in range(1, R):
        to, source = (rank + step) % R, (rank - step) % R
        sendrecv(lengths[to:to + 1], to, arriving[source:source + 1], source, group)
    out = [pieces[rank].new_empty(n) for n in arriving.tolist()]
    out[rank].copy_(pieces[rank])
    for step in range(1, R):
        to, source = (rank + step) % R, (rank - step) % R
        sendrecv(pieces[to], to, out[source], source, group)
    return out


def all_to_all_v__isend_all_at_once(pieces, group=None):
    """isend and irecv of all lengths at once, then of all pieces."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    others = [r for r in range(R) if r != rank]
    packed = [p.clone(memory_format=torch.contiguous_format) for p in pieces]
    told = [torch.tensor([p.numel()], device=p.device) for p in packed]
    heard = [torch.tensor([p.numel()], device=p.device) for p in packed]
    works = [dist.irecv(heard[r], group=group, group_src=r) for r in others]
    works += [dist.isend(told[r], group=group, group_dst=r) for r in others]
    for work in works:
        work.wait()
    result = [packed[rank] if r == rank else packed[rank].new_empty(int(heard[r].item()))
              for r in range(R)]
    works = [dist.irecv(result[r], group=group, group_src=r) for r in others if result[r].numel()]
    works += [dist.isend(packed[r], group=group, group_dst=r) for r in others if packed[r].numel()]
    for work in works:
        work.wait()
    return result


def _reduce_scatter(x, group):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    chunks = [c.clone() for c in x.flatten().tensor_split(R)]
    for step in range(R - 1):
        get = chunks[(rank - 2 - step) % R]
        get += sendrecv(chunks[(rank - 1 - step) % R], (rank + 1) % R, torch.empty_like(get),
                        (rank - 1) % R, group)
    return chunks[rank]


def _all_gather_into(out, rank, R, group):
    chunks = out.view(-1).tensor_split(R)
    for step in range(R - 1):
        sendrecv(chunks[(rank - step) % R], (rank + 1) % R, chunks[(rank - step - 1) % R],
                 (rank - 1) % R, group)


def hierarchical_all_reduce__rings(x, inside=None, across=None):
    """Rings in all three parts, from helper functions."""
    L, l = dist.get_world_size(inside), dist.get_rank(inside)
    M, m = dist.get_world_size(across), dist.get_rank(across)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    part = _reduce_scatter(x, inside)
    mine = out.view(-1).tensor_split(L)[l]
    mine.tensor_split(M)[m].copy_(_reduce_scatter(part, across))
    _all_gather_into(mine, m, M, across)
    _all_gather_into(out, l, L, inside)
    return out


def hierarchical_all_reduce__straight_to_the_owner(x, inside=None, across=None):
    """No rings: each chunk goes straight to its owner, which adds in rank order and sends the sum
    straight to all.
    """
    def swap(send, into, group):
        rank, R = dist.get_rank(group), dist.get_world_size(group)
        for step in range(1, R):
            to, source = (rank + step) % R, (rank - step) % R
            sendrecv(send[to], to, into[source], source, group)

    def reduce_scatter(flat, group):
        rank, R = dist.get_rank(group), dist.get_world_size(group)
        chunks = flat.tensor_split(R)
        got = [torch.empty_like(chunks[rank]) for _ in range(R)]
        got[rank].copy_(chunks[rank])
        swap(chunks, got, group)
        total = got[0].clone()
        for each in got[1:]:
            total += each
        return total

    def all_gather(shard, lengths, group):
        rank, R = dist.get_rank(group), dist.get_world_size(group)
        got = [shard.new_empty(n) for n in lengths]
        got[rank].copy_(shard)
        swap([shard] * R, got, group)
        return torch.cat(got)

    def lengths(flat, group):
        return [c.numel() for c in flat.tensor_split(dist.get_world_size(group))]

    flat = x.flatten()
    part = reduce_scatter(flat, inside)
    part = all_gather(reduce_scatter(part, across), lengths(part, across), across)
    return all_gather(part, lengths(flat, inside), inside).view(x.shape)


def parameter_server__one_by_one(x, server=0, group=None):
    """Blocking send and recv, one worker after the other."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    total = x.clone(memory_format=torch.contiguous_format)
    if not total.numel():
        return total
    workers = [r for r in range(R) if r != server]
    if rank == server:
        arriving = torch.empty_like(total)
        for r in workers:
            dist.recv(arriving, group=group, group_src=r)
            total += arriving
        for r in workers:
            dist.send(total, group=group, group_dst=r)
    else:
        dist.send(total, group=group, group_dst=server)
        dist.recv(total, group=group, group_src=server)
    return total


def parameter_server__all_at_once_float64(x, server=0, group=None):
    """The server receives from all at once, adds in float64 in rank order, and sends to all at
    once.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    own = x.clone(memory_format=torch.contiguous_format)
    if own.numel() == 0:
        return own
    if rank != server:
        dist.isend(own, group=group, group_dst=server).wait()
        total = torch.empty_like(own)
        dist.irecv(total, group=group, group_src=server).wait()
        return total
    shares = [own if r == server else torch.empty_like(own) for r in range(R)]
    for work in [dist.irecv(shares[r], group=group, group_src=r) for r in range(R) if r != server]:
        work.wait()
    wide = torch.float64 if own.dtype.is_floating_point else own.dtype
    total = sum(share.to(wide) for share in shares).to(own.dtype)
    for work in [dist.isend(total, group=group, group_dst=r) for r in range(R) if r != server]:
        work.wait()
    return total


def recursive_doubling__sendrecv(x, group=None):
    """xor partners with sendrecv; rank power + i hands its x to rank i."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    power = 2 ** (R.bit_length() - 1)
    total = x.clone(memory_format=torch.contiguous_format)
    other = torch.empty_like(total)
    nothing = total.new_empty(0)
    if rank >= power:
        sendrecv(total, rank - power, nothing, rank - power, group)
        sendrecv(nothing, rank - power, total, rank - power, group)
        return total
    extra = rank + power
    if extra < R:
        total += sendrecv(nothing, extra, other, extra, group)
    bit = 1
    while bit < power:
        total += sendrecv(total, rank ^ bit, other, rank ^ bit, group)
        bit *= 2
    if extra < R:
        sendrecv(total, extra, nothing, extra, group)
    return total


def recursive_doubling__mirrored_partner(x, group=None):
    """isend and irecv into fresh tensors; the ranks from power on hand their x to the mirrored rank
    2*power-1-rank.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    power = 1
    while 2 * power <= R:
        power *= 2
    total = x.clone(memory_format=torch.contiguous_format)
    if total.numel() == 0:
        return total
    partner = 2 * power - 1 - rank
    if rank >= power:
        dist.send(total, group=group, group_dst=partner)
        dist.recv(total, group=group, group_src=partner)
        return total
    if partner < R:
        share = torch.empty_like(total)
        dist.recv(share, group=group, group_src=partner)
        total = total + share
    k = 0
    while 2**k < power:
        away = rank + 2**k if rank // 2**k % 2 == 0 else rank - 2**k
        arriving = torch.empty_like(total)
        sent = dist.isend(total, group=group, group_dst=away)
        dist.irecv(arriving, group=group, group_src=away).wait()
        sent.wait()
        total = torch.add(arriving, total)
        k += 1
    if partner < R:
        dist.send(total, group=group, group_dst=partner)
    return total


def fit_alpha_beta__lstsq(sizes, seconds):
    """numpy's lstsq with rows divided by the measured seconds."""
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(np.unique(sizes)) < 2:
        raise ValueError("need two different sizes")
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    return alpha, beta


def fit_alpha_beta__weighted_means(sizes, seconds):
    """The weighted mean and slope in Python loops, with exact fractions, weights 1 / seconds**2."""
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    xs, ts = [Fraction(float(s)) for s in sizes], [Fraction(float(t)) for t in seconds]
    if len(set(xs)) < 2:
        raise ValueError(f"{len(set(xs))} different sizes, need two")
    ws = [1 / t**2 for t in ts]
    W = sum(ws)
    mean_x = sum(w * x for w, x in zip(ws, xs)) / W
    mean_t = sum(w * t for w, t in zip(ws, ts)) / W
    slope = (sum(w * (x - mean_x) * (t - mean_t) for w, x, t in zip(ws, xs, ts))
             / sum(w * (x - mean_x) ** 2 for w, x in zip(ws, xs)))
    return float(mean_t - slope * mean_x), float(slope)


def crossover_bytes__formula(ranks, alpha, beta):
    """Solved by hand."""
    if ranks <= 2:
        return math.inf
    log2 = (ranks - 1).bit_length()
    doubling = log2 if ranks == 2**log2 else log2 + 1
    ring = 2 * (ranks - 1)
    return alpha * (ring - doubling) / (beta * (doubling - ring / ranks))


def crossover_bytes__two_lines(ranks, alpha, beta):
    """Intersects two lines through exact fractions of alpha and beta."""
    if ranks in (1, 2):
        return float("inf")
    a, b = Fraction(alpha), Fraction(beta)
    power = 2 ** (ranks.bit_length() - 1)
    steps = power.bit_length() - 1 + (2 if power != ranks else 0)

    def gap(n):
        return steps * (a + n * b) - 2 * (ranks - 1) * (a + n * b / ranks)

    at0, at1 = gap(Fraction(0)), gap(Fraction(1))
    return float(-at0 / (at1 - at0))
