"""Watches a ZeroStage3: which units are whole when a block begins to compute."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranklab.checks.zero.toys import SGD, Messages, is_there, seeded
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.zero.sharded_model import in_backward

BLOCKS = 4


class _Begins(torch.autograd.Function):
    """The identity; its backward is the first of its block's."""

    @staticmethod
    def forward(ctx, x, note, number):
        ctx.note, ctx.number = note, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.note("backward", ctx.number)
        return gradient, None, None


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.up, self.down = number, nn.Linear(5, 4), nn.Linear(4, 5)
        self.note = None

    def forward(self, x):
        self.note("forward once more" if in_backward() else "forward", self.number)
        return _Begins.apply(self.down(torch.tanh(self.up(x))), self.note, self.number)


class Watched(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.recompute, self.first = recompute, nn.Linear(5, 5)
        self.blocks = nn.ModuleList(Block(number) for number in range(BLOCKS))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if (
                self.recompute and torch.is_grad_enabled()) else block(x)
        return x


class Watch:
    """`wrapped`, a ZeroStage3 of a Watched, and what was seen when a block began to compute.

    events  (what begins, the block's number, blocks that are whole, those of them that are still
            on their way, blocks with whole gradients)
    """

    def __init__(self, wrapped_class, recompute=None):
        self.wrapped = wrapped_class(seeded(lambda: Watched(recompute), 0))
        self.optimizer = self.wrapped.make_optimizer(SGD)
        self.units, self.events, self.messages = self.wrapped.units[:-1], [], None
        for block in self.wrapped.module.blocks:
            block.note = self.note

    def whole(self):
        """The numbers of the blocks whose weights take memory."""
        return [number for number, unit in enumerate(self.units)
                if any(is_there(bucket.weights) for bucket in unit.buckets)]

    def note(self, what, number):
        whole = self.whole()
        if number not in whole:
            raise RuntimeError(f"block {number}'s {what} begins without its weights")
        arriving = {held.tensor.data_ptr() for held in self.messages.handles if not held.is_here}
        under_way = [n for n, unit in enumerate(self.units) if n in whole and any(
            bucket.weights.data_ptr() in arriving for bucket in unit.buckets)]
        gradients = [n for n, unit in enumerate(self.units)
                     if any(p.grad is not None for p in unit.module.parameters())]
        self.events.append((what, number, whole, under_way, gradients))

    def step(self, sync=True):
        """What is seen in one step: events, what is whole when, and bytes sent."""
        self.events.clear()
        self.optimizer.zero_grad()
        self.wrapped.sync = sync
        with Messages() as self.messages, Traffic() as traffic:
            y = self.wrapped(torch.ones(2, 5, device=device()))
            between = self.whole()
            y.square().sum().backward()
        if sync:
            self.optimizer.step()
        return {"events": list(self.events), "between": between, "whole": self.whole(),
                "sent": traffic.sent_bytes, "missing": self.messages.missing(),
                "rest": any(is_there(b.weights) for b in self.wrapped.units[-1].buckets),
                "blocks": sum(b.weights.nbytes for unit in self.units for b in unit.buckets),
                "all": sum(bucket.weights.nbytes for bucket in self.wrapped.buckets)}

    def evaluate(self):
        """What is whole after a forward that has no backward."""
        self.events.clear()
        with torch.no_grad(), Messages() as self.messages:
            self.wrapped(torch.ones(2, 5, device=device()))
        return {"events": list(self.events), "whole": self.whole()}


def watch(wrapped_class, recompute=None):
    """Runs on every rank: two steps, a backward that sends nothing, a forward without one."""
    watched = Watch(wrapped_class, recompute)
    return [watched.step(), watched.step(), watched.step(sync=False)], watched.evaluate()
