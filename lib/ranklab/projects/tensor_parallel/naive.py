"""The naive split: whole layers on rank after rank. One rank works at a time, all others wait."""

import torch
import torch.distributed as dist

from ranklab.parallel import GroupParallel
from ranklab.ranks import shard_range
from ranklab.tensor_parallel.training import TensorParallel


class Naive(TensorParallel):
    """All ranks take the same batch; each has some blocks, and rank 0 what is around the blocks.

    The embedding is the head, too. So hidden states come back to rank 0 for the loss: each
    parameter is on one rank alone, and nobody has to add up gradients of two copies.
    """

    def apply(self, model):
        R, L, C = self.ranks, model.config.n_layer, model.config.n_embd
        if R > L:
            raise ValueError(f"{R} ranks are more than n_layer={L}: each needs a layer")
        mine = shard_range(L, self.rank, R)
        for layer in set(range(L)) - set(mine):
            del model.blocks[str(layer)]
        before, after = (self.rank - 1) % R, (self.rank + 1) % R

        def take(model, args):
            x = torch.empty(*args[0].shape, C, device=args[0].device)
            return Hop.apply(x.requires_grad_(), None, before), *args[1:]

        if self.rank:
            model.token = model.norm = model.head = None
            model.register_forward_pre_hook(take)
            # a loss of 0, whose backward takes the gradient that comes back
            model.register_forward_hook(lambda *seen: 0 * Hop.apply(seen[-1], after, None).sum())
        elif R > 1:
            model.blocks[str(mine[-1])].register_forward_hook(
                lambda *seen: Hop.apply(seen[-1], after, before))
        self.parts = dict(model.named_parameters())
        return model

    def gradients_of(self, parameter):
        return [(parameter.grad, 1)]

    total, total_of = GroupParallel.total, GroupParallel.total_of  # one rank has the loss


class Hop(torch.autograd.Function):
    """x goes to the rank `to`, and what comes from `source` takes its place; gradients go the other
    way. None: nobody.
    """

    @staticmethod
    def forward(ctx, x, to, source):
        ctx.ends = to, source
        if to is not None:
            dist.send(x.contiguous(), to)
        x = torch.zeros_like(x, memory_format=torch.contiguous_format)
        if source is not None:
            dist.recv(x, source)
        return x

    @staticmethod
    def backward(ctx, gradient):
        to, source = ctx.ends
        return Hop.forward(ctx, gradient, source, to), None, None
