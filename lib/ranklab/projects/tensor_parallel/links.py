"""When does a slow link make tensor parallelism lose? By the formula, and with emulated links."""

import tempfile
import time

import torch

from ranklab.baseline import transformer_flops
from ranklab.collectives import Link
from ranklab.collectives.emulate import EmulatedLinks
from ranklab.engine import launch
from ranklab.hardware import H100
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects.clock import best_seconds
from ranklab.projects.tensor_parallel.costs import step_seconds, traffic
from ranklab.tensor_parallel import How, parallel_gpt

LINKS = {"NVLink": Link(5e-6, 1 / H100.nvlink_bandwidth),
         "InfiniBand": Link(1e-5, 1 / H100.network_bandwidth)}
TINY = GPTConfig(n_embd=32)


def curves(shape, batch, links=LINKS, ranks=(1, 2, 4, 8), peak=0.5 * H100.bf16_flops):
    """{name of a link: [seconds of a step with each number of ranks]}; one rank computes alone."""
    return {name: [step_seconds(shape, batch, R, link, peak) for R in ranks]
            for name, link in links.items()}


def emulate(ranks=4, batch=4, alone=1.2, slower=15):
    """{where: (seconds by the formula, seconds measured)} of a step of real ranks that sleep.

    alone   seconds that one rank would need for the step
    slower  bytes take that much longer between two nodes than inside of one
    """
    peak = transformer_flops(TINY, batch, TINY.n_ctx) / alone
    fast = Link(1e-4, 0.08 / traffic(TINY, batch, ranks)[1])
    links = {"one node": (ranks, fast), "two nodes": (ranks // 2, Link(1e-4, slower * fast.beta))}
    with tempfile.TemporaryDirectory() as folder:
        seen = {where: max(launch(_step, batch, alone / ranks, fast, link, per_node, folder,
                                  ranks=ranks, nodes=ranks // per_node))
                for where, (per_node, link) in links.items()}
    return {where: (step_seconds(TINY, batch, ranks, link, peak, size=4), seen[where])
            for where, (_, link) in links.items()}


def _step(batch, computing, fast, slow, per_node, folder):
    """The seconds of one step on this rank: blocks sleep, a third of the time forward."""
    model, each = parallel_gpt(GPT(TINY), How()), computing / 3 / TINY.n_layer
    for block in model.blocks.values():
        block.register_forward_pre_hook(lambda *_: time.sleep(each))
        block.register_full_backward_pre_hook(lambda *_: time.sleep(2 * each))
    tokens = torch.zeros(batch, TINY.n_ctx, dtype=torch.long)
    with EmulatedLinks(fast, slow, per_node, folder):
        return best_seconds(lambda: model(tokens, tokens).backward(), repeats=2)
