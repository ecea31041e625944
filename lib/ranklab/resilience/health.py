"""A health check before a run or after a failure: wrong ranks, slow ranks and slow links.

Probe measures one rank and one link; health_check decides which rank measures what and when, and
interprets the results.
The product is checked by its row sums, as in Huang and Abraham, Algorithm-Based Fault Tolerance
for Matrix Operations (IEEE Transactions on Computers, 1984).
"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.engine import device


class Health(NamedTuple):
    """The faults that were found; ranks are numbered inside the group, in ascending order."""

    wrong: list  # ranks whose product or memory is wrong
    slow: list  # ranks with a slow product, or with two slow links
    links: list  # [(rank, the next one), ...]: slow links, without the links of slow ranks


class Probe:
    """The measurements of one rank. Numbers are small integers, so every sum is exact."""

    def __init__(self, size=256, nbytes=1 << 22, times=3):
        self.size, self.nbytes, self.times = size, nbytes, times

    def product(self):
        """Return (whether a matrix product is right, the shortest seconds of `times` runs)."""
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randint(-8, 9, (self.size, self.size), generator=generator).float()
                .to(device()) for _ in "ab")
        c, seconds = self.timed(lambda: a @ b)
        a, b, c = a.double(), b.double(), c.double()  # c's lowest bits count as well
        return torch.equal(c.sum(1), (a * b.sum(1)).sum(1)), seconds

    def memory(self):
        """Return whether memory keeps three patterns: alternating bits, their inverse, addresses.
        """
        room = torch.empty(self.nbytes // 8, dtype=torch.int64, device=device())
        alternating = 0x5555555555555555
        is_right = all(bool((room.fill_(bits) == bits).all())
                       for bits in (alternating, ~alternating))
        places = torch.arange(len(room), device=device())
        return is_right and torch.equal(room.copy_(places), places)

    def message(self, partner, group=None):
        """Return the seconds to exchange nbytes with `partner`: the shortest of `times` runs.

        The partner must call this as well.
        """
        out = torch.ones(self.nbytes, dtype=torch.uint8, device=device())
        into = torch.empty_like(out)

        def exchange():
            for work in dist.batch_isend_irecv([
                    dist.P2POp(dist.isend, out, group=group, group_peer=partner),
                    dist.P2POp(dist.irecv, into, group=group, group_peer=partner)]):
                work.wait()
            return into

        return self.timed(exchange)[1]

    def timed(self, call):
        """Return (the last call's result, seconds of the shortest call), after a warm-up call."""
        shortest = float("inf")
        for turn in range(self.times + 1):
            start = time.perf_counter()
            value = call()
            if device().type != "cpu":
                torch.accelerator.synchronize()
            if turn:
                shortest = min(shortest, time.perf_counter() - start)
        return value, shortest


def health_check(probe, group=None, slow=3.0):
    """Measure all ranks and the links of their ring; return the same Health on every rank.

    A link is as slow as the slower of its two measurements. Two ranks have one link, one has none.
    probe: a Probe, or any object with its three methods: product() -> (right?, seconds), memory()
        -> right?, message(partner, group) -> seconds, which both ranks of a link call.
    slow: a product is slow if it takes more than this many times as long as on the fastest rank,
        and a message if it takes more than this many times as long as on the fastest link.
    Cost: one product() and one memory() on each rank, and one message() on each link. A rank talks
        to one other at a time, and at most 3 messages follow one another, however many ranks there
        are. Then one all-gather of 4 numbers.
    Lab: 14
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    after, before = (rank + 1) % R, (rank - 1) % R
    is_right, product = probe.product()
    seconds = {rank: 0.0}
    n_links = R if R > 2 else R - 1  # link i goes from rank i to the next one
    local_links = [link for link in (rank, before) if link < n_links]
    # Even links, then odd ones, so that no rank waits for a rank that waits. In an odd ring link 0
    # and the last one are both even: they follow each other on rank 0.
    for link in sorted(local_links, key=lambda link: link % 2):
        partner = after if link == rank else before
        seconds[partner] = probe.message(partner, group)
    row = [is_right and probe.memory(), product, seconds[after], seconds[before]]
    row = torch.tensor(row, dtype=torch.float64, device=device())
    rows = [torch.empty_like(row) for _ in range(R)]
    dist.all_gather(rows, row, group=group)
    right, products, to_next, from_before = torch.stack(rows, dim=1).tolist()
    durations = [max(to_next[r], from_before[(r + 1) % R]) for r in range(n_links)]
    slow_links = {link for link, duration in enumerate(durations)
                  if duration > slow * min(durations)}
    # A rank with two slow links has a slow card; its cables are good.
    slow_cards = {r for r in range(R) if R > 2 and {r, (r - 1) % R} <= slow_links}
    return Health([r for r in range(R) if not right[r]],
                  [r for r in range(R) if r in slow_cards or products[r] > slow * min(products)],
                  [(r, (r + 1) % R) for r in sorted(slow_links)
                   if not slow_cards & {r, (r + 1) % R}])
