"""Lab 01: right answers that differ from the library's. Each must pass."""

import contextlib
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from ranklab.baseline import accumulate_gradients, checkpointed
from ranklab.baseline.checkpointing import random_state, set_random_state
from ranklab.basics.targets import IGNORE
from ranklab.models.gpt import cross_entropy


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


def frugal_gradients__three_cures_together(model, inputs, targets):
    """Pieces of one row, torch's checkpoint around each block, the model's own chunks of loss."""
    whole = model.loss
    try:
        model.loss = partial(cross_entropy, chunks=4)
        for block in model.blocks.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return accumulate_gradients(lambda x, y: model(x, y, "sum"), inputs, targets, 1)
    finally:
        model.loss = whole
        for block in model.blocks.values():
            del block.forward


def frugal_gradients__the_parts_by_hand(model, inputs, targets):
    """One graph for each row, with checkpointed blocks and checkpointed pieces of the loss."""
    count, total = int((targets != IGNORE).sum()), 0.0

    def piece(h, y):
        return model.loss(model.head, model.norm(h), y, "sum") / count

    for row in range(len(inputs)):
        x = model.token(inputs[row : row + 1]).requires_grad_()  # a frozen one's needs none
        for block in model.blocks.values():
            x = checkpointed(block, x)
        loss = 0.0
        for start in range(0, x.shape[1], 8):
            some = slice(start, start + 8)
            loss = loss + checkpointed(piece, x[:, some], targets[row : row + 1, some])
        loss.backward()
        total += loss.item()
    return total


def frugal_gradients__one_backward_per_row(model, inputs, targets):
    """The model itself; blocks and chunks of its loss are checkpointed by the lab's function."""
    def in_chunks(head, hidden, targets, reduction):
        def of(x, y):
            return whole(head, x, y, "sum")
        pieces = zip(hidden.split(16, 1), targets.split(16, 1))
        return sum(checkpointed(of, x, y) for x, y in pieces)

    def again(forward):
        return lambda x, positions=None: checkpointed(forward, x.requires_grad_())

    whole, model.loss = model.loss, in_chunks
    for block in model.blocks.values():
        block.forward = again(block.forward)
    mean = accumulate_gradients(lambda x, y: model(x, y, "sum"), inputs, targets, 1)
    model.loss = whole
    for block in model.blocks.values():
        del block.forward
    return mean


def frugal_gradients__asks_for_each_gradient(model, inputs, targets):
    """torch.autograd.grad, and .grad is added to by hand."""
    def back(y, x, g, *modules):
        trained = [p for part in modules for p in part.parameters() if p.requires_grad]
        for_x, *grads = torch.autograd.grad(y, [x, *trained], g)
        for p, grad in zip(trained, grads):
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        return for_x

    count, total = (targets != IGNORE).sum(), 0.0
    for x, y in zip(inputs.split(1), targets.split(1)):
        with torch.no_grad():
            kept = [model.token(x)]
            for block in model.blocks.values():
                kept.append(block(kept[-1]))
        gradients = []
        for h, t in zip(kept.pop().split(8, 1), y.split(8, 1)):
            h = h.detach().requires_grad_()
            loss = model.loss(model.head, model.norm(h), t, "sum") / count
            gradients.append(back(loss, h, None, model.norm, model.head))
            total += loss.item()
        del h, loss
        g = torch.cat(gradients, 1)
        for block in reversed(model.blocks.values()):
            h = kept.pop().requires_grad_()
            g = back(block(h), h, g, block)
        first = model.token(x)
        if first.requires_grad:
            first.backward(g)
    return total


def frugal_gradients__softmax_by_hand(model, inputs, targets):
    """The head without autograd: its gradient is written in place."""
    count, mean, W = (targets != IGNORE).sum(), 0.0, model.head.weight
    for x, y in zip(inputs, targets):
        hidden, kept = model.token(x[None]).detach(), []
        for block in model.blocks.values():
            kept.append(hidden)
            with torch.no_grad():
                hidden = block(hidden)
        hidden.requires_grad_()
        for at in range(0, len(x), 10):
            with contextlib.nullcontext():
                normed = model.norm(hidden[0, at : at + 10])
            t = y[at : at + 10]
            with torch.no_grad():
                p = (normed @ W.T).log_softmax(-1)
                here = t != IGNORE
                mean = mean - p[here, t[here]].sum() / count
                p = p.exp_()
                p[here, t[here]] -= 1
                p *= here[:, None] / count
                if W.requires_grad:
                    W.grad = torch.zeros_like(W) if W.grad is None else W.grad
                    W.grad.addmm_(p.T, normed)
                back = p @ W
            normed.backward(back)
        gradient = hidden.grad
        del hidden
        for block in list(model.blocks.values())[::-1]:
            h = kept.pop().requires_grad_()
            torch.autograd.backward(block(h), gradient)
            gradient = h.grad
        if model.token.weight.requires_grad:
            model.token(x[None]).backward(gradient)
    return mean
