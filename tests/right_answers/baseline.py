"""Lab 01: right answers that differ from the library's. Each must pass."""

import torch

from ranklab.baseline.checkpointing import random_state, set_random_state
from ranklab.models.gpt import IGNORE


def accumulate_gradients__last_piece_first(loss_sum, inputs, targets, micro_batch):
    count, losses = int((targets != IGNORE).sum()), []
    for start in reversed(range(0, len(inputs), micro_batch)):
        rows = slice(start, start + micro_batch)
        losses.append(loss_sum(inputs[rows], targets[rows]) / count)
        losses[-1].backward()
    return sum(loss.item() for loss in losses)


def accumulate_gradients__scaled_backward(loss_sum, inputs, targets, micro_batch):
    weight = 1 / (targets != IGNORE).sum()
    total = torch.zeros(())
    for x, y in zip(torch.split(inputs, micro_batch), torch.split(targets, micro_batch)):
        loss = loss_sum(x, y)
        loss.backward(weight)
        total += loss.detach()
    return total * weight


def checkpointed__grad_of_everything(function, *inputs):
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.state = random_state()
            ctx.save_for_backward(*inputs)
            with torch.no_grad():
                return function(*inputs)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *gradients):
            now, again = random_state(), []
            for x in ctx.saved_tensors:
                again.append(x.clone() if x.requires_grad else x)
                again[-1].requires_grad = x.requires_grad
            set_random_state(ctx.state)
            with torch.enable_grad():
                outputs = function(*again)
            set_random_state(now)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, grad_tensors=gradients)
            return tuple(x.grad if x.requires_grad else None for x in again)

    return Again.apply(*inputs)


def scale_loss__new_gradients(loss, optimizer, state):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
    loss.mul(state.scale).backward()
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    bad = sum(int((~p.grad.isfinite()).sum()) for p in held)
    if bad:
        return type(state)(state.scale * 0.5, 0, state.interval)
    for p in held:
        p.grad = p.grad / state.scale
    optimizer.step()
    clean = state.clean_steps + 1
    full = clean >= state.interval
    return type(state)(state.scale * (2 if full else 1), 0 if full else clean, state.interval)
