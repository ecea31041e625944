"""Ulysses: ranks trade tokens for heads, so that each has all tokens of some heads."""

import torch
import torch.distributed as dist


def ulysses_attention(q, k, v, attend, group=None):
    """Compute attention over the tokens of all ranks, with attend(q, k, v) on this rank's heads.

    attend gets the tokens of rank 0, then those of rank 1, and so on, in the dtype of q, k and v.
    Shape: q (B, H, T/R, D), k and v (B, KV, T/R, D), perhaps transposed views, as in a model;
        attend gets (B, H/R, T, D) and (B, KV/R, T, D).
    Cost: (R-1)/R of the bytes of q, k, v and the result, forward and backward: one all-to-all for
        each, or for several together.
    Raises: ValueError if R does not divide both H and KV.
    Paper: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509)
    Lab: 10
    """
    R = dist.get_world_size(group)
    if q.shape[1] % R or k.shape[1] % R:
        raise ValueError(f"{R} ranks must divide n_head={q.shape[1]} and n_kv_head={k.shape[1]}: "
                         "each has some heads whole")
    heads = [Trade.apply(x, 1, 2, group) for x in (q, k, v)]
    return Trade.apply(attend(*heads), 2, 1, group)


class Trade(torch.autograd.Function):
    """all_to_all: split x along split_dim, and join the ranks' parts along join_dim."""

    @staticmethod
    def forward(ctx, x, split_dim, join_dim, group):
        ctx.split_dim, ctx.join_dim, ctx.group = split_dim, join_dim, group
        return trade(x, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx, gradient):
        return trade(gradient, ctx.join_dim, ctx.split_dim, ctx.group), None, None, None


def trade(x, split_dim, join_dim, group=None):
    """Return this rank's part along split_dim of every rank's x, joined along join_dim.

    It is one all_to_all. It returns no gradient; Trade does.
    """
    R = dist.get_world_size(group)
    parts = torch.stack(x.chunk(R, dim=split_dim))  # (R, ...): part r goes to rank r
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=join_dim)
