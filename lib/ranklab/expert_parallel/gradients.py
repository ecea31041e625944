"""expert_gradients: sum experts' gradients over the ranks that hold them, others over all ranks."""

import torch
import torch.distributed as dist


def expert_gradients(shared, experts, own, group=None):
    """Give each parameter the gradient of the mean loss over all ranks' tokens.

    Before the call, backward has left the gradients of each rank's mean loss over its own tokens;
    all ranks have the same number of tokens. An expert's gradient already covers all tokens sent to
    this rank. Sum it over the ranks of `own`, and divide the sum by the number of *all* ranks.
    shared, experts: lists of parameters of any dtype; one without a gradient counts as zeros.
    own: the group of the ranks that hold the same experts, perhaps this rank only.
    Cost: at most an all-reduce of each gradient: an expert's over `own`, the others over `group`.
    Lab: 11
    """
    ranks = dist.get_world_size(group)
    for parameters, members in ((shared, group), (experts, own)):
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad /= ranks
            dist.all_reduce(p.grad, group=members)
