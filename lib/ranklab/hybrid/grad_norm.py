"""The norm of gradients that are spread over a mesh."""

import torch
import torch.distributed as dist


def mesh_grad_norm(gradients, copies, group=None):
    """The norm of all gradients of the whole model, alike on all ranks of the group.

    gradients  this rank's
    copies     for each of them: how many ranks of the group hold the same numbers
    cost       one all-reduce of 8 bytes
    lab        12
    """
    squares = [gradient.double().square().sum() / n for gradient, n in zip(gradients, copies)]
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=group)
    return total.sqrt().float()
