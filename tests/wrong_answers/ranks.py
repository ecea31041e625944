"""Lab 00: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch
import torch.distributed as dist


def shard_range__drops_the_rest(n, rank, size):
    """left-over n % size"""
    each = n // size
    return range(rank * each, (rank + 1) * each)


def shard_range__last_takes_the_rest(n, rank, size):
    """may differ by one at most"""
    each = n // size
    return range(rank * each, n if rank == size - 1 else (rank + 1) * each)


def shard_range__rounds_up(n, rank, size):
    """may differ by one at most"""
    each = -(-n // size)
    return range(min(n, rank * each), min(n, (rank + 1) * each))


def shard_range__rounds_up_beyond_the_end(n, rank, size):
    """ends before"""
    each = -(-n // size)
    return range(rank * each, (rank + 1) * each)


def shard_range__strided(n, rank, size):
    """not contiguous"""
    return range(rank, n, size)


def shard_range__overlaps(n, rank, size):
    """handed out twice"""
    each, rest = divmod(n, size)
    start = rank * each
    return range(start, min(n, start + each + (rest > 0)))


def shard_range__longer_ones_last(n, rank, size):
    """longer parts belong to the first ranks"""
    return range(n * rank // size, n * (rank + 1) // size)


def _neighbours(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return rank, size, (rank + 1) % size, (rank - 1) % size


def pass_the_token__all_receive_first(group=None):
    """rank 0 sends first"""
    _, size, after, before = _neighbours(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    dist.recv(token, group=group, group_src=before)
    dist.send(token + 1, group=group, group_dst=after)
    return token.item()


def pass_the_token__not_a_ring(group=None):
    r"""the last rank\s+sends to rank 0"""
    rank, size, after, before = _neighbours(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank > 0:
        dist.recv(token, group=group, group_src=before)
    if rank < size - 1:
        dist.send(token + 1, group=group, group_dst=after)
    if rank == 0:
        dist.recv(token, group=group, group_src=before)
    return token.item()


def pass_the_token__no_modulo(group=None):
    r"""\(rank \+ 1\) % size"""
    rank, size = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank == 0:
        dist.send(token + 1, rank + 1)
        dist.recv(token, size - 1)
    else:
        dist.recv(token, rank - 1)
        dist.send(token + 1, rank + 1)
    return token.item()


def pass_the_token__adds_before_it_returns(group=None):
    """before the rank adds its own 1"""
    rank, size, after, before = _neighbours(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank > 0:
        dist.recv(token, group=group, group_src=before)
    token += 1
    dist.send(token, group=group, group_dst=after)
    if rank == 0:
        dist.recv(token, group=group, group_src=before)
    return token.item()


def pass_the_token__world_ranks_in_a_group(group=None):
    """group_dst="""
    rank, size, after, before = _neighbours(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank == 0:
        dist.send(token + 1, after, group)
        dist.recv(token, before, group)
    else:
        dist.recv(token, before, group)
        dist.send(token + 1, after, group)
    return token.item()


def pass_the_token__by_a_collective(group=None):
    r"""to its neighbours\s+only"""
    ones = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(ones, group=group)
    return dist.get_rank(group) or ones.item()


def pass_the_token__all_send_first(group=None):
    """All ranks send first"""
    _, size, after, before = _neighbours(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    dist.send(token + 1, group=group, group_dst=after)
    dist.recv(token, group=group, group_src=before)
    return token.item()


def pass_the_token__assigns_what_recv_returns(group=None):
    """returns the sender's rank"""
    rank, size, after, before = _neighbours(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank == 0:
        dist.send(token + 1, group=group, group_dst=after)
        token = dist.recv(token, group=group, group_src=before)
        return token
    token = dist.recv(token, group=group, group_src=before)
    dist.send(token + 1, group=group, group_dst=after)
    return token


def pass_the_token__only_rank_0_adds(group=None):
    """Each rank adds 1"""
    rank, size, after, before = _neighbours(group)
    token = torch.zeros(1, dtype=torch.int64)
    if size == 1:
        return 1
    if rank == 0:
        dist.send(token + 1, group=group, group_dst=after)
        dist.recv(token, group=group, group_src=before)
    else:
        dist.recv(token, group=group, group_src=before)
        dist.send(token, group=group, group_dst=after)
    return token.item()


def shard_range__returns_the_ends(n, rank, size):
    """Return the part itself"""
    each, rest = divmod(n, size)
    start = rank * each + min(rank, rest)
    return start, start + each + (rank < rest)


def ring_shift__drops_the_handle(x, group=None):
    """Keep the handle"""
    _, size, after, before = _neighbours(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    dist.isend(x, group=group, group_dst=after)
    dist.recv(got, group=group, group_src=before)
    return got


def ring_shift__ignores_the_group(x, group=None):
    """group_peer="""
    rank, size, after, before = _neighbours(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, got, before)]):
        work.wait()
    return got


def all_ranks_finite__ignores_the_group(loss, group=None):
    """over the group"""
    flag = torch.isfinite(loss).int()
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def all_ranks_finite__forgets_infinity(loss, group=None):
    """Infinity is not finite"""
    flag = (~torch.isnan(loss)).int()
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def all_ranks_finite__leaves_before_the_call(loss, group=None):
    """All ranks must make the same calls"""
    if not torch.isfinite(loss):
        return False
    flag = torch.ones(1)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def all_ranks_finite__keeps_what_all_reduce_returns(loss, group=None):
    """returns None"""
    flag = torch.isfinite(loss).int()
    flag = dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def ring_shift__all_send_first(x, group=None):
    """all ranks send first"""
    rank, size, after, before = _neighbours(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    dist.send(x, after)
    dist.recv(got, before)
    return got


def ring_shift__all_receive_first(x, group=None):
    """start the send before"""
    rank, size, after, before = _neighbours(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    dist.recv(got, before)
    dist.send(x, after)
    return got


def ring_shift__wrong_way_round(x, group=None):
    """rank after it"""
    rank, size, after, before = _neighbours(group)
    if size == 1:
        return x.clone()
    got = torch.empty_like(x)
    work = dist.isend(x, before)
    dist.recv(got, after)
    work.wait()
    return got


def ring_shift__overwrites_x(x, group=None):
    """x was overwritten"""
    rank, size, after, before = _neighbours(group)
    if size == 1:
        return x.clone()
    work = dist.isend(x.clone(), after)
    dist.recv(x, before)
    work.wait()
    return x


def ring_shift__gathers_everything(x, group=None):
    """to everybody"""
    rank, size, after, before = _neighbours(group)
    everybodys = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(everybodys, x)
    return everybodys[before].clone()


def ring_shift__forgets_to_return(x, group=None):
    """Return the received tensor"""
    rank, size, after, before = _neighbours(group)
    if size > 1:
        got = torch.empty_like(x)
        work = dist.isend(x, after)
        dist.recv(got, before)
        work.wait()


def all_ranks_finite__looks_at_its_own_only(loss, group=None):
    """its own loss only"""
    return bool(torch.isfinite(loss))


def all_ranks_finite__any_is_enough(loss, group=None):
    """MIN over ranks"""
    flag = torch.isfinite(loss).int()
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def all_ranks_finite__reduces_the_loss(loss, group=None):
    """Reduce a flag of your own"""
    dist.all_reduce(loss, group=group)
    return bool(torch.isfinite(loss))


def all_ranks_finite__sums_a_copy(loss, group=None):
    """may overflow"""
    total = loss.clone()
    dist.all_reduce(total, group=group)
    return bool(torch.isfinite(total))


def all_ranks_finite__returns_a_tensor(loss, group=None):
    """Return a bool"""
    flag = torch.isfinite(loss).int()
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return flag
