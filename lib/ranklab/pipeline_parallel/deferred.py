"""Deferred gradients of weights: B in two halves, I and W.

A linear layer's backward is two products. One gives the gradient of its input, for which the
previous stage waits. The other gives the gradient of its weight, for which no rank waits, so it is
put into a queue. Small parts (norms, biases, an embedding) stay in I.
Paper: Qi et al. 2023 (arXiv 2401.10241), section 2
"""

import contextlib
import functools
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn


class WeightQueue:
    """Hold the work that I defers to W, for each stage and micro-batch."""

    def __init__(self):
        self.pending, self.current = defaultdict(list), None

    @contextlib.contextmanager
    def deferral(self, stage, micro_batch):
        """Defer the weights' products of the block to run(stage, micro_batch)."""
        outer, self.current = self.current, (stage, micro_batch)
        try:
            yield
        finally:
            self.current = outer

    def add(self, work):
        """Defer `work`, a function, to the W that belongs to the I running now."""
        self.pending[self.current].append(work)

    @torch.no_grad()  # else the gradients have a graph, which keeps their inputs in memory
    def run(self, stage, micro_batch):
        for work in self.pending.pop((stage, micro_batch), []):
            work()


def defer_weights(module, queue):
    """Replace each nn.Linear of `module` by a DeferredLinear with the same parameters."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, DeferredLinear(child, queue))
    return module


class DeferredLinear(nn.Module):
    """Compute `linear`; defer the gradient of its weight to W, if the schedule has W."""

    def __init__(self, linear, queue):
        super().__init__()
        self.weight, self.bias, self.queue = linear.weight, linear.bias, queue

    def forward(self, x):
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = Deferred.apply(x, self.weight, self.queue)
        return y if self.bias is None else y + self.bias


class Deferred(torch.autograd.Function):
    """Compute x @ weight.T, in the type of x."""

    @staticmethod
    def forward(ctx, x, weight, queue):
        ctx.save_for_backward(x, weight.to(x.dtype))
        ctx.weight, ctx.queue = weight, queue
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        x_grad = gradient @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return x_grad, None, None
        if ctx.queue.current is None:
            return x_grad, weight_gradient(ctx.weight, x, gradient), None
        ctx.queue.add(functools.partial(add_weight_gradient, ctx.weight, x, gradient))
        return x_grad, None, None


def weight_gradient(weight, x, gradient):
    return (gradient.flatten(0, -2).T @ x.flatten(0, -2)).to(weight.dtype)  # (out, in)


def add_weight_gradient(weight, x, gradient):
    new = weight_gradient(weight, x, gradient)
    weight.grad = new if weight.grad is None else weight.grad + new
