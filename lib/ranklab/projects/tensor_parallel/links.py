"""The cost of a link for tensor parallelism, by the formula."""

import functools

from ranklab.collectives import Link
from ranklab.hardware import H100
from ranklab.planner.machine import machine
from ranklab.projects.tensor_parallel.costs import step_seconds

NVLINK = Link(5e-6, 1 / H100.nvlink_bandwidth)  # alphas are of the order of NCCL's, tuning.cc
CARD = Link(1e-5, 1 / H100.network_bandwidth)  # one network card, of one GPU
GB200 = machine("GB200-NVL72")  # 72 GPUs in one NVLink domain


def ring_link(ranks, node=8, cards=8):
    """Return the Link of the average step of a ring all-reduce over whole nodes.

    A ring enters and leaves a node once (nccl issue 687), and NCCL runs one through each card, so
    that the bytes/s of the cards add up (412). 2 (nodes-1) of its 2 (ranks-1) steps wait for the
    network, by NCCL's own cost model (src/graph/tuning.cc).
    node: GPUs joined by NVLink; 1: each rank is alone in its node, with only its card
    cards: network cards of each node
    """
    nodes = -(-ranks // node)
    if nodes == 1:
        return NVLINK
    outside = (nodes - 1) / (ranks - 1)
    return Link(outside * CARD.alpha + (1 - outside) * NVLINK.alpha,
                max(NVLINK.beta, CARD.beta / cards))


def switch_link(ranks, bandwidth):
    """Return the Link of the average ring step if NVLink's switch adds up the numbers (NVLS).

    The 2 (ranks-1) steps together take one latency: 25 us, whatever their number (NCCL's own cost
    model, hwLatencies in src/graph/tuning.cc). The bytes are counted as for a ring.
    bandwidth  bytes/s of each rank
    """
    return Link(25e-6 / max(1, 2 * (ranks - 1)), 1 / bandwidth)


LINKS = {  # (ranks) -> what their ring is made of; the GPUs are H100s
    "no messages": lambda ranks: Link(0, 0),
    "NVLink joins all": functools.partial(ring_link, node=72),
    "8 a node, 8 cards": ring_link,
    "8 a node, 1 card": functools.partial(ring_link, cards=1),
    "1 a node, 1 card": functools.partial(ring_link, node=1, cards=1),
}
RACK = {  # the same for GB200s in one rack
    "a ring": lambda ranks: Link(NVLINK.alpha, 1 / GB200.link),
    "sums in the switch": lambda ranks: switch_link(ranks, GB200.link),
}


def curves(shape, batch, links=LINKS, ranks=(1, 2, 4, 8), peak=H100.bf16_flops / 2):
    """Predict {name of links: [seconds of a step with each number of ranks]}.

    One rank computes alone.
    """
    return {name: [step_seconds(shape, batch, R, link(R), peak) for R in ranks]
            for name, link in links.items()}
