"""Lab 01, what runs: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch

from ranklab.baseline.checkpointing import random_replayed, random_state, set_random_state
from ranklab.models.gpt import IGNORE


def _pieces(inputs, targets, micro_batch):
    return list(zip(inputs.split(micro_batch), targets.split(micro_batch)))


def accumulate_gradients__the_sum(loss_sum, inputs, targets, micro_batch):
    """gradients of the sum"""
    mean = 0.0
    for x, y in _pieces(inputs, targets, micro_batch):
        loss = loss_sum(x, y)
        loss.backward()
        mean = mean + loss.detach()
    return mean / (targets != IGNORE).sum()


def accumulate_gradients__sum_of_means(loss_sum, inputs, targets, micro_batch):
    """not of the piece"""
    mean = 0.0
    for x, y in _pieces(inputs, targets, micro_batch):
        loss = loss_sum(x, y) / (y != IGNORE).sum()
        loss.backward()
        mean = mean + loss.detach()
    return mean


def accumulate_gradients__mean_of_means(loss_sum, inputs, targets, micro_batch):
    """short last piece too much weight"""
    pieces, mean = _pieces(inputs, targets, micro_batch), 0.0
    for x, y in pieces:
        loss = loss_sum(x, y) / (y != IGNORE).sum() / len(pieces)
        loss.backward()
        mean = mean + loss.detach()
    return mean


def accumulate_gradients__counts_ignored_targets(loss_sum, inputs, targets, micro_batch):
    """that are not IGNORE"""
    mean = 0.0
    for x, y in _pieces(inputs, targets, micro_batch):
        loss = loss_sum(x, y) / targets.numel()
        loss.backward()
        mean = mean + loss.detach()
    return mean


def accumulate_gradients__drops_the_last_piece(loss_sum, inputs, targets, micro_batch):
    """it was left out"""
    mean = 0.0
    for x, y in _pieces(inputs, targets, micro_batch):
        if len(x) == min(micro_batch, len(inputs)):
            loss = loss_sum(x, y) / (targets != IGNORE).sum()
            loss.backward()
            mean = mean + loss.detach()
    return mean


def accumulate_gradients__one_backward(loss_sum, inputs, targets, micro_batch):
    """before the next forward"""
    losses = [loss_sum(x, y) for x, y in _pieces(inputs, targets, micro_batch)]
    loss = sum(losses) / (targets != IGNORE).sum()
    loss.backward()
    return loss.detach()


def accumulate_gradients__keeps_the_graph(loss_sum, inputs, targets, micro_batch):
    """loss.detach\\(\\)"""
    mean = 0.0
    for x, y in _pieces(inputs, targets, micro_batch):
        loss = loss_sum(x, y) / (targets != IGNORE).sum()
        loss.backward()
        mean = mean + loss
    return mean


def accumulate_gradients__returns_the_sum(loss_sum, inputs, targets, micro_batch):
    """the mean loss is"""
    total = 0.0
    for x, y in _pieces(inputs, targets, micro_batch):
        loss = loss_sum(x, y)
        (loss / (targets != IGNORE).sum()).backward()
        total = total + loss.detach()
    return total


def _checkpointed(forward, backward):
    """checkpointed, put together from a forward(ctx, function, inputs) and a backward."""

    def checkpointed(function, *inputs):
        class Recompute(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                ctx.save_for_backward(*inputs)
                return forward(ctx, function, inputs)

            @staticmethod
            def backward(ctx, *gradients):
                return backward(ctx, function, gradients)

        return Recompute.apply(*inputs)

    return checkpointed


def _remember(ctx, function, inputs):
    ctx.random = random_state()
    return function(*inputs)


def _kept(ctx):
    return [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]


def checkpointed__just_calls(function, *inputs):
    """keep the inputs only"""
    return function(*inputs)


def checkpointed__other_dropout(function, *inputs):
    """drops other numbers"""

    def backward(ctx, function, gradients):
        kept = _kept(ctx)
        with torch.enable_grad():
            outputs = function(*kept)
        torch.autograd.backward(outputs, gradients)
        return tuple(x.grad for x in kept)

    return _checkpointed(_remember, backward)(function, *inputs)


def checkpointed__random_not_put_back(function, *inputs):
    """put the random state back"""

    def backward(ctx, function, gradients):
        kept = _kept(ctx)
        set_random_state(ctx.random)
        with torch.enable_grad():
            outputs = function(*kept)
        torch.autograd.backward(outputs, gradients)
        return tuple(x.grad for x in kept)

    return _checkpointed(_remember, backward)(function, *inputs)


def checkpointed__weights_forgotten(function, *inputs):
    """weights inside function are no inputs"""

    def backward(ctx, function, gradients):
        kept = _kept(ctx)
        with torch.enable_grad(), random_replayed(ctx.random):
            outputs = function(*kept)
        wanted = [x for x in kept if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, gradients))
        return tuple(next(found) if x.requires_grad else None for x in kept)

    return _checkpointed(_remember, backward)(function, *inputs)


def checkpointed__ones_for_gradients(function, *inputs):
    """gradients that backward receives, not ones"""

    def backward(ctx, function, gradients):
        kept = _kept(ctx)
        with torch.enable_grad(), random_replayed(ctx.random):
            function(*kept).sum().backward()
        return tuple(x.grad for x in kept)

    return _checkpointed(_remember, backward)(function, *inputs)


def checkpointed__autograd_off(function, *inputs):
    """inside torch.enable_grad"""

    def backward(ctx, function, gradients):
        kept = _kept(ctx)
        with random_replayed(ctx.random):
            outputs = function(*kept)
        torch.autograd.backward(outputs, gradients)
        return tuple(x.grad for x in kept)

    return _checkpointed(_remember, backward)(function, *inputs)


def checkpointed__runs_three_times(function, *inputs):
    """twice is right"""

    def backward(ctx, function, gradients):
        kept = _kept(ctx)
        with torch.enable_grad(), random_replayed(ctx.random):
            function(*kept)
        with torch.enable_grad(), random_replayed(ctx.random):
            outputs = function(*kept)
        torch.autograd.backward(outputs, gradients)
        return tuple(x.grad for x in kept)

    return _checkpointed(_remember, backward)(function, *inputs)


def _parts(optimizer):
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in held if p.grad is not None]


def _after(state, finite):
    if not finite:
        return state._replace(scale=state.scale / 2, clean_steps=0)
    if state.clean_steps + 1 < state.interval:
        return state._replace(clean_steps=state.clean_steps + 1)
    return state._replace(scale=state.scale * 2, clean_steps=0)


def _scaled(loss, optimizer, state):
    optimizer.zero_grad()
    (loss * state.scale).backward()
    gradients = _parts(optimizer)
    return gradients, all(g.isfinite().all() for g in gradients)


def scale_loss__not_unscaled(loss, optimizer, state):
    """divide the gradients by the scale"""
    _, finite = _scaled(loss, optimizer, state)
    if finite:
        optimizer.step()
    return _after(state, finite)


def scale_loss__steps_anyway(loss, optimizer, state):
    """look before you step"""
    gradients, finite = _scaled(loss, optimizer, state)
    for gradient in gradients:
        gradient.div_(state.scale)
    optimizer.step()
    return _after(state, finite)


def scale_loss__zeroes_what_overflows(loss, optimizer, state):
    """by their momentum"""
    gradients, finite = _scaled(loss, optimizer, state)
    for gradient in gradients:
        gradient.div_(state.scale).nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    return _after(state, finite)


def scale_loss__scales_the_gradients(loss, optimizer, state):
    """scale the loss before backward"""
    optimizer.zero_grad()
    loss.backward()
    gradients = _parts(optimizer)
    finite = all((g * state.scale).isfinite().all() for g in gradients)
    if finite:
        optimizer.step()
    return _after(state, finite)


def scale_loss__never_grows(loss, optimizer, state):
    """the scale doubles"""
    after = _correct_step(loss, optimizer, state)
    return after._replace(scale=min(after.scale, state.scale))


def scale_loss__never_shrinks(loss, optimizer, state):
    """the scale halves"""
    after = _correct_step(loss, optimizer, state)
    return after._replace(scale=max(after.scale, state.scale))


def scale_loss__grows_at_every_clean_step(loss, optimizer, state):
    """doubles too soon"""
    after = _correct_step(loss, optimizer, state)
    return after if after.scale < state.scale else state._replace(scale=state.scale * 2)


def scale_loss__counts_on_after_an_overflow(loss, optimizer, state):
    """an overflow sets clean_steps back"""
    after = _correct_step(loss, optimizer, state)
    return after._replace(clean_steps=state.clean_steps) if after.scale < state.scale else after


def scale_loss__counts_on_after_doubling(loss, optimizer, state):
    """doubling sets clean_steps back"""
    after = _correct_step(loss, optimizer, state)
    doubled = after.scale > state.scale
    return after._replace(clean_steps=state.clean_steps + 1) if doubled else after


def scale_loss__doubles_once(loss, optimizer, state):
    """it doubles again"""
    gradients, finite = _scaled(loss, optimizer, state)
    if not finite:
        return _after(state, finite)
    for gradient in gradients:
        gradient.div_(state.scale)
    optimizer.step()
    clean = state.clean_steps + 1  # never back to 0, and equal to the interval only once
    return state._replace(scale=state.scale * (1 + (clean == state.interval)), clean_steps=clean)


def scale_loss__first_parameter_only(loss, optimizer, state):
    """not at those of one parameter"""
    gradients, _ = _scaled(loss, optimizer, state)
    return _looked_at(gradients[0], gradients, optimizer, state)


def scale_loss__last_parameter_only(loss, optimizer, state):
    """not at those of one parameter"""
    gradients, _ = _scaled(loss, optimizer, state)
    return _looked_at(gradients[-1], gradients, optimizer, state)


def _looked_at(one, gradients, optimizer, state):
    finite = bool(one.isfinite().all())
    if finite:
        for gradient in gradients:
            gradient.div_(state.scale)
        optimizer.step()
    return _after(state, finite)


def _correct_step(loss, optimizer, state):
    gradients, finite = _scaled(loss, optimizer, state)
    if finite:
        for gradient in gradients:
            gradient.div_(state.scale)
        optimizer.step()
    return _after(state, finite)


def accumulate_gradients__divides_by_rows(loss_sum, inputs, targets, micro_batch):
    """divide by the rows of a piece"""
    mean = 0.0
    for x, y in _pieces(inputs, targets, micro_batch):
        loss = loss_sum(x, y) / len(x)
        loss.backward()
        mean = mean + loss.detach()
    return mean


def checkpointed__not_detached(function, *inputs):
    """detach them first"""

    def backward(ctx, function, gradients):
        kept = ctx.saved_tensors
        with torch.enable_grad(), random_replayed(ctx.random):
            outputs = function(*kept)
        torch.autograd.backward(outputs, gradients)
        return tuple(x.grad for x in kept)

    return _checkpointed(_remember, backward)(function, *inputs)


def checkpointed__one_gradient(function, *inputs):
    """one gradient for each input"""

    def backward(ctx, function, gradients):
        kept = _kept(ctx)
        with torch.enable_grad(), random_replayed(ctx.random):
            outputs = function(*kept)
        torch.autograd.backward(outputs, gradients)
        return kept[0].grad

    return _checkpointed(_remember, backward)(function, *inputs)


def checkpointed__backward_left_empty(function, *inputs):
    """one gradient for each input"""
    return _checkpointed(_remember, lambda ctx, function, gradients: None)(function, *inputs)


def checkpointed__asks_for_all_inputs(function, *inputs):
    """can't be asked for it"""

    def backward(ctx, function, gradients):
        kept = _kept(ctx)
        with torch.enable_grad(), random_replayed(ctx.random):
            outputs = function(*kept)
        return torch.autograd.grad(outputs, kept, gradients)

    return _checkpointed(_remember, backward)(function, *inputs)
