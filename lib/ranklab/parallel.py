"""Parallel: the seam between the one training loop (trainer.py) and all kinds of parallelism.

The loop asks it for everything that depends on other processes. Here stands one process; data
parallelism, ZeRO, tensor and pipeline parallelism override what is different with them, and nothing
else. A loss is always a sum over targets, divided by the number of targets of the whole batch: the
mean of the ranks' means is another number as soon as one rank has more targets than another.
"""

import contextlib

import torch

from ranklab.models.gpt import IGNORE


class Parallel:
    """One process: it has the whole model, the whole batch and nobody to talk to."""

    rank, ranks = 0, 1  # rank 0 shows the progress
    gradient_scale = 1  # what backward's averaging divides by: R, where it takes means over ranks

    def apply(self, model):
        """What the loop calls in place of `model`, which may be changed in place."""
        return model

    def batch(self, inputs, targets):
        """This process's part of the batch that all ranks share."""
        return inputs, targets

    def token_count(self, targets):
        """The targets that count in the whole batch, as a tensor; `targets` are this process's."""
        return (targets != IGNORE).sum()

    def forward_backward(self, loss_sum, inputs, targets, micro_batch):
        """Gradients are those of the mean loss over the whole batch; returns this process's share
        of that mean, detached (`total` of it is the mean).
        loss_sum  (inputs, targets) -> the sum of the losses of the targets that count
        """
        count = self.token_count(targets).clamp(min=1)  # a batch without targets teaches nothing
        pieces = list(zip(inputs.split(micro_batch), targets.split(micro_batch)))
        share = 0.0
        for i, (x, y) in enumerate(pieces, 1):
            with self.communication(is_last=i == len(pieces)):
                loss = loss_sum(x, y) / count
                (loss * self.gradient_scale).backward()
            share = share + loss.detach()
        return share

    def communication(self, is_last):
        """Around each piece's forward and backward: ranks talk in the last one alone."""
        return contextlib.nullcontext()

    def grad_norm(self, parameters):
        """The norm of all gradients of the whole model, each parameter once, alike on all ranks:
        where one rank's is not finite, no rank's is, so that all skip the step or none.
        """
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def make_optimizer(self, new_optimizer, groups):
        """new_optimizer(groups), or what steps a part of it on each rank.
        groups  of (name, parameter), with their weight_decay: decided before anything is sharded
        """
        return new_optimizer(groups)

    def total(self, value):
        """The sum over ranks of a tensor that is a share of something."""
        return value

    def gather(self, values):
        """What each rank gives, on every rank: (n,) -> (R, n); for what is printed."""
        return values[None]
