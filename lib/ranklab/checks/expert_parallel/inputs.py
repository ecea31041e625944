"""Shared by the exercises of lab 11: tokens that choose experts on all ranks, and the order in
which their rows are sent.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.prover import AtMost
from ranklab.engine import device
from ranklab.expert_parallel import Sent

C, E = 3, 12  # 4, 3, 2 and 1 ranks divide the experts
EMPTY = 5  # an expert that nobody chooses
EVEN, RING, NONE = "even loads", "uneven loads", "some of no expert"
HANDLES = "handles that nobody waited for"
CALLS, BYTES = "calls of collectives", "bytes given to collectives"
COST = tuple(name + when for when in ("", " in backward") for name in (HANDLES, CALLS, BYTES))


class Tokens(NamedTuple):
    """Tokens of all ranks.

    loads  EVEN: each rank sends every rank as many rows, from the same places on all ranks, and no
           token chooses the last expert; RING: each of four ranks sends most to the next, and gets
           as many as it sends; NONE: the last of several ranks has no tokens, no token chooses the
           expert EMPTY, and some choices are -1, including all of the last token's
    """

    dtype: str
    k: int
    loads: str

    def __str__(self):
        return f"{self.dtype}, {self.k} choices a token, {self.loads}"

    def of(self, rank, members):
        """Return (x, chosen, weights) of a rank; the same on every rank that calls it."""
        random = torch.Generator().manual_seed(100 * self.k + rank)
        if self.loads == EVEN:
            a, b, c, d = rank % 3, 4 + rank % 2, 6 + (rank + 1) % 2, 9 + rank % 2
            chosen = torch.tensor([[a, b, 9], [d, a, c], [a, 3, 10], [c, 8, b]])
        elif self.loads == RING:
            experts = [(rank + step) % 4 * 3 + i % 3 for step, n in enumerate((2, 5, 3, 2))
                       for i in range(n)]
            chosen = torch.tensor(experts).view(self.k, -1).T
        else:
            n = 0 if len(members) > 1 and rank == members[-1] else 5 + 2 * rank % 4
            chosen = torch.rand(n, E, generator=random).argsort(dim=1)[:, : self.k].contiguous()
            chosen[chosen == EMPTY] = chosen[-1:] = -1
        x = torch.randint(-9, 10, (len(chosen), C), generator=random)
        weights = torch.rand(chosen.shape, generator=random) + 0.1
        return x.to(device(), getattr(torch, self.dtype)), chosen.to(device()), weights.to(device())

    def ways(self, members):
        """Return the ways() of all members' tokens."""
        return ways([self.of(rank, members)[1].flatten().tolist() for rank in members])


class Way(NamedTuple):
    """The path of a row: from index `place` of a rank's chosen.flatten() to an expert."""

    expert: int
    source: int  # its number in the group
    place: int


def ways(chosen):
    """Return all Ways in the order in which experts have their rows.

    chosen  of each member of the group, flat
    """
    return sorted(Way(expert, source, place) for source, experts in enumerate(chosen)
                  for place, expert in enumerate(experts) if expert >= 0)


def to_rank(all_ways, rank, R, n_experts=E):
    return [way for way in all_ways if way.expert * R // n_experts == rank]


def sent_of(all_ways, rank, R, n_experts=E):
    """Return the Sent of a rank, by loops."""
    departures = [way for way in all_ways if way.source == rank]
    routes = to_rank(all_ways, rank, R, n_experts)
    arrivals = sorted(routes, key=lambda way: (way.source, way.expert, way.place))
    per_rank = n_experts // R
    experts = range(rank * per_rank, (rank + 1) * per_rank)

    def numbers(values):
        return torch.tensor([*values], dtype=torch.long, device=device())

    return Sent(numbers(way.place for way in departures),
                [sum(way.expert // per_rank == r for way in departures) for r in range(R)],
                [sum(way.source == r for way in routes) for r in range(R)],
                numbers(arrivals.index(way) for way in routes),
                numbers(sum(way.expert == e for way in routes) for e in experts))


def of_all(x, group=None):
    """Return (the rows of all ranks, in rank order; how many each has), differentiably."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.zeros(R, dtype=torch.long, device=x.device)
    lengths[rank] = len(x)
    dist.all_reduce(lengths, group=group)
    parts = [x.new_zeros(n, *x.shape[1:]) for n in lengths.tolist()]
    parts[rank] = x
    return AllReduce.apply(torch.cat(parts), group), lengths.tolist()


class AllReduce(torch.autograd.Function):
    """A sum over ranks whose gradient is also summed over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return AllReduce.apply(gradient.contiguous(), ctx.group), None


def costs(traffic, waits, calls, nbytes, when=""):
    """Return the observed cost, from Traffic and Waits of one call, with what is enough."""
    return dict(zip([name + when for name in (HANDLES, CALLS, BYTES)], (
        AtMost(waits.missing(traffic.calls.total()), 0), AtMost(len(traffic.ops), calls),
        AtMost(sum(op.payload_bytes for op in traffic.ops), nbytes)), strict=True))


def error_of(call):
    """Return the name of the error that call() raises, or None."""
    try:
        call()
    except (ValueError, RuntimeError, IndexError, TypeError, AssertionError) as error:
        return type(error).__name__
    return None
