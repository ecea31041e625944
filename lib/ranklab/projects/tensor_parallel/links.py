"""When does a slow link make tensor parallelism lose? By the formula, and with emulated links."""

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

# alpha is of the order that NCCL's messages have
LINKS = {"NVLink": Link(5e-6, 1 / H100.nvlink_bandwidth),
         "InfiniBand": Link(1e-5, 1 / H100.network_bandwidth)}
TINY, BATCH = GPTConfig(n_layer=1, n_embd=32), 4


def curves(shape, batch, links=LINKS, ranks=(1, 2, 4, 8), peak=H100.bf16_flops / 2):
    """{name of a link: [seconds of a step with each number of ranks]}; one rank computes alone."""
    return {name: [step_seconds(shape, batch, R, link, peak) for R in ranks]
            for name, link in links.items()}


def emulate(ranks=4, alone=2.0, slower=9):
    """{where: (seconds by the formula, seconds measured)} of a step of real ranks that sleep.

    alone   seconds that one rank would need for the step
    slower  a byte takes that much longer between two nodes than inside of one
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
