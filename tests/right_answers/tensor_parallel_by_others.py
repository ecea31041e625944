"""Lab 08: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from ranklab.ranks import shard_range
from ranklab.tensor_parallel import (
    SPREAD, KeyValueHeads, RegionFunction, all_reduce_sum, enter_before, identity, split_parameter,
)


def _summed(x, group):
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _copy_to_region(x, group=None):
    return _Enter.apply(x, group)


def _reduce_from_region(x, group=None):
    return _Leave.apply(x, group)


def copy_to_region__given(x, group=None):
    """By RegionFunction, as the text suggests."""
    return RegionFunction.apply(x, group, identity, all_reduce_sum)


def copy_to_region__own_function(x, group=None):
    """By an autograd.Function of my own."""
    return _Enter.apply(x, group)


def reduce_from_region__given(x, group=None):
    """By RegionFunction, as the text suggests."""
    return RegionFunction.apply(x, group, all_reduce_sum, identity)


def reduce_from_region__own_function(x, group=None):
    """By an autograd.Function of my own."""
    return _Leave.apply(x, group)


class ColumnParallelLinear__linear(nn.Module):
    """By F.linear."""

    def __init__(self, linear, group=None, enter=_copy_to_region, parts=None):
        super().__init__()
        self.group, self.enter = group, enter
        self.weight = split_parameter(linear.weight, 0, group, parts)
        self.bias = split_parameter(linear.bias, 0, group, parts)

    def forward(self, x):
        return F.linear(self.enter(x, self.group), self.weight, self.bias)


class ColumnParallelLinear__addmm(nn.Module):
    """Flattens x to a matrix, one addmm or mm, and back."""

    def __init__(self, linear, group=None, enter=_copy_to_region, parts=None):
        super().__init__()
        self.group, self.enter = group, enter
        for name in ("weight", "bias"):
            self.register_parameter(name, split_parameter(getattr(linear, name), 0, group, parts))

    def forward(self, x):
        x = self.enter(x, self.group)
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ self.weight.t() if self.bias is None else torch.addmm(
            self.bias, rows, self.weight.t())
        return y.view(*x.shape[:-1], self.weight.shape[0])


class RowParallelLinear__linear(nn.Module):
    """By F.linear without a bias, then leave, then the bias."""

    def __init__(self, linear, group=None, leave=_reduce_from_region, outside=identity):
        super().__init__()
        self.group, self.leave, self.outside = group, leave, outside
        self.weight = split_parameter(linear.weight, 1, group)
        self.bias = linear.bias

    def forward(self, x):
        y = self.leave(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.outside(self.bias, self.group)


class RowParallelLinear__float64(nn.Module):
    """The product in float64, in x's type again before it leaves."""

    def __init__(self, linear, group=None, leave=_reduce_from_region, outside=identity):
        super().__init__()
        self.group, self.leave, self.outside = group, leave, outside
        self.weight = split_parameter(linear.weight, 1, group)
        self.register_parameter("bias", linear.bias)

    def forward(self, x):
        part = torch.einsum("...i,oi->...o", x.double(), self.weight.double()).to(x.dtype)
        y = self.leave(part, self.group)
        if self.bias is not None:
            y = y.add(self.outside(self.bias, self.group))
        return y


class _Column(nn.Module):
    def __init__(self, linear, group, enter=identity):
        super().__init__()
        self.group, self.enter = group, enter
        self.weight = split_parameter(linear.weight, 0, group)
        self.bias = split_parameter(linear.bias, 0, group)

    def forward(self, x):
        return F.linear(self.enter(x, self.group), self.weight, self.bias)


class _Row(nn.Module):
    def __init__(self, linear, group, leave):
        super().__init__()
        self.group, self.leave = group, leave
        self.weight = split_parameter(linear.weight, 1, group)
        self.bias = linear.bias

    def forward(self, x):
        y = self.leave(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def parallel_attention__needed(attention, group=None, enter=_copy_to_region,
                               leave=_reduce_from_region):
    """k and v are always KeyValueHeads."""
    D, rank, R = attention.head_size, dist.get_rank(group), dist.get_world_size(group)
    H, KV = attention.q.out_features // D, attention.k.out_features // D
    if H % R or H % KV:
        raise ValueError(f"tp={R} and n_kv_head={KV} must divide n_head={H}")
    needed = [h * KV // H for h in shard_range(H, rank, R)]
    attention.q = _Column(attention.q, group)
    attention.k = KeyValueHeads(attention.k, needed, D, group)
    attention.v = KeyValueHeads(attention.v, needed, D, group)
    attention.out = _Row(attention.out, group, leave)
    enter_before(attention, enter, group)
    return attention


def parallel_attention__columns(attention, group=None, enter=_copy_to_region,
                                leave=_reduce_from_region):
    """k and v are columns where the ranks divide KV, else KeyValueHeads; x enters by a hook of my
    own.
    """
    D, rank, R = attention.head_size, dist.get_rank(group), dist.get_world_size(group)
    H, KV = attention.q.out_features // D, attention.k.out_features // D
    if H % R or H % KV:
        raise ValueError(f"tp={R} and n_kv_head={KV} must divide n_head={H}")
    for name in "kv":
        whole = getattr(attention, name)
        if KV % R == 0:
            mine = _Column(whole, group)
        else:
            needed = [h // (H // KV) for h in range(rank * H // R, (rank + 1) * H // R)]
            mine = KeyValueHeads(whole, needed,
                                 D, group)
        setattr(attention, name, mine)
    attention.q, attention.out = _Column(attention.q, group), _Row(attention.out, group, leave)

    def hook(module, args, kwargs):
        if args:
            return (enter(args[0], group), *args[1:]), kwargs
        return args, kwargs | {"x": enter(kwargs["x"], group)}

    attention.register_forward_pre_hook(hook, with_kwargs=True)
    return attention


def vocab_parallel_embedding__zero_row(tokens, w_shard, vocab_size, group=None,
                                       leave=_reduce_from_region):
    """The shard gets one more row, of zeros, for the tokens of others."""
    mine = shard_range(vocab_size, dist.get_rank(group), dist.get_world_size(group))
    has = (tokens >= mine.start) & (tokens < mine.stop)
    at = torch.where(has, tokens - mine.start, len(mine))
    rows = torch.cat([w_shard, w_shard.new_zeros(1, w_shard.shape[1])])
    return leave(F.embedding(at, rows), group)


def vocab_parallel_embedding__put(tokens, w_shard, vocab_size, group=None,
                                  leave=_reduce_from_region):
    """Only the rows of one's own tokens are looked up, and put into zeros."""
    mine = shard_range(vocab_size, dist.get_rank(group), dist.get_world_size(group))
    has = (tokens >= mine.start) & (tokens < mine.stop)
    zeros = w_shard.new_zeros(*tokens.shape, w_shard.shape[1])
    return leave(zeros.index_put((has,), w_shard[tokens[has] - mine.start]), group)


def sequence_parallel_norm__copies(norm, x, group=None):
    """functional_call with parameters that went through f."""
    return functional_call(norm, {n: _Enter.apply(p, group) for n, p in norm.named_parameters()}, x)


class _NormAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, norm, names, group, x, *parameters):
        ctx.norm, ctx.names, ctx.group = norm, names, group
        ctx.save_for_backward(x, *parameters)
        return functional_call(norm, dict(zip(names, parameters)), x)

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[3:]
        leaves = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needs)]
        with torch.enable_grad():
            y = functional_call(ctx.norm, dict(zip(ctx.names, leaves[1:])), leaves[0])
        found = iter(torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], grad))
        grads = [next(found) if need else None for need in needs]
        return (None, None, None, grads[0],
                *(None if g is None else _summed(g, ctx.group) for g in grads[1:]))


def sequence_parallel_norm__again(norm, x, group=None):
    """One Function for the whole norm: it computes it again in backward and sums its gradients."""
    names, parameters = zip(*norm.named_parameters())
    return _NormAgain.apply(norm, names, group, x, *parameters)


def dropout_seeds__rows(seed, data_rank, tensor_rank, tensor_ranks):
    """1 + tensor_ranks numbers in a row for each data_rank."""
    shared = seed * SPREAD + data_rank * (tensor_ranks + 1)
    return shared, shared + 1 + tensor_rank


def dropout_seeds__parity(seed, data_rank, tensor_rank, tensor_ranks):
    """From the run's first seed on, even steps are shared and odd ones own."""
    first = seed * SPREAD
    return first + 2 * data_rank, first + 2 * (data_rank * tensor_ranks + tensor_rank) + 1
