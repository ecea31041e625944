"""The figures of the deck 06_zero.md."""
import contextlib
import functools

import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.meter import MemoryCurve
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.plots import zero as plots
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3

SIZE = 5.75, 2.4  # inches


def states():
    return plots.states(7.5e9, 64), *SIZE


def shards():
    sizes = {"embedding": 13, "weight": 11, "bias": 4, "head": 10}
    return plots.shards(sizes, 4), *SIZE


def muon():
    return plots.muon_exchange([(6, 4), (8, 8), (5, 8)], 3, title=""), 6.6, 2.5


def timeline():
    return plots.unit_timeline(title=""), 6.4, 2.8


def _one_step(stage):
    """The MemoryCurve of one step of a small GPT, after a first step that makes Adam's state."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(n_layer=8, n_embd=128)).to(device())
    classes = OverlappedDataParallel, ZeroStage1, ZeroStage2, ZeroStage3
    options = {} if stage == 3 else {"bucket_cap_bytes": 10**6}
    model = classes[stage](gpt, **options)
    new = functools.partial(torch.optim.AdamW, lr=1e-3)
    optimizer = model.make_optimizer(new) if stage else new(model.parameters())
    tokens = torch.zeros(1, 32, dtype=torch.long, device=device())

    def gathered():
        return [b.weights for b in model.buckets] if stage == 3 else []

    def step(mark=lambda name: None):
        mark("forward")
        loss = model(tokens).square().mean()
        mark("backward")
        loss.backward()
        mark("step")
        optimizer.step()
        optimizer.zero_grad()

    shards = [b.shard for b in model.buckets] if stage else []
    curve = MemoryCurve(model, optimizer, gathered, lambda: [b.flat for b in model.buckets], shards)
    step()
    with curve if dist.get_rank() == 0 else contextlib.nullcontext():
        step(curve.mark)
    return curve


def memory():
    names = "data parallel", "stage 1", "stage 2", "stage 3"
    curves = {name: launch(_one_step, stage, ranks=4)[0] for stage, name in enumerate(names)}
    return plots.memory_curves(curves, "1.6 million parameters, float32, rank 0 of 4"), 6.2, 2.7
