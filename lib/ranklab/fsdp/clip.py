"""Gradient clipping when no rank has all gradients."""

import torch
import torch.distributed as dist

from ranklab.engine import device


def clip_grad_norm_sharded(parameters, max_norm, group=None):
    """Scale the gradients, as one vector over all ranks, to a norm of at most max_norm.

    A parameter without a gradient does not count. With offload, gradients are on the CPU.
    group: the ranks that share the rows; in hybrid sharding without the replicas, which hold the
        same numbers again.
    Returns: the norm before clipping, a tensor of shape (), the same on all ranks: NaN or infinite
        on all if any gradient on any rank is.
    Cost: one all-reduce of 8 bytes.
    Lab: 07
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = torch.zeros((), dtype=torch.float64, device=device())
    for norm in torch._foreach_norm(gradients, 2, torch.float64) if gradients else ():
        square += norm.to(square).square()
    dist.all_reduce(square, group=group)
    norm = square.sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient *= factor.to(gradient.device)
    return norm
