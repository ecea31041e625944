"""DiLoCo: many local steps, then one outer step on the mean of what the ranks have learned."""

import torch
import torch.distributed as dist


class DiLoCo:
    """Step the inner optimizer alone; every `every` steps take one outer step with all ranks.

    inner: this rank's optimizer, over parameters of one dtype that are equal on all ranks at first.
        Its state stays on its rank, and outer steps leave it alone.
    every: H, the local steps between two outer steps.
    Outer step: `delta` is the outer parameters (those of the last outer step) minus this rank's,
        averaged over ranks. It is the gradient of SGD with Nesterov momentum:
        velocity = momentum * velocity + delta; outer -= lr * (delta + momentum * velocity).
        Then every rank continues from the outer parameters.
    Raises: ValueError if `every` is less than 1.
    Cost: one all-reduce of the parameters' bytes every H steps: DDP's bytes / H. On every rank two
        more numbers for each parameter: the outer parameters and the velocity.
    Paper: Douillard et al. 2023, "DiLoCo" (arXiv 2311.08105)
    Lab: 04
    """

    def __init__(self, inner, every, lr=0.7, momentum=0.9, group=None):
        if every < 1:
            raise ValueError(f"every={every} must be 1 or more")
        self.inner, self.every, self.group, self.steps = inner, every, group, 0
        self.parameters = [p for part in inner.param_groups for p in part["params"]]
        self.outer = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.outer, lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self):
        """Take one inner step, and the outer step if it is due."""
        self.inner.step()
        self.steps += 1
        if self.steps % self.every:
            return
        deltas = [(outer - p).flatten() for outer, p in zip(self.outer, self.parameters)]
        delta = torch.cat(deltas)  # one message instead of one for each parameter
        dist.all_reduce(delta, group=self.group)
        delta /= dist.get_world_size(self.group)
        for outer, part in zip(self.outer, delta.split([p.numel() for p in self.outer])):
            outer.grad = part.view_as(outer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for p, outer in zip(self.parameters, self.outer):
            p.copy_(outer)
