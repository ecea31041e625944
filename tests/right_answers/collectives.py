"""Lab 02: right answers that differ from the library's. Each must pass."""

import math

import numpy as np
import torch
import torch.distributed as dist

from ranklab.collectives import sendrecv, ring_all_gather, ring_all_reduce, ring_reduce_scatter


def _r(group):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    return rank, R, (rank + 1) % R, (rank - 1) % R


def tree_broadcast__halving(x, src=0, group=None):
    """The far half first: from place 0 to the place half of all further on, and so down to 1."""
    rank, R, _, _ = _r(group)
    out, place = x.contiguous().clone(), (rank - src) % R
    step = 2 ** max(0, R - 1).bit_length() // 2
    while step and x.numel():
        if place % (2 * step) == 0 and place + step < R:
            dist.isend(out, group=group, group_dst=(place + step + src) % R).wait()
        elif place % (2 * step) == step:
            dist.irecv(out, group=group, group_src=(place - step + src) % R).wait()
        step //= 2
    return out


def ring_reduce_scatter__to_the_left(x, group=None, out=None):
    rank, R, right, left = _r(group)
    place = x.new_empty(x.numel()) if out is None else out.view(-1)
    mine, sums = x.reshape(-1).tensor_split(R), place.tensor_split(R)
    sums[(rank + 1) % R].copy_(mine[(rank + 1) % R])
    for step in range(1, R):
        i = (rank + 1 + step) % R
        sendrecv(sums[(i - 1) % R], left, sums[i], right, group)
        sums[i].add_(mine[i])
    return sums[rank].clone() if R > 1 else x.reshape(-1).clone()


def ring_all_gather__by_handles(shard, group=None, out=None):
    rank, R, right, left = _r(group)
    if out is None:
        out = torch.empty(R * shard.numel(), dtype=shard.dtype, device=shard.device)
    parts = out.view(-1).tensor_split(R)
    if parts[rank].data_ptr() != shard.data_ptr():
        parts[rank].copy_(shard.reshape(-1))
    for step in range(R - 1):
        have, want = parts[(rank - step) % R], parts[(rank - step - 1) % R]
        works = []
        if want.numel():
            works.append(dist.irecv(want, group=group, group_src=left))
        if have.numel():
            works.append(dist.isend(have, group=group, group_dst=right))
        for work in works:
            work.wait()
    return out


def ring_all_reduce__gathers_beside(x, group=None, out=None):
    shard = ring_reduce_scatter(x, group)
    result = ring_all_gather(shard, group, torch.empty(x.shape, dtype=x.dtype))
    return result if out is None else out.copy_(result)


def hierarchical_all_reduce__one_buffer(x, inside=None, across=None):
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    mine = ring_reduce_scatter(x, inside, out=out)
    out.view(-1).tensor_split(dist.get_world_size(inside))[dist.get_rank(inside)].copy_(
        ring_all_reduce(mine, group=across))
    own = out.view(-1).tensor_split(dist.get_world_size(inside))[dist.get_rank(inside)]
    return ring_all_gather(own, inside, out)


def parameter_server__all_receives_posted(x, server=0, group=None):
    rank, R, _, _ = _r(group)
    x = x.contiguous()
    if not x.numel():
        return x.clone()
    if rank != server:
        total = torch.empty_like(x)
        dist.send(x, group=group, group_dst=server)
        dist.recv(total, group=group, group_src=server)
        return total
    others = [r for r in range(R) if r != server]
    arrived = [torch.empty_like(x) for _ in others]
    for work in [dist.irecv(a, group=group, group_src=r) for a, r in zip(arrived, others)]:
        work.wait()
    total = sum(arrived, start=x.clone())
    for work in [dist.isend(total, group=group, group_dst=r) for r in others]:
        work.wait()
    return total


def recursive_doubling__folds_neighbours(x, group=None):
    """MPICH's fold: of the first ranks, the even ones hand over to the odd ones."""
    rank, R, _, _ = _r(group)
    total = x.clone(memory_format=torch.contiguous_format)
    nothing, power = x.new_empty(0), 2 ** int(math.log2(R))
    extra = R - power
    if rank < 2 * extra and rank % 2 == 0:
        sendrecv(total, rank + 1, nothing, rank + 1, group)
        return sendrecv(nothing, rank + 1, total, rank + 1, group)
    if rank < 2 * extra:
        total = total + sendrecv(nothing, rank - 1, torch.empty_like(total), rank - 1, group)
    place = rank // 2 if rank < 2 * extra else rank - extra
    for k in range(int(math.log2(power))):
        other = place ^ 2**k
        peer = 2 * other + 1 if other < extra else other + extra
        total = total + sendrecv(total, peer, torch.empty_like(total), peer, group)
    if rank < 2 * extra:
        sendrecv(total, rank - 1, nothing, rank - 1, group)
    return total


def alpha_beta_time__by_bits(algorithm, nbytes, ranks, alpha, beta):
    rounds, extra = (ranks - 1).bit_length(), bool(ranks & ranks - 1)
    if algorithm == "ring":
        return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * nbytes * beta
    if algorithm == "parameter_server":
        return 2 * (ranks - 1) * (alpha + nbytes * beta)
    if algorithm == "tree_broadcast":
        return rounds * (alpha + nbytes * beta)
    if algorithm == "recursive_doubling":
        return (rounds + extra) * (alpha + nbytes * beta)
    raise ValueError(algorithm)


def fit_alpha_beta__normal_equations(sizes, seconds):
    pairs = [(float(n), float(t)) for n, t in zip(sizes, seconds)]
    if len({n for n, _ in pairs}) < 2:
        raise ValueError("two different sizes or more")
    w = [1 / t**2 for _, t in pairs]
    scale = max(n for n, _ in pairs)
    s = [sum(a * (n / scale)**k for a, (n, _) in zip(w, pairs)) for k in range(3)]
    r = [sum(a * (n / scale)**k * t for a, (n, t) in zip(w, pairs)) for k in range(2)]
    alpha, beta = np.linalg.solve([[s[0], s[1]], [s[1], s[2]]], r)
    return alpha, beta / scale


def crossover_bytes__by_search(ranks, alpha, beta):
    if ranks <= 2:
        return math.inf

    def ring_is_ahead(n):
        swaps = (ranks - 1).bit_length() + bool(ranks & ranks - 1)
        ring = 2 * (ranks - 1) * (alpha + n / ranks * beta)
        return ring < swaps * (alpha + n * beta)

    low, high = 0.0, 1e15
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if ring_is_ahead(middle) else (middle, high)
    return high


def all_to_all_v__pair_by_pair(pieces, group=None):
    """Length and piece of one partner after the other; the lower rank of a pair sends first."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    received = [None] * R
    received[rank] = pieces[rank].clone()

    def tell_and_send(to):
        n = torch.tensor([pieces[to].numel()], device=pieces[to].device)
        dist.send(n, group=group, group_dst=to)
        if n:
            dist.send(pieces[to].contiguous(), group=group, group_dst=to)

    for low in range(R):
        for high in range(low + 1, R):
            if rank not in (low, high):
                continue
            other = low + high - rank
            if rank == low:
                tell_and_send(other)
            n = torch.empty(1, dtype=torch.int64, device=pieces[0].device)
            dist.recv(n, group=group, group_src=other)
            received[other] = torch.empty(int(n), dtype=pieces[0].dtype, device=n.device)
            if n:
                dist.recv(received[other], group=group, group_src=other)
            if rank == high:
                tell_and_send(other)
    return received


def all_to_all_v__all_at_once(pieces, group=None):
    """Everybody learns all lengths by a ring; then one batch, into one buffer."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.tensor([piece.numel() for piece in pieces], device=pieces[0].device)
    coming = ring_all_gather(lengths, group).view(R, R)[:, rank].tolist()
    buffer = torch.empty(sum(coming), dtype=pieces[0].dtype, device=pieces[0].device)
    received = list(buffer.split(coming))
    received[rank].copy_(pieces[rank])
    sent = [piece.contiguous() for piece in pieces]
    ops = [dist.P2POp(dist.irecv, place, group=group, group_peer=r)
           for r, place in enumerate(received) if r != rank and place.numel()]
    ops += [dist.P2POp(dist.isend, piece, group=group, group_peer=r)
            for r, piece in enumerate(sent) if r != rank and piece.numel()]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return received


def all_to_all_v__short_pieces_with_their_lengths(pieces, group=None):
    """What is short travels in the message that tells the length: fewer messages."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    like, room = pieces[0], 20
    size = 8 + room * like.element_size()

    def letter(piece):
        x = torch.zeros(size, dtype=torch.uint8, device=piece.device)
        x[:8] = torch.tensor([piece.numel()], device=piece.device).view(torch.uint8)
        if piece.numel() <= room:
            held = like.new_zeros(room)
            held[: piece.numel()] = piece
            x[8:] = held.view(torch.uint8)
        return x

    received = [piece.clone() for piece in pieces]
    for step in range(1, R):
        to, source = (rank + step) % R, (rank - step) % R
        arrived = sendrecv(letter(pieces[to]), to, like.new_empty(size, dtype=torch.uint8), source,
                           group)
        n = int(arrived[:8].view(torch.int64))
        place = like.new_empty(n)
        long = pieces[to].contiguous() if pieces[to].numel() > room else like.new_empty(0)
        sendrecv(long, to, place if n > room else like.new_empty(0), source, group)
        if n <= room:
            place.copy_(arrived[8:].view(like.dtype)[:n])
        received[source] = place
    return received


def invariant_all_reduce__each_chunk_at_its_owner(contributions, group=None):
    """Every rank gets its chunk of all R local sums, adds them up in the tree, and hands it on."""
    rank, R, _, _ = _r(group)
    if R & (R - 1):
        raise ValueError(f"{R} ranks")
    own = _in_the_tree([*contributions]).contiguous().view(-1)
    chunks, of_ranks = own.tensor_split(R), {rank: own.tensor_split(R)[rank]}
    for step in range(1, R):
        to, source = rank ^ step, rank ^ step
        of_ranks[source] = sendrecv(chunks[to], to, torch.empty_like(chunks[rank]), source, group)
    finished = _in_the_tree([of_ranks[source] for source in range(R)])
    out = contributions.new_empty(contributions.shape[1:])
    return ring_all_gather(finished, group, out=out)


def _in_the_tree(rows):
    half = len(rows) // 2
    return _in_the_tree(rows[:half]) + _in_the_tree(rows[half:]) if half else rows[0].clone()


def invariant_all_reduce__calls_itself(contributions, group=None):
    """Halve and swap on the way down, add, and give back on the way up."""
    rank, R, _, _ = _r(group)
    if R not in (2**k for k in range(20)):
        raise ValueError(f"{R} is not a power of two")

    def swap(piece, distance):
        if distance == R:
            return
        middle = -(-piece.numel() // 2)
        keep, give = piece[:middle], piece[middle:]
        if rank & distance:
            keep, give = give, keep
        partner = rank ^ distance
        arriving = sendrecv(give, partner, torch.empty_like(keep), partner, group)
        keep.copy_(arriving + keep if rank & distance else keep + arriving)
        swap(keep, 2 * distance)
        sendrecv(keep, partner, give, partner, group)

    total = _in_the_tree([*contributions]).contiguous()
    swap(total.view(-1), 1)
    return total


def invariant_all_reduce__ranges_of_elements(contributions, group=None):
    """Keep the range [low, high) of elements that this rank is responsible for."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    rounds = int(math.log2(R))
    if 2**rounds != R:
        raise ValueError(f"R = {R} must be a power of two")

    def add(first, last):
        if last - first == 1:
            return contributions[first]
        middle = first + (last - first) // 2
        return add(first, middle) + add(middle, last)

    flat = add(0, contributions.shape[0]).reshape(-1).clone()
    low, high, history = 0, flat.numel(), []
    for k in range(rounds):
        partner, middle = rank ^ (1 << k), (low + high) // 2
        mine, theirs = (low, middle), (middle, high)
        if rank > partner:
            mine, theirs = theirs, mine
        got = sendrecv(flat[slice(*theirs)].clone(), partner,
                       flat.new_empty(mine[1] - mine[0]), partner, group)
        flat[slice(*mine)] += got
        history.append((partner, mine, theirs))
        low, high = mine
    while history:
        partner, mine, theirs = history.pop()
        flat[slice(*theirs)] = sendrecv(flat[slice(*mine)].clone(), partner,
                                        flat.new_empty(theirs[1] - theirs[0]), partner, group)
    return flat.view(contributions.shape[1:])
