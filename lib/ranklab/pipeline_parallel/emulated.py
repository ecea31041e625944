"""A stage that sleeps instead of computing, so that a real run on two cores shows the bubble.

Sleeping ranks really overlap. Messages, order and waits are real.
"""

import time

import torch


class SleepingStage:
    """Return x, or its sum for the last stage, after `forward` seconds.

    Backward takes input_gradient + weight_gradient seconds; the second is deferred to W, if any.
    """

    def __init__(self, forward, input_gradient, weight_gradient, queue, is_last=False):
        self.costs = forward, input_gradient, weight_gradient
        self.queue, self.is_last = queue, is_last
        self.anchor = torch.zeros((), requires_grad=True)  # so that the first stage has a backward

    def __call__(self, x, targets):
        y = Sleep.apply(x, self.anchor.to(x.device), self.costs, self.queue)
        return y.sum() if self.is_last else y


class Sleep(torch.autograd.Function):
    """Return x after a sleep."""

    @staticmethod
    def forward(ctx, x, anchor, costs, queue):
        ctx.costs, ctx.queue = costs, queue
        time.sleep(costs[0])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _, input_seconds, weight_seconds = ctx.costs
        time.sleep(input_seconds)
        if ctx.queue.current is None:
            time.sleep(weight_seconds)
        else:
            ctx.queue.add(lambda: time.sleep(weight_seconds))
        return gradient, None, None, None
