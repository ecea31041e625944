"""Lab 00: many processes run one program, and each knows only its rank.

    coordinates       rank -> node and local rank
    shard_range       which part of the work is mine
    pass_the_token    talk to one neighbour at a time
    ring_shift        talk to both neighbours at once
    all_ranks_finite  decide together, so that all ranks take the same branch
    roll_call         find the missing ranks, where a collective would just hang
"""

import json
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.engine import device


class Coordinates(NamedTuple):
    """The place of a rank: torchrun's GROUP_RANK and LOCAL_RANK."""

    node: int
    local_rank: int


def coordinates(rank, ranks, nodes=1):
    """Return the coordinates of `rank` if `ranks` are laid out node by node; nothing is sent.

    Raises: ValueError if nodes does not divide ranks, or there is no such rank.
    Lab: 00
    """
    if ranks % nodes:
        raise ValueError(f"nodes={nodes} must divide ranks={ranks}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be between 0 and ranks - 1 = {ranks - 1}")
    return Coordinates(*divmod(rank, ranks // nodes))


def shard_range(n, rank, size):
    """Return the part of range(n) that belongs to `rank` of `size`: contiguous, in rank order.

    Together the parts make up range(n), and no two share an item. Their lengths differ by at most
    one; the longer parts come first. A part is a range, a list, or another sequence of numbers.
    Nothing is sent: each rank computes its own part.
    Lab: 00
    """
    share, left_over = divmod(n, size)
    start = rank * share + min(rank, left_over)  # the ranks before me took one extra each
    return range(start, start + share + (rank < left_over))


def pass_the_token(group=None):
    """Pass a token once around the ring; return its value on arrival at this rank.

    The token is a counter, which rank 0 starts at 0. Each rank adds 1 and sends it to the next
    rank; the last sends it to rank 0. So rank r returns the int r, and rank 0 the number of ranks.
    Cost: each rank sends one message of 8 bytes; a single rank sends none.
    Lab: 00
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    token = torch.zeros(1, dtype=torch.int64, device=device())
    if size == 1:
        return 1
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        dist.send(token + 1, group=group, group_dst=next_rank)
        dist.recv(token, group=group, group_src=previous_rank)
    else:
        dist.recv(token, group=group, group_src=previous_rank)
        dist.send(token + 1, group=group, group_dst=next_rank)
    return token.item()


def ring_shift(x, group=None):
    """Return the `x` of the previous rank; all ranks shift at the same time.

    A new tensor with x's shape and dtype; `x` itself is unchanged, and all messages have arrived.
    Cost: each rank sends x once, in one message; a single rank sends nothing and gets a copy.
    Lab: 00
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return x.clone()
    x = x.contiguous()  # a message is one block of memory
    received = torch.empty_like(x)
    # Both are under way before either is waited for, so no rank blocks its neighbour.
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ])
    for work in works:
        work.wait()
    return received


def all_ranks_finite(loss, group=None):
    """Return True on every rank if `loss` is finite on all ranks; otherwise False on every rank.

    So all ranks take the same branch. `loss` and its autograd graph, if any, are unchanged.
    Cost: one all-reduce of 4 bytes.
    Lab: 00
    """
    finite = torch.isfinite(loss).all().to(torch.int32)  # 1 or 0; the loss itself could overflow
    dist.all_reduce(finite, dist.ReduceOp.MIN, group=group)
    return bool(finite)


def roll_call(store, rank, ranks, seconds):
    """Return the sorted list of the ranks that have not called in time, the same on every rank.

    When all ranks have called, all get [] at once. Otherwise time runs out `seconds` after the
    first call, and each rank gets the list soon after. A rank that calls later gets the same list
    at once, and is on it. Any rank may be missing, including rank 0.
    store: an empty torch.distributed Store, used for one roll call only.
    rank: this rank's number, out of `ranks` that should call; there may be thousands.
    Cost: each rank makes at most ranks + 8 calls to the store, however long it waits; no
        collective.
    Lab: 00
    """
    missing = []
    store.set(f"here/{rank}", "")
    if store.add("calls", 1) < ranks:
        try:
            store.wait(["missing"], timedelta(seconds=seconds))
        except RuntimeError:  # the time is up
            missing = [r for r in range(ranks) if not store.check([f"here/{r}"])]
    # Two ranks may see different ranks. The first list stands, and every rank takes that one.
    return json.loads(store.compare_set("missing", "", json.dumps(missing)))
