"""Ulysses: tokens are traded for heads, so that each rank has all tokens of some heads."""

import torch
import torch.distributed as dist


def ulysses_attention(q, k, v, attend, group=None):
    """Return attention over the tokens of all ranks, by attend(q, k, v) on this rank's heads.

    attend gets the tokens of rank 0, then the tokens of rank 1, and so on, in the type of q, k, v.
    shape  q (B, H, T/R, D), k and v (B, KV, T/R, D), perhaps transposed views, as in a model;
           attend's (B, H/R, T, D), (B, KV/R, T, D)
    cost   (R-1)/R of the bytes of q, k, v and the result, forward and backward: an all-to-all of
           each, or of several together
    error  ValueError if R does not divide H and KV
    paper  Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509)
    lab    10
    """
    R = dist.get_world_size(group)
    if q.shape[1] % R or k.shape[1] % R:
        raise ValueError(f"{R} ranks must divide n_head={q.shape[1]} and n_kv_head={k.shape[1]}: "
                         "each has some heads whole")
    heads = [Trade.apply(x, 1, 2, group) for x in (q, k, v)]
    return Trade.apply(attend(*heads), 2, 1, group)


class Trade(torch.autograd.Function):
    """all_to_all: x is cut along dim `cut`, and the ranks' parts are joined along dim `join`."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.cut, ctx.join, ctx.group = cut, join, group
        return trade(x, cut, join, group)

    @staticmethod
    def backward(ctx, gradient):
        return trade(gradient, ctx.join, ctx.cut, ctx.group), None, None, None


def trade(x, cut, join, group=None):
    """all_to_all of x: the rank-th part along `cut` of all ranks' x, joined along `join`.

    It brings no gradient back: Trade does.
    """
    R = dist.get_world_size(group)
    parts = torch.stack(x.chunk(R, dim=cut))  # (R, ...): part r goes to rank r
    came = torch.empty_like(parts)
    dist.all_to_all_single(came, parts, group=group)
    return torch.cat(came.unbind(), dim=join)
