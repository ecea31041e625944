"""The figures of the deck 07_fsdp.md."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn

from ranklab import device, launch
from ranklab.fsdp import FullyShardedBlock, hybrid_shard_groups, shard_parameter
from ranklab.meter import MemoryCurve
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.plots import fsdp as plots
from ranklab.plots.zero import memory_curves


def step():
    return plots.over_a_step(title=""), 6.2, 2.9


def _rows():
    layer = nn.ModuleDict({"up": nn.Linear(4, 10), "down": nn.Linear(10, 4)})
    return {name: len(shard_parameter(p)) for name, p in layer.named_parameters()}


def rows():
    found = launch(_rows, ranks=4)
    shares = {name: [of_rank[name] for of_rank in found] for name in found[0]}
    return plots.rows(shares), 5.75, 2.4


def hybrid():
    groups = launch(lambda: [dist.get_process_group_ranks(g) for g in hybrid_shard_groups(4)],
                    ranks=8)
    return plots.hybrid(groups, 4), 6.2, 2.4


def _one_step(keep_whole):
    """The MemoryCurve of one step of a small GPT, after a first step that makes Adam's state."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=8, n_embd=64)).to(device())
    blocks = [FullyShardedBlock(module, reshard_after_forward=not keep_whole)
              for module in (*model.blocks.values(), model)]
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = [p for block in blocks for p in block.parameters]
    tokens = torch.zeros(1, 16, dtype=torch.long, device=device())
    curve = MemoryCurve(model, optimizer, lambda: [
        *(block.gathered for block in blocks), *(p.whole for p in parameters)])
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with curve if dist.get_rank() == 0 else contextlib.nullcontext():  # it takes time
        curve.mark("forward")
        loss = model(tokens).square().mean()
        curve.mark("backward")
        loss.backward()
        curve.mark("step")
        optimizer.step()
        optimizer.zero_grad()
    return curve


def memory():
    names = {"shards again after forward": False, "whole until backward": True}
    curves = {name: launch(_one_step, keep, ranks=4)[0] for name, keep in names.items()}
    return memory_curves(curves, "Eight blocks, 0.4 million parameters, rank 0 of 4"), 6.2, 2.7
