"""A stage whose work is sleep: ranks that sleep really overlap, also on two cores, so a real run of
a schedule shows its bubble. Messages, order and waits are real.
"""

import time

import torch


class SleepingStage:
    """(x, targets) -> x, or its sum for the last stage, after `forward` seconds; backward takes
    input_gradient + weight_gradient, and the second part waits for W if there is one.
    """

    def __init__(self, forward, input_gradient, weight_gradient, queue, is_last=False):
        self.costs = forward, input_gradient, weight_gradient
        self.queue, self.is_last = queue, is_last
        self.anchor = torch.zeros((), requires_grad=True)  # so that the first stage has a backward

    def __call__(self, x, targets):
        y = Sleep.apply(x, self.anchor.to(x.device), self.costs, self.queue)
        return y.sum() if self.is_last else y


class Sleep(torch.autograd.Function):
    """x, later."""

    @staticmethod
    def forward(ctx, x, anchor, costs, queue):
        ctx.costs, ctx.queue = costs, queue
        time.sleep(costs[0])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _, of_input, of_weight = ctx.costs
        time.sleep(of_input)
        if ctx.queue.now is None:
            time.sleep(of_weight)
        else:
            ctx.queue.put(lambda: time.sleep(of_weight))
        return gradient, None, None, None
