"""What a link costs tensor parallelism: by the formula, and with links that sleep."""

import functools
import tempfile
import time

import torch

from ranklab.baseline import transformer_flops
from ranklab.collectives import Link
from ranklab.collectives.emulate import EmulatedLinks
from ranklab.engine import device, launch
from ranklab.hardware import H100
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects.clock import best_seconds
from ranklab.projects.tensor_parallel.costs import step_seconds, traffic
from ranklab.tensor_parallel import parallel_gpt

NVLINK = Link(5e-6, 1 / H100.nvlink_bandwidth)  # alphas are of the order of NCCL's, tuning.cc
CARD = Link(1e-5, 1 / H100.network_bandwidth)  # one network card, of one GPU
TINY, BATCH = GPTConfig(n_layer=1, n_embd=32), 4


def ring_link(ranks, node=8, cards=8):
    """The Link of a mean step of a ring all-reduce over whole nodes, each with that many cards.

    A ring enters and leaves a node once (nccl issue 687), and NCCL runs one through each card, so
    that their bytes/s add up (412). 2 (nodes-1) of its 2 (ranks-1) steps wait for the network, by
    NCCL's own cost model (src/graph/tuning.cc).
    node  GPUs that NVLink joins; 1: each rank is alone in its node, and its card is all it has
    """
    nodes = -(-ranks // node)
    if nodes == 1:
        return NVLINK
    outside = (nodes - 1) / (ranks - 1)
    return Link(outside * CARD.alpha + (1 - outside) * NVLINK.alpha,
                max(NVLINK.beta, CARD.beta / cards))


LINKS = {  # (ranks) -> what their ring is made of
    "no messages": lambda ranks: Link(0, 0),
    "NVLink joins all": functools.partial(ring_link, node=72),
    "8 a node, 8 cards": ring_link,
    "8 a node, 1 card": functools.partial(ring_link, cards=1),
    "1 a node, 1 card": functools.partial(ring_link, node=1, cards=1),
}


def curves(shape, batch, links=LINKS, ranks=(1, 2, 4, 8), peak=H100.bf16_flops / 2):
    """{name of links: [seconds of a step with each number of ranks]}; one rank computes alone."""
    return {name: [step_seconds(shape, batch, R, link(R), peak) for R in ranks]
            for name, link in links.items()}


def emulate(ranks=4, alone=2.0, slower=9):
    """{where: (seconds by the formula, seconds measured)} of a step of real ranks that sleep: the
    links' speeds are invented, and what is tested is that computing and messages add up.

    alone   seconds that one rank would need for the step
    slower  how many times as long a byte takes between nodes: 9 as with one card of 50 GB/s
    """
    peak = transformer_flops(TINY, BATCH, TINY.n_ctx) / alone
    beta = alone / 10 / traffic(TINY, BATCH, ranks)[1]
    fast, slow = Link(1e-4, beta), Link(1e-4, slower * beta)
    found = {}
    for where, nodes, link in (("one node", 1, fast), ("two nodes", 2, slow)):
        with tempfile.TemporaryDirectory() as folder:
            measured = max(launch(_step, alone / ranks, fast, slow, ranks // nodes, folder,
                                  ranks=ranks, nodes=nodes))
        found[where] = step_seconds(TINY, BATCH, ranks, link, peak, size=4), measured
    return found


def _step(computing, *links):
    """The seconds of one step on this rank, less those that the tiny model really needs."""
    model = parallel_gpt(GPT(TINY).to(device()))
    block = model.blocks["0"]
    tokens = torch.zeros(BATCH, TINY.n_ctx, dtype=torch.long, device=device())
    real = best_seconds(lambda: model(tokens, tokens).backward(), repeats=5)
    block.register_forward_pre_hook(lambda *_: time.sleep(computing / 3))
    block.register_full_backward_pre_hook(lambda *_: time.sleep(computing * 2 / 3))
    with EmulatedLinks(*links):
        return best_seconds(lambda: model(tokens, tokens).backward(), repeats=1) - real
