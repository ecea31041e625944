"""Lab 01: answers that were right for one output, one state or full pieces, and wrong leads.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch

from ranklab.baseline.checkpointing import random_replayed, random_state
from ranklab.models.gpt import IGNORE


def _accumulate(loss_sum, pieces, count):
    mean = 0.0
    for x, y in pieces:
        loss = loss_sum(x, y) / count
        loss.backward()
        mean = mean + loss.detach()
    return mean


def accumulate_gradients__full_pieces_only(loss_sum, inputs, targets, micro_batch):
    """0 rows of 4 went through loss_sum.*it was left out|8 rows of 9"""
    n = len(inputs) // micro_batch * micro_batch
    pieces = zip(inputs[:n].split(micro_batch), targets[:n].split(micro_batch)) if n else ()
    return _accumulate(loss_sum, pieces, (targets != IGNORE).sum())


def accumulate_gradients__kept_count(loss_sum, inputs, targets, micro_batch, kept=[]):
    """count of the whole batch|targets that count"""
    kept = kept or [(targets != IGNORE).sum()] + kept
    accumulate_gradients__kept_count.__defaults__ = (kept,)
    return _accumulate(loss_sum, zip(inputs.split(micro_batch), targets.split(micro_batch)),
                       kept[0])


def _recompute(function, inputs, backward):
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.random = random_state()
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        def backward(ctx, *gradients):
            kept = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            with torch.enable_grad(), random_replayed(ctx.random):
                outputs = function(*kept)
            backward(outputs, gradients)
            return tuple(x.grad for x in kept)

    return Recompute.apply(*inputs)


def checkpointed__one_output_only(function, *inputs):
    """function may return a tuple"""
    return _recompute(function, inputs, lambda outputs, gradients: outputs.backward(*gradients))


def checkpointed__first_output_only(function, *inputs):
    """function may return a tuple"""

    def backward(outputs, gradients):
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        first.backward(gradients[0])

    return _recompute(function, inputs, backward)


def checkpointed__sums_the_outputs(function, *inputs):
    """function may return a tuple"""

    def backward(outputs, gradients):
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        with torch.enable_grad():
            sum(outputs).backward(gradients[0])

    return _recompute(function, inputs, backward)


def scale_loss__counts_by_itself(loss, optimizer, state, clean=[0]):
    """keep nothing between two calls"""
    optimizer.zero_grad()
    (loss * state.scale).backward()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in held if p.grad is not None]
    if not all(gradient.isfinite().all() for gradient in gradients):
        clean[0] = 0
        return state._replace(scale=state.scale / 2)
    for gradient in gradients:
        gradient.div_(state.scale)
    optimizer.step()
    clean[0] += 1
    if clean[0] < state.interval:
        return state
    clean[0] = 0
    return state._replace(scale=state.scale * 2)


def scale_loss__interval_of_three(loss, optimizer, state):
    """take state.interval"""
    optimizer.zero_grad()
    (loss * state.scale).backward()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in held if p.grad is not None]
    if not all(gradient.isfinite().all() for gradient in gradients):
        return state._replace(scale=state.scale / 2, clean_steps=0)
    for gradient in gradients:
        gradient.div_(state.scale)
    optimizer.step()
    if state.clean_steps < 2:
        return state._replace(clean_steps=state.clean_steps + 1)
    return state._replace(scale=state.scale * 2, clean_steps=0)
