"""Lab 00: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import numpy as np
import torch
import torch.distributed as dist


def shard_range__item_by_item(n, rank, size):
    """Deals out the lengths like cards, then counts those before this rank."""
    lengths = [0] * size
    for item in range(n):
        lengths[item % size] += 1
    first = sum(lengths[:rank])
    return tuple(range(first, first + lengths[rank]))


def shard_range__one_formula(n, rank, size):
    """What the first r ranks have together, for r = rank and r = rank + 1."""
    begin, end = (sum((n + r) // size for r in range(size - rs, size)) for rs in (rank, rank + 1))
    return np.arange(begin, end)


def shard_range__asks_for_the_rest(n, rank, size):
    """Rank 0 takes its part, rounded up, and the others share out the rest."""
    part = -(-n // size)
    if rank == 0:
        return range(part)
    rest = shard_range__asks_for_the_rest(n - part, rank - 1, size - 1)
    return range(rest.start + part, rest.stop + part)


def ring_shift__even_ranks_send_first(x, group=None):
    """Breaks the circle by parity; where the size is odd, two that send first are neighbours."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return x.clone()
    arrived = torch.zeros_like(x)

    def send():
        dist.send(x, group=group, group_dst=(rank + 1) % size)

    def receive():
        dist.recv(arrived, group=group, group_src=(rank + size - 1) % size)

    for step in (send, receive) if rank % 2 == 0 else (receive, send):
        step()
    return arrived


def ring_shift__handles_one_by_one(x, group=None):
    """isend and irecv by the numbers of the whole job; the send is waited for last."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    at = ranks.index(dist.get_rank())
    arrived = x.detach().clone()
    if len(ranks) > 1:
        sending = dist.isend(x, dst=ranks[(at + 1) % len(ranks)], group=group)
        arriving = dist.irecv(arrived, src=ranks[at - 1], group=group)
        arriving.wait()
        sending.wait()
    return arrived


def ring_shift__all_to_all(x, group=None):
    """One message, too: all parts are empty but the one for the next rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return torch.clone(x)
    flat, arrived = x.reshape(-1), torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    out, into = [0] * size, [0] * size
    out[(rank + 1) % size] = into[(rank - 1) % size] = x.numel()
    dist.all_to_all_single(arrived, flat, into, out, group=group)
    return arrived.reshape(x.shape)


def pass_the_token__send_is_posted(group=None):
    """The send is under way while rank 0 receives; every handle is waited for."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return 1
    count = torch.full((1,), -1)
    if rank > 0:
        dist.irecv(count, group=group, group_src=rank - 1).wait()
        value = count.item()
    else:
        value = 0
    sending = dist.isend(torch.tensor([value + 1]), group=group, group_dst=(rank + 1) % size)
    if rank == 0:
        dist.irecv(count, group=group, group_src=size - 1).wait()
    sending.wait()
    return value or count.item()


def pass_the_token__numpy(group=None):
    """The number is read by numpy, and rank 0 is the last to receive."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return 1
    token = torch.zeros(1, dtype=torch.long)
    steps = ["receive", "send"] if rank else ["send", "receive"]
    for step in steps:
        if step == "send":
            dist.send(torch.add(token, 1), group=group, group_dst=(rank + 1) % size)
        else:
            dist.recv(token, group=group, group_src=(rank - 1) % size)
    return token.numpy()[0]


def all_ranks_finite__max_of_bad(loss, group=None):
    """A flag for what is bad, and its MAX."""
    bad = torch.zeros(1)
    if not bool(torch.isfinite(loss.detach())):
        bad += 1
    dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
    return not bad.item()


def all_ranks_finite__list_of_flags(loss, group=None):
    """Every rank has all flags."""
    flag = (loss.detach() - loss.detach() == 0).to(torch.uint8).reshape(1)
    flags = [torch.empty_like(flag) for _ in range(dist.get_world_size(group))]
    dist.all_gather(flags, flag, group=group)
    return all(bool(each) for each in flags)


def all_ranks_finite__sum_of_nothing(loss, group=None):
    """0 times a finite number is 0, and all else is NaN, in the loss's own type."""
    zero = loss.detach() * 0
    dist.all_reduce(zero, group=group)
    return zero.item() == 0
