"""Lab 02: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

import math

import numpy as np
import torch
import torch.distributed as dist

from ranklab.collectives import sendrecv, ring_all_gather, ring_all_reduce, ring_reduce_scatter


def _ring(group):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    return rank, R, (rank + 1) % R, (rank - 1) % R


# The answer under test is hidden from whoever it is tested on, so what a mistake builds on is here.


def _broadcast(x, src=0, group=None, n_places=None):
    rank, R, _, _ = _ring(group)
    out, place, have = x.clone(memory_format=torch.contiguous_format), (rank - src) % R, 1
    while have < R and out.numel():
        if place < have and place + have < (n_places or R):
            dist.send(out, group=group, group_dst=(rank + have) % R)
        elif have <= place < 2 * have:
            dist.recv(out, group=group, group_src=(rank - have) % R)
        have *= 2
    return out


def _all_reduce(x, group=None, out=None):
    out = x.new_empty(x.shape) if out is None else out
    return ring_all_gather(ring_reduce_scatter(x, group, out), group, out)


def _scatter(x, group=None, out=None, to=1, add=torch.Tensor.add_, talk_in=0):
    rank, R, _, _ = _ring(group)
    mine = x.flatten().tensor_split(R)
    sums = None if out is None else out.view(-1).tensor_split(R)
    partial = mine[rank - 1].clone()
    for step in range(1, R):
        i = (rank - 1 - step) % R
        arriving = torch.empty_like(mine[i]) if sums is None else sums[i]
        sendrecv(partial, (rank + to) % R, arriving, (rank - to) % R,
                 group if talk_in == 0 else talk_in)
        partial = add(arriving, mine[i])
    return partial


def _gather(shard, group=None, out=None, to=1):
    rank, R, _, _ = _ring(group)
    out = shard.new_empty(R * shard.numel()) if out is None else out
    parts = out.view(-1).tensor_split(R)
    parts[rank].copy_(shard.flatten())
    for step in range(1, R):
        sendrecv(parts[(rank - step + 1) % R], (rank + to) % R, parts[(rank - step) % R],
                 (rank - to) % R, group)
    return out


def _server(x, server=0, group=None, answers=True):
    rank, R, _, _ = _ring(group)
    total = x.clone(memory_format=torch.contiguous_format)
    for worker in range(R):
        if rank == worker != server and x.numel():
            dist.send(total, group=group, group_dst=server)
        elif rank == server != worker and x.numel():
            arriving = torch.empty_like(total)
            dist.recv(arriving, group=group, group_src=worker)
            total += arriving
    return _broadcast_flat(total, server, group) if answers else total


def _broadcast_flat(x, src, group):
    rank, R, _, _ = _ring(group)
    for other in range(R):
        if rank == src != other and x.numel():
            dist.send(x, group=group, group_dst=other)
        elif rank == other != src and x.numel():
            dist.recv(x, group=group, group_src=src)
    return x


def _seconds(algorithm, nbytes, ranks, alpha, beta):
    rounds = math.ceil(math.log2(ranks))
    steps, sent = {
        "ring": (2 * (ranks - 1), nbytes / ranks), "parameter_server": (2 * (ranks - 1), nbytes),
        "tree_broadcast": (rounds, nbytes),
        "recursive_doubling": (rounds + (ranks != 2**rounds), nbytes),
    }[algorithm]
    return steps * (alpha + sent * beta)


# --- tree_broadcast -----------------------------------------------------------------------------


def tree_broadcast__src_talks_to_all(x, src=0, group=None):
    """A rank that has the value can pass it on"""
    return _broadcast_flat(x.clone(memory_format=torch.contiguous_format), src, group)


def tree_broadcast__bucket_brigade(x, src=0, group=None):
    """from rank to rank like a bucket"""
    rank, R, right, left = _ring(group)
    out, place = x.clone(memory_format=torch.contiguous_format), (rank - src) % R
    if place > 0:
        dist.recv(out, group=group, group_src=left)
    if place < R - 1:
        dist.send(out, group=group, group_dst=right)
    return out


def tree_broadcast__forgets_src(x, src=0, group=None):
    """Count places from src"""
    return _broadcast(x, 0, group)


def tree_broadcast__in_place(x, src=0, group=None):
    """x itself is changed"""
    return x.copy_(_broadcast(x, src, group))


def tree_broadcast__powers_of_two_only(x, src=0, group=None):
    """no power of two"""
    rank, R, _, _ = _ring(group)
    return _broadcast(x, src, group, n_places=2 ** math.ceil(math.log2(R)))


def tree_broadcast__uses_the_backend(x, src=0, group=None):
    """backend's own broadcast"""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, src, group=group)
    return out


def tree_broadcast__forgets_the_group(x, src=0, group=None):
    """Hand `group` on"""
    return _broadcast(x, src)


def tree_broadcast__src_is_a_global_rank(x, src=0, group=None):
    """counts inside the group"""
    return _broadcast(x, dist.get_group_rank(group, src) if group else src, group)


def tree_broadcast__place_for_rank(x, src=0, group=None):
    """turn a place back into a rank"""
    rank, R, _, _ = _ring(group)
    out, place, have = x.clone(memory_format=torch.contiguous_format), (rank - src) % R, 1
    while have < R and out.numel():
        if place < have and place + have < R:
            dist.send(out, group=group, group_dst=place + have)
        elif have <= place < 2 * have:
            dist.recv(out, group=group, group_src=place - have)
        have *= 2
    return out


# --- ring_reduce_scatter --------------------------------------------------------------------------


def ring_reduce_scatter__one_step_short(x, group=None, out=None):
    """Are there R-1 steps"""
    rank, R, right, left = _ring(group)
    mine = x.flatten().tensor_split(R)
    partial = mine[rank - 1].clone()
    for step in range(1, R - 1):
        i = (rank - 1 - step) % R
        partial = sendrecv(partial, right, torch.empty_like(mine[i]), left, group).add_(mine[i])
    return partial


def ring_reduce_scatter__starts_with_own_chunk(x, group=None, out=None):
    """indices are shifted"""
    rank, R, right, left = _ring(group)
    mine = x.flatten().tensor_split(R)
    partial = mine[rank].clone()
    for step in range(1, R):
        i = (rank - step) % R
        partial = sendrecv(partial, right, torch.empty_like(mine[i]), left, group).add_(mine[i])
    return partial


def ring_reduce_scatter__adds_into_x(x, group=None, out=None):
    """x itself is changed"""
    rank, R, right, left = _ring(group)
    mine = x.flatten().tensor_split(R)
    for step in range(1, R):
        i = (rank - 1 - step) % R
        mine[i].add_(sendrecv(mine[(i + 1) % R], right, torch.empty_like(mine[i]), left, group))
    return mine[rank].clone()


def ring_reduce_scatter__whole_tensor(x, group=None, out=None):
    """whole tensor each time"""
    rank, R, right, left = _ring(group)
    passing, total = x.flatten(), x.flatten().clone()
    for _ in range(R - 1):
        passing = sendrecv(passing, right, torch.empty_like(passing), left, group)
        total += passing
    return total.tensor_split(R)[rank]


def ring_reduce_scatter__equal_chunks_only(x, group=None, out=None):
    """does not divide this length"""
    rank, R, right, left = _ring(group)
    mine = x.flatten().view(R, -1)
    partial = mine[rank - 1].clone()
    for step in range(1, R):
        i = (rank - 1 - step) % R
        partial = sendrecv(partial, right, torch.empty_like(mine[i]), left, group).add_(mine[i])
    return partial


def ring_reduce_scatter__forgets_own_share(x, group=None, out=None):
    """passed on without your own share"""
    rank, R, right, left = _ring(group)
    mine = x.flatten().tensor_split(R)
    partial = mine[rank - 1].clone()
    for step in range(1, R):
        partial = sendrecv(partial, right, torch.empty_like(mine[rank - 1 - step]), left, group)
    return partial


def ring_reduce_scatter__forgets_the_group(x, group=None, out=None):
    """Hand `group` on"""
    return _scatter(x, None, out)


def ring_reduce_scatter__sendrecv_without_the_group(x, group=None, out=None):
    """sendrecv.+, group"""
    return _scatter(x, group, out, talk_in=None)


def ring_reduce_scatter__ignores_out(x, group=None, out=None):
    """the result is not in it.*nothing was written"""
    return _scatter(x, group)


def ring_reduce_scatter__sum_beside_out(x, group=None, out=None):
    """makes a new tensor elsewhere"""
    return _scatter(x, group, out, add=torch.add)


def ring_reduce_scatter__neighbours_swapped(x, group=None, out=None):
    """The ring is swapped"""
    return _scatter(x, group, out, to=-1)


def ring_reduce_scatter__adds_another_chunk(x, group=None, out=None):
    """mixes shares of different chunks"""
    rank, R, right, left = _ring(group)
    mine = x.flatten().tensor_split(R)
    partial = mine[rank - 1].clone()
    for step in range(1, R):
        i = (rank - 1 - step) % R
        arrived = sendrecv(partial, right, torch.empty_like(mine[i]), left, group)
        partial = arrived + mine[(i + 1) % R][:1]
    return partial


def ring_reduce_scatter__does_not_accumulate(x, group=None, out=None):
    """lacks rank|unsummed"""
    rank, R, right, left = _ring(group)
    mine = x.flatten().tensor_split(R)
    total = mine[rank].clone()
    for step in range(1, R):
        i = (rank - 1 - step) % R
        total = sendrecv(mine[(i + 1) % R], right, torch.empty_like(mine[i]), left, group) + mine[i]
    return total


# --- ring_all_gather ------------------------------------------------------------------------------


def ring_all_gather__in_order_of_arrival(shard, group=None, out=None):
    """from the rank that made the shard"""
    rank, R, right, left = _ring(group)
    parts = [shard.flatten()]
    for _ in range(R - 1):
        parts.append(sendrecv(parts[-1], right, torch.empty_like(parts[-1]), left, group))
    return torch.cat(parts)


def ring_all_gather__sends_own_shard_again(shard, group=None, out=None):
    """Pass on what arrived last"""
    rank, R, right, left = _ring(group)
    parts = [shard.flatten().clone() for _ in range(R)]
    for step in range(R - 1):
        sendrecv(shard.flatten(), right, parts[(rank - step - 1) % R], left, group)
    return torch.cat(parts)


def ring_all_gather__forgets_out(shard, group=None, out=None):
    """When `out` is given|differ|length"""
    rank, R, right, left = _ring(group)
    out = shard.new_empty(R * shard.numel())
    parts = out.tensor_split(R)
    parts[rank].copy_(shard.flatten())
    for step in range(R - 1):
        sendrecv(parts[(rank - step) % R], right, parts[(rank - step - 1) % R], left, group)
    return out


def ring_all_gather__straight_to_everybody(shard, group=None, out=None):
    """neighbours only"""
    rank, R, _, _ = _ring(group)
    out = shard.new_empty(R * shard.numel()) if out is None else out
    parts = out.view(-1).tensor_split(R)
    parts[rank].copy_(shard.flatten())
    for shift in range(1, R):
        source = (rank - shift) % R
        sendrecv(parts[rank], (rank + shift) % R, parts[source], source, group)
    return out


def ring_all_gather__one_step_too_many(shard, group=None, out=None):
    """One step too many"""
    rank, R, right, left = _ring(group)
    out = shard.new_empty(R * shard.numel()) if out is None else out
    parts = out.view(-1).tensor_split(R)
    parts[rank].copy_(shard.flatten())
    for step in range(R if R > 1 else 0):
        sendrecv(parts[(rank - step) % R].clone(), right, parts[(rank - step - 1) % R], left, group)
    return out


def ring_all_gather__forgets_the_group(shard, group=None, out=None):
    """Hand `group` on"""
    return _gather(shard, None, out)


def ring_all_gather__neighbours_swapped(shard, group=None, out=None):
    """The ring is swapped"""
    return _gather(shard, group, out, to=-1)


# --- ring_all_reduce ------------------------------------------------------------------------------


def ring_all_reduce__passes_the_whole_tensor(x, group=None, out=None):
    """You pass the whole tensor R-1 times"""
    rank, R, right, left = _ring(group)
    everyones = torch.stack([x.contiguous()] * R)
    for step in range(R - 1):
        sendrecv(everyones[(rank - step) % R], right, everyones[(rank - step - 1) % R], left, group)
    return everyones.sum(dim=0, dtype=x.dtype)


def ring_all_reduce__no_all_gather(x, group=None, out=None):
    """an all-gather must follow"""
    return ring_reduce_scatter(x, group)


def ring_all_reduce__stays_flat(x, group=None, out=None):
    """Give the result x's shape"""
    return _all_reduce(x.flatten(), group)


def ring_all_reduce__pads(x, group=None, out=None):
    """Do you pad"""
    R = dist.get_world_size(group)
    padded = torch.cat([x.flatten(), x.new_zeros(-x.numel() % R)])
    return _all_reduce(padded, group)[: x.numel()].view(x.shape)


def ring_all_reduce__mean(x, group=None, out=None):
    """the mean, not the sum"""
    return (_all_reduce(x, group) / dist.get_world_size(group)).to(x.dtype)


def ring_all_reduce__each_adds_in_its_own_order(x, group=None, out=None):
    """differ in the last bits"""
    rank, R, right, left = _ring(group)
    passing, total = x.contiguous(), x.clone(memory_format=torch.contiguous_format)
    for _ in range(R - 1):
        passing = sendrecv(passing, right, torch.empty_like(passing), left, group)
        total += passing
    return total


def ring_all_reduce__in_place(x, group=None, out=None):
    """x itself is changed"""
    return x.copy_(_all_reduce(x, group))


def ring_all_reduce__forgets_the_group(x, group=None, out=None):
    """Hand `group` on"""
    return _all_reduce(x, None, out)


def ring_all_reduce__ignores_out(x, group=None, out=None):
    """the result is not in it"""
    return _all_reduce(x, group)


def ring_all_reduce__keeps_the_strides(x, group=None, out=None):
    """keeps its strides"""
    return _all_reduce(x, group, torch.empty_like(x) if out is None else out)


# --- hierarchical_all_reduce ----------------------------------------------------------------------


def hierarchical_all_reduce__flat_ring(x, inside=None, across=None):
    """This is a flat ring"""
    return ring_all_reduce(x)


def hierarchical_all_reduce__whole_tensor_across(x, inside=None, across=None):
    """let only a shard of that sum cross"""
    return ring_all_reduce(ring_all_reduce(x, inside), across)


def hierarchical_all_reduce__groups_swapped(x, inside=None, across=None):
    """The groups are swapped|big transfers"""
    shard = ring_all_reduce(ring_reduce_scatter(x, across), inside)
    return ring_all_gather(shard, across, out=x.new_empty(x.shape))


def hierarchical_all_reduce__forgets_the_other_nodes(x, inside=None, across=None):
    """The nodes never met"""
    shard = ring_reduce_scatter(x, inside)
    return ring_all_gather(shard, inside, out=x.new_empty(x.shape))


def hierarchical_all_reduce__no_out(x, inside=None, across=None):
    """out=x.new_empty"""
    shard = ring_all_reduce(ring_reduce_scatter(x, inside), across)
    return ring_all_gather(shard, inside)[: x.numel()].view(x.shape)


def hierarchical_all_reduce__no_gather(x, inside=None, across=None):
    """all-gather inside the node must follow"""
    return ring_all_reduce(ring_reduce_scatter(x, inside), across)


def hierarchical_all_reduce__keeps_the_strides(x, inside=None, across=None):
    """keeps its strides"""
    shard = ring_all_reduce(ring_reduce_scatter(x, inside), across)
    return ring_all_gather(shard, inside, out=torch.empty_like(x))


# --- alpha_beta_time ------------------------------------------------------------------------------


def alpha_beta_time__alpha_once(algorithm, nbytes, ranks, alpha, beta):
    """alpha is paid once per step"""
    return alpha + _seconds(algorithm, nbytes, ranks, 0, beta)


def alpha_beta_time__half_the_ring(algorithm, nbytes, ranks, alpha, beta):
    """the ring goes round twice"""
    whole = _seconds(algorithm, nbytes, ranks, alpha, beta)
    return whole / 2 if algorithm == "ring" else whole


def alpha_beta_time__fraction_of_a_round(algorithm, nbytes, ranks, alpha, beta):
    """no fraction of a round"""
    if algorithm in ("tree_broadcast", "recursive_doubling"):
        return math.log2(ranks) * (alpha + nbytes * beta)
    return _seconds(algorithm, nbytes, ranks, alpha, beta)


def alpha_beta_time__whole_tensor_a_step(algorithm, nbytes, ranks, alpha, beta):
    """moves one chunk"""
    if algorithm == "ring":
        return 2 * (ranks - 1) * (alpha + nbytes * beta)
    return _seconds(algorithm, nbytes, ranks, alpha, beta)


def alpha_beta_time__bits(algorithm, nbytes, ranks, alpha, beta):
    """you count bits"""
    return _seconds(algorithm, 8 * nbytes, ranks, alpha, beta)


def alpha_beta_time__any_name_will_do(algorithm, nbytes, ranks, alpha, beta):
    """ValueError for unknown names"""
    known = ("ring", "recursive_doubling", "parameter_server", "tree_broadcast")
    known_or_ring = algorithm if algorithm in known else "ring"
    return _seconds(known_or_ring, nbytes, ranks, alpha, beta)


def alpha_beta_time__rounds_down(algorithm, nbytes, ranks, alpha, beta):
    """round log2 R up"""
    if algorithm == "tree_broadcast":
        return math.floor(math.log2(ranks)) * (alpha + nbytes * beta)
    return _seconds(algorithm, nbytes, ranks, alpha, beta)


def alpha_beta_time__whole_bytes_only(algorithm, nbytes, ranks, alpha, beta):
    """not nbytes // ranks"""
    if algorithm == "ring":
        return 2 * (ranks - 1) * (alpha + nbytes // ranks * beta)
    return _seconds(algorithm, nbytes, ranks, alpha, beta)


# --- parameter_server -----------------------------------------------------------------------------


def parameter_server__always_rank_0(x, server=0, group=None):
    """whichever that is"""
    return _server(x, 0, group)


def parameter_server__answers_too_early(x, server=0, group=None):
    """Receive from all workers first"""
    rank, R, _, _ = _ring(group)
    total = x.clone(memory_format=torch.contiguous_format)
    if rank != server and x.numel():
        dist.send(total, group=group, group_dst=server)
        dist.recv(total, group=group, group_src=server)
    for worker in range(R):
        if rank == server != worker and x.numel():
            arriving = torch.empty_like(total)
            dist.recv(arriving, group=group, group_src=worker)
            total += arriving
            dist.send(total, group=group, group_dst=worker)
    return total


def parameter_server__keeps_the_sum(x, server=0, group=None):
    """must send the sum back"""
    return _server(x, server, group, answers=False)


def parameter_server__in_place_on_the_server(x, server=0, group=None):
    """x itself is changed"""
    total = _server(x, server, group)
    return x.copy_(total) if dist.get_rank(group) == server else total


def parameter_server__a_ring_instead(x, server=0, group=None):
    """A worker sends its x once"""
    return ring_all_reduce(x, group)


def parameter_server__forgets_the_group(x, server=0, group=None):
    """Hand `group` on"""
    return _server(x, server)


# --- recursive_doubling --------------------------------------------------------------------------


def recursive_doubling__powers_of_two_only(x, group=None):
    """Fold the ranks|no power of two"""
    rank, R, _, _ = _ring(group)
    total, step = x.clone(memory_format=torch.contiguous_format), 1
    while step < R:
        total += sendrecv(total, rank ^ step, torch.empty_like(total), rank ^ step, group)
        step *= 2
    return total


def recursive_doubling__round_the_ring(x, group=None):
    """Fold the ranks"""
    rank, R, _, _ = _ring(group)
    total, step = x.clone(memory_format=torch.contiguous_format), 1
    while step < R:
        source = (rank - step) % R
        total = total + sendrecv(total, (rank + step) % R, torch.empty_like(total), source, group)
        step *= 2
    return total


def recursive_doubling__is_a_ring(x, group=None):
    """log2 R swaps of the whole tensor"""
    return ring_all_reduce(x, group)


def recursive_doubling__in_place(x, group=None):
    """x itself is changed"""
    return x.copy_(_all_reduce(x, group))


def recursive_doubling__same_partner_each_time(x, group=None):
    """more than once|lacks"""
    rank, R, _, _ = _ring(group)
    total, step = x.clone(memory_format=torch.contiguous_format), 1
    while step < R:
        total += sendrecv(total, rank ^ 1, torch.empty_like(total), rank ^ 1, group)
        step *= 2
    return total


def recursive_doubling__forgets_the_group(x, group=None):
    """Hand `group` on"""
    return _all_reduce(x)


def recursive_doubling__into_the_total_itself(x, group=None):
    """a place of its own"""
    rank, R, _, _ = _ring(group)
    total, step = x.clone(memory_format=torch.contiguous_format), 1
    while step < R:
        total += sendrecv(total, rank ^ step, total, rank ^ step, group)
        step *= 2
    return total


def recursive_doubling__step_plus_one(x, group=None):
    """Too many swaps"""
    rank, R, _, _ = _ring(group)
    total, step = x.clone(memory_format=torch.contiguous_format), 1
    while step < R:
        total += sendrecv(total, rank ^ step, torch.empty_like(total), rank ^ step, group)
        step += 1
    return total


# --- fit_alpha_beta -------------------------------------------------------------------------------


def fit_alpha_beta__plain_least_squares(sizes, seconds):
    """Divide each row by its time"""
    if len(set(sizes)) < 2:
        raise ValueError("one size only")
    beta, alpha = np.polyfit(sizes, seconds, 1)
    return float(alpha), float(beta)


def fit_alpha_beta__swapped(sizes, seconds):
    """The two are swapped"""
    beta, alpha = np.polyfit(sizes, seconds, 1)
    return float(beta), float(alpha)


def fit_alpha_beta__bandwidth(sizes, seconds):
    """That is the bandwidth"""
    beta, alpha = np.polyfit(sizes, seconds, 1)
    return float(alpha), float(1 / beta)


def fit_alpha_beta__smallest_and_largest(sizes, seconds):
    """use all points, not two|ValueError"""
    beta = (seconds[-1] - seconds[0]) / max(sizes[-1] - sizes[0], 1e-9)
    return seconds[0] - beta * sizes[0], beta


# --- crossover_bytes ------------------------------------------------------------------------------


def crossover_bytes__in_elements(ranks, alpha, beta):
    """elements of 4 bytes"""
    rounds = math.ceil(math.log2(ranks))
    return (2 * (ranks - 1) - rounds) * alpha / ((rounds - 2 * (ranks - 1) / ranks) * beta) / 4


def crossover_bytes__upside_down(ranks, alpha, beta):
    """alpha / beta, not beta / alpha"""
    rounds = math.ceil(math.log2(ranks))
    return (2 * (ranks - 1) - rounds) * beta / ((rounds - 2 * (ranks - 1) / ranks) * alpha)


def crossover_bytes__powers_of_two_only(ranks, alpha, beta):
    """one round more than"""
    rounds = math.ceil(math.log2(ranks))
    more_bytes = rounds - 2 * (ranks - 1) / ranks
    steps = 2 * (ranks - 1) - rounds
    return steps * alpha / (more_bytes * beta) if more_bytes > 0 else math.inf


def crossover_bytes__wrong_sign(ranks, alpha, beta):
    """A size is positive"""
    rounds = math.ceil(math.log2(ranks))
    return (rounds - 2 * (ranks - 1)) * alpha / ((rounds - 2 * (ranks - 1) / ranks) * beta)


def crossover_bytes__zero_for_two_ranks(ranks, alpha, beta):
    """math.inf"""
    rounds = math.ceil(math.log2(ranks))
    rounds += ranks != 2**rounds
    more_bytes = rounds - 2 * (ranks - 1) / ranks
    return (2 * (ranks - 1) - rounds) * alpha / (more_bytes * beta) if more_bytes > 0 else 0
