"""Seconds of messages: bandwidth is a curve over the size of message and group, not a line.

The curves are NCCL's published sweeps over message sizes (published/nccl_busbw.csv), as a fraction
of the links' bandwidth. Within a node they are the sweeps of 8 A100 and of 8 H200. Between nodes
the curve has the shape of a sweep on 4 nodes, whose GPU is not named. Between islands of nodes we
assume the same shape. A group of whole nodes uses all their cards.
"""

import bisect
import functools
import math

from ranklab.formulas.collectives import bus_factor
from ranklab.planner.published import table
from ranklab.planner.traffic import HOP

RING = 0.80  # of NVLink, by rings, large messages: 362 of 450 GB/s (H200, all-gather on 8 GPUs)
NVLS, NVLS_RANKS = 1.05, 5  # of NVLink, all-reduce where the switch adds up (473 of 450 GB/s on 8
# H200), and from how many ranks on: 4 H200 had a ring, and 363 GB/s, 5 had NVLS (nccl_busbw.csv)
CARDS = 0.91  # of the cards, large all-reduce over 4 nodes: 365 of 400 GB/s (p5en, nccl_busbw.csv)
SWITCHED = 400e9  # bytes/s of a GPU's link; from here on NVSwitch does the sums (H100 and later)
SPREAD = 0.094  # power of nodes, assumed: of the bandwidth on 4 nodes 128 have 0.72


@functools.cache
def sweep(hardware, ranks):
    """Return (logs of message bytes, logs of bus bandwidth) of a published sweep."""
    points = sorted((float(row["message_bytes"]), float(row["busbw_gb_s"]) * 1e9)
                    for row in table("nccl_busbw")
                    if row["hardware"].startswith(hardware) and row["ranks"] == str(ranks)
                    and row["message_bytes"] and row["algbw_gb_s"])
    return tuple([math.log(value) for value in column] for column in zip(*points))


def bus_of(link, ranks):
    """Return the bus bandwidth of a large all-reduce of these ranks over this link in a node."""
    return link * (NVLS if link >= SWITCHED and ranks >= NVLS_RANKS else RING)


def link_of(bus, ranks):
    """Return the link for which bus_of(link, ranks) is this bus bandwidth."""
    return bus / NVLS if bus == bus_of(bus / NVLS, ranks) else bus / RING


def part_of_best(nbytes, hardware, ranks):
    """Return the bus bandwidth at this size as a fraction of the sweep's best; for sizes below the
    sweep, latency decides.
    """
    sizes, speeds = sweep(hardware, ranks)
    size, best = math.log(max(nbytes, 1.0)), max(speeds)
    if size < sizes[0]:
        return math.exp(speeds[0] - best + size - sizes[0])
    if size >= sizes[-1]:
        return math.exp(speeds[-1] - best)
    index = bisect.bisect_right(sizes, size)
    part = (size - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
    return math.exp(speeds[index - 1] + part * (speeds[index] - speeds[index - 1]) - best)


@functools.lru_cache(maxsize=65536)
def bus_bandwidth(verb, nbytes, span, machine):
    """Return (in nodes, between them, between islands): bytes/s of each rank in nccl-tests' sense,
    for a group with this Span; infinite for links that it does not cross.
    """
    ranks, node_ranks, island_ranks = span
    hardware = "H200" if machine.link >= SWITCHED else "A100-SXM (one"
    best = bus_of(machine.link, node_ranks if verb == "all_reduce" else 0)
    fast = best * part_of_best(nbytes * 8 / min(node_ranks, 8), hardware, 8)
    if node_ranks >= ranks:
        return fast, math.inf, math.inf
    nodes = math.ceil(ranks / node_ranks)
    shape = part_of_best(nbytes * 4 / nodes, "4 nodes", 32) * CARDS * min(1, (nodes / 4) ** -SPREAD)
    far = machine.far * island_ranks * shape if island_ranks < ranks else math.inf
    return fast, node_ranks * machine.network * shape, far


def collective_seconds(verb, nbytes, span, machine, constants):
    """Return the seconds of a collective; nbytes is the larger side, as in nccl-tests."""
    ranks, node_ranks, island_ranks = span
    if ranks < 2 or not nbytes:
        return 0.0
    fast, slow, far = bus_bandwidth(verb, nbytes, span, machine)
    speed = min(constants.link_share * fast, slow, far)
    if verb == "all_to_all":  # only what leaves the node goes through its cards
        slow *= ranks / (ranks - node_ranks) / node_ranks if node_ranks < ranks else 1
        far *= ranks / (ranks - island_ranks) / island_ranks if island_ranks < ranks else 1
        speed = min(fast, slow, far)
    return bus_factor(verb, ranks) * nbytes / speed


def neighbour_seconds(nbytes, span, machine, constants):
    """Return the seconds of one message between the two neighbours of a group that are furthest
    apart: over the link, over one card, or between islands.
    """
    speed = constants.link_share * machine.link
    if span.node < span.ranks:
        speed = machine.network
    if span.island < span.ranks:
        speed = min(speed, machine.far)
    return HOP + nbytes / speed


def exchange_seconds(exchanges, machine, constants):
    """Return the seconds of these Exchanges, one after another, before any is hidden."""
    total = 0.0
    for messages, count, at_once, latency in exchanges:
        times = [neighbour_seconds(nbytes, span, machine, constants) if verb == "send" else
                 collective_seconds(verb, nbytes, span, machine, constants)
                 for verb, nbytes, span in messages]
        total += latency + count * (max if at_once else sum)(times)
    return total
