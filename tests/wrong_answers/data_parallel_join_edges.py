"""Lab 03, join_uneven and sync_batch_norm once more: right in the plain case, wrong at an edge.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch
import torch.distributed as dist

from ranklab.data_parallel import broadcast_parameters

# --- join_uneven --------------------------------------------------------------------------------


def _hand_over(model, src):
    broadcast_parameters(model.module, src, model.group)


def _join(batches, model, joining=True, each_step=None, at_the_end=_hand_over):
    """Right but for what comes in the `finally`; a mistake brings what it does when."""
    batches, rank, last = iter(batches), dist.get_rank(model.group), 0
    model.joining = joining
    while True:
        batch = next(batches, None)
        going_on = torch.tensor(-1 if batch is None else rank)
        dist.all_reduce(going_on, dist.ReduceOp.MAX, group=model.group)
        if going_on < 0:
            break
        model.buffers_from = last = going_on.item()
        if each_step:
            each_step(model, last)
        if batch is None:
            model.shadow()
        else:
            yield batch
    at_the_end(model, last)


def _put_back(batches, model, **mistake):
    try:
        yield from _join(batches, model, **mistake)
    finally:
        model.joining, model.buffers_from = False, 0


def join_uneven__no_finally(batches, model):
    """left by a break model.joining is still True Set it back in a `finally`"""
    yield from _join(batches, model)
    model.joining, model.buffers_from = False, 0


def join_uneven__joining_forgotten(batches, model):
    """inside the loop model.joining is not True"""
    yield from _put_back(batches, model, joining=False)


def join_uneven__buffers_from_forgotten(batches, model):
    """model.buffers_from is still 3"""
    try:
        yield from _join(batches, model)
    finally:
        model.joining = False


def join_uneven__broadcast_in_the_finally(batches, model):
    """before the `finally`"""
    seen = [0]
    try:
        yield from _put_back(batches, model, each_step=lambda _, last: seen.append(last),
                             at_the_end=lambda *_: None)
    finally:
        _hand_over(model, seen[-1])


def join_uneven__the_model_in_each_step(batches, model):
    """the model's weights once, at the end"""
    yield from _put_back(batches, model, each_step=_hand_over)


def join_uneven__asks_twice(batches, model):
    """one number that says who goes on"""
    yield from _put_back(batches, model, each_step=lambda model, last: dist.all_reduce(
        torch.tensor(last), group=model.group))


def join_uneven__one_shadow_more(batches, model):
    """892 bytes into collectives in 3 steps; 720 are enough"""
    yield from _put_back(batches, model, at_the_end=lambda model, last: (
        model.shadow(), _hand_over(model, last)))


def join_uneven__takes_all_at_once(batches, model):
    """An epoch need not fit into memory"""
    yield from _put_back(list(batches), model)


def join_uneven__weights_of_the_last_rank(batches, model):
    """They are those of rank 2, when its own batches were over"""
    yield from _put_back(batches, model, at_the_end=lambda model, _: _hand_over(
        model, dist.get_world_size(model.group) - 1))


def join_uneven__broadcast_from_nobody(batches, model):
    """Keep the last result before it"""
    yield from _put_back(batches, model, at_the_end=lambda model, _: _hand_over(model, -1))


def join_uneven__next_without_a_default(batches, model):
    """next\\(batches, None\\) gives None"""
    batches = iter(batches)
    yield from _put_back((next(batches) for _ in iter(int, 1)), model)


def join_uneven__nobody_is_0(batches, model):
    """nobody is -1"""
    batches, rank = iter(batches), dist.get_rank(model.group)
    while True:
        batch = next(batches, None)
        going_on = torch.tensor(0 if batch is None else rank)
        dist.all_reduce(going_on, dist.ReduceOp.MAX, group=model.group)
        if going_on == 0 and batch is None:
            break
        model.buffers_from = going_on.item()
        if batch is None:
            model.shadow()
        else:
            yield batch


# --- sync_batch_norm ----------------------------------------------------------------------------


def _norm(x, weight, bias, eps, group, running, square=lambda x: x.double().square(),
          of_x=lambda grad, by_mean, by_variance: grad - by_mean - by_variance):
    """Right but for the shapes, which are not looked at."""
    over = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]

    class Normalise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            C, wide = x.shape[1], x.double()
            sums = torch.cat([wide.sum(over), square(x).double().sum(over),
                              wide.new_tensor([x.numel() // C])])
            dist.all_reduce(sums, group=group)
            n = sums[-1]
            mean, squares = (sums[:-1] / n).split(C)
            variance = (squares - mean.square()).clamp(min=0)
            scale = (variance + eps).rsqrt()
            if running:
                running[0].add_(running[2] * (mean - running[0]))
                running[1].add_(running[2] * (variance * n / (n - 1) - running[1]))
            ctx.save_for_backward(x, weight, mean, scale, n)
            normal = (wide - mean.view(shape)) * scale.view(shape)
            return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, scale, n = ctx.saved_tensors
            normal = (x.double() - mean.view(shape)) * scale.view(shape)
            mine = torch.cat([grad.double().sum(over), (grad * normal).sum(over)])
            sums = mine.clone()
            dist.all_reduce(sums, group=group)
            by_mean, by_variance = (part.view(shape) for part in (sums / n).chunk(2))
            gradient = of_x(grad, by_mean, normal * by_variance) * (scale * weight).view(shape)
            of_bias, of_weight = mine.to(weight.dtype).chunk(2)
            return gradient.to(x.dtype), of_weight, of_bias

    return Normalise.apply(x, weight, bias)


def _checked(x, weight, bias):
    if x.dim() < 2 or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        raise ValueError(f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(bias.shape)}")


def sync_batch_norm__eps_ignored(x, weight, bias, eps=1e-5, group=None, running=None):
    """eps is an argument"""
    _checked(x, weight, bias)
    return _norm(x, weight, bias, 1e-5, group, running)


def sync_batch_norm__grad_changed(x, weight, bias, eps=1e-5, group=None, running=None):
    """backward has changed the gradient that it was given"""
    _checked(x, weight, bias)
    return _norm(x, weight, bias, eps, group, running,
                 of_x=lambda grad, by_mean, by_variance: grad.sub_(by_mean + by_variance))


def sync_batch_norm__squares_in_float32(x, weight, bias, eps=1e-5, group=None, running=None):
    """Square and sum in float64"""
    _checked(x, weight, bias)
    return _norm(x, weight, bias, eps, group, running, square=torch.Tensor.square)


def sync_batch_norm__any_shape(x, weight, bias, eps=1e-5, group=None, running=None):
    """weight \\(1,\\) and bias \\(1,\\) give"""
    C = x.shape[1]
    return _norm(x, weight.expand(C), bias.expand(C), eps, group, running)
