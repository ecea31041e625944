"""f and g: how a tensor enters and leaves the region where each rank computes a part of a layer.

Outside the region all ranks hold the whole x, or (sequence parallel) each holds its own tokens.
Each function communicates differently in forward and backward, and g is f with the two swapped:

                     forward            backward
    copy_to_region      nothing            all-reduce       f
    reduce_from_region  all-reduce         nothing          g
    gather_tokens       all-gather         reduce-scatter   f, if each rank has its own tokens
    scatter_tokens      reduce-scatter     all-gather       g, if each rank has its own tokens

RegionFunction calls all_reduce_sum, all_gather_tokens and reduce_scatter_tokens. Called directly,
these return no gradient from other ranks.
"""

import torch
import torch.distributed as dist


def copy_to_region(x, group=None):
    """Return x unchanged; in backward, sum its gradient over ranks (f).

    Each rank uses x for its part of the layer, so each knows only a part of x's gradient. Neither x
    nor a rank's gradient is modified in place.
    Cost: nothing in forward; one all-reduce of x's bytes in backward.
    Paper: Shoeybi et al. 2019, Megatron-LM, section 3
    Lab: 08
    """
    return RegionFunction.apply(x, group, identity, all_reduce_sum)


def reduce_from_region(x, group=None):
    """Return the sum of x over ranks; in backward, pass its gradient on unchanged (g).

    x itself is not modified.
    Cost: one all-reduce of x's bytes in forward; nothing in backward.
    Paper: Shoeybi et al. 2019, Megatron-LM, section 3
    Lab: 08
    """
    return RegionFunction.apply(x, group, all_reduce_sum, identity)


def gather_tokens(x, group=None):
    """Gather the tokens of all ranks; in backward, sum their gradients over ranks.

    Shape: (B, T/tp, C) -> (B, T, C).
    Cost: forward one all-gather, backward one reduce-scatter: together the bytes of an all-reduce.
    Paper: Korthikanti et al. 2022, section 4.2.2
    Lab: 08
    """
    return RegionFunction.apply(x, group, all_gather_tokens, reduce_scatter_tokens)


def scatter_tokens(x, group=None):
    """Sum x over ranks, and return this rank's tokens; in backward, gather all tokens' gradients.

    Shape: (B, T, C) -> (B, T/tp, C).
    Cost: forward one reduce-scatter, backward one all-gather.
    Raises: ValueError if the number of ranks does not divide T.
    Lab: 08
    """
    return RegionFunction.apply(x, group, reduce_scatter_tokens, all_gather_tokens)


class RegionFunction(torch.autograd.Function):
    """Apply one function to x in forward, and another one to the gradient in backward.

    RegionFunction.apply(x, group, forward, backward); both functions are (tensor, group) -> tensor.
    """

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.backward_function = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.backward_function(gradient, ctx.group), None, None, None


def identity(x, group=None):
    """Return x; send nothing."""
    return x.view_as(x)


def all_reduce_sum(x, group=None):
    """All-reduce x into a new tensor, because x may still be read elsewhere."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def all_gather_tokens(x, group=None):
    """All-gather the tokens of all ranks: (B, T/tp, C) -> (B, T, C)."""
    x = x.transpose(0, 1).contiguous()  # (T/tp, B, C): messages are joined along their first dim
    gathered = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    dist.all_gather_single(gathered, x, group=group)
    return gathered.transpose(0, 1).contiguous()


def reduce_scatter_tokens(x, group=None):
    """Reduce-scatter x, and return this rank's tokens of the sum: (B, T, C) -> (B, T/tp, C)."""
    R = dist.get_world_size(group)
    if x.shape[1] % R:
        raise ValueError(f"tp={R} must divide the T={x.shape[1]} tokens of a sequence")
    x = x.transpose(0, 1).contiguous()  # (T, B, C)
    shard = x.new_empty(len(x) // R, *x.shape[1:])
    dist.reduce_scatter_single(shard, x, group=group)
    return shard.transpose(0, 1).contiguous()
