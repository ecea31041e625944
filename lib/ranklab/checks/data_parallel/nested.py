"""OverlappedDataParallel where it is hard to see when a backward begins, and when it is over."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranklab.checks.data_parallel.toys import gradients, off, rows
from ranklab.checks.exercise import Mistake
from ranklab.engine import device


class Checkpointed(nn.Module):
    """Each layer runs in a checkpoint, whose backward is a backward inside the backward."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.order = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), order

    def forward(self, x):
        for i in self.order:
            x = torch.tanh(checkpoint(self.layers[i], x, use_reentrant=True))
        return x.square().mean()


class Hidden(Checkpointed):
    """No checkpoint; but its loss lies in an object into which nobody looks for tensors."""

    def forward(self, x):
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return SimpleNamespace(loss=x.square().mean())


def nested_trial(wrapped_class):
    """{where: (gradients, the right ones)}, and what is said where a layer is in two checkpoints"""
    rank, R, seen = dist.get_rank(), dist.get_world_size(), {}
    for where, kind in (("layers in checkpoints with use_reentrant=True", Checkpointed),
                        ("a loss that forward() returns inside an object", Hidden)):
        model, right = (kind((0, 1)).to(device()) for _ in range(2))
        for r in range(R):
            (_loss(right, r) / R).backward()
        _loss(wrapped_class(model, cap_bytes=1), rank).backward()
        seen[where] = gradients(model), gradients(right)
    twice, said = wrapped_class(Checkpointed((0, 1, 0)).to(device()), cap_bytes=1), ""
    try:
        _loss(twice, rank).backward()
    except Exception as error:  # any: what is said of it comes after what is told before
        said = str(error)
    for work in twice.works:  # nobody else waits for them now
        if hasattr(work, "wait"):
            work.wait()
    return seen, said


def _loss(model, rank):
    out = model(rows(rank).requires_grad_())
    return getattr(out, "loss", out)


def compare_nested(where, seen, said):
    for what, (got, right) in seen.items():
        for name in off(got, right):
            raise Mistake(f"{where}, {what}: the gradient of `{name}` is not the mean", "Leave "
                          "self.backward_begins() where it is, first in the hook: it sees to it "
                          "that finish() is called at the end of backward.")
    if "two gradients" not in said:
        raise Mistake(f"{where}: a layer in two checkpoints gets two gradients in one backward, "
                      "and no error comes", "Its bucket may be on its way when the second one is "
                      "added. Leave `raise self.second_gradient(parameter)` in the hook.")
