"""Lab 01: right answers that differ from the library's. Each must pass."""

import contextlib
import math
from functools import partial

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from ranklab.baseline import (
    LossScale, accumulate_gradients, checkpointed, ends_bytes, random_replayed, random_state,
    set_random_state, transformer_flops,
)
from ranklab.basics.targets import IGNORE
from ranklab.models.gpt import count_parameters, cross_entropy


def transformer_flops__product_by_product(config, batch, seq, backward=True):
    C, H, D, T = config.n_embd, config.n_head, config.head_size, seq

    def product(m, k, n):
        return 2 * m * k * n

    block = sum(product(batch * T, *shape) for shape in [(C, C)] * 4 + [(C, 4 * C), (4 * C, C)])
    block += batch * H * (product(T, D, T) + product(T, T, D))
    total = sum([block] * config.n_layer, product(batch * T, C, config.vocab_size))
    return total + 2 * total * bool(backward)


def transformer_flops__from_the_parameters(config, batch, seq, backward=True):
    """2 N and 4 N a token, without the norms' weights; and attention."""
    norms = (2 * config.n_layer + 1) * config.n_embd
    matrices = count_parameters(config) - norms  # the tied head is there once
    forward = 2.0 * matrices + 4.0 * config.n_layer * seq * config.n_embd
    return batch * seq * forward * (3 if backward else 1)


def transformer_flops__of_one_sequence(config, batch, seq, backward=True):
    C, total = config.n_embd, np.int64(2 * seq * config.n_embd * config.vocab_size)
    for _ in range(config.n_layer):
        total += 24 * seq * C**2 + 4 * seq**2 * C
    passes = ("forward", "for inputs", "for weights") if backward else ("forward",)
    return batch * total * len(passes)


def mfu__seconds_of_a_sequence(config, tokens_per_second, peak_flops, devices=1):
    sequences = tokens_per_second / config.n_ctx
    at_best = devices * peak_flops / transformer_flops(config, 1, config.n_ctx)
    return sequences / at_best


def mfu__by_its_own_formula(config, tokens_per_second, peak_flops, devices=1):
    C, L = config.n_embd, config.n_layer
    each = 6 * (12 * L * C**2 + C * config.vocab_size) + 12 * L * C * config.n_ctx
    return np.float64(tokens_per_second) / devices * each / peak_flops


def model_state_bytes__a_table(n, recipe="mixed"):
    rows = {"fp32": (4, 4, 8), "mixed": (2, 2, 12), "bf16": (2, 2, 4)}
    return {key: n * each
            for key, each in zip(("parameters", "gradients", "optimizer"), rows[recipe])}


def model_state_bytes__by_types(n, recipe="mixed"):
    of_weights = torch.float32 if recipe == "fp32" else torch.bfloat16
    of_moments = torch.bfloat16 if recipe == "bf16" else torch.float32
    tensors = [of_moments, of_moments] + [torch.float32] * (recipe == "mixed")
    size = of_weights.itemsize * n
    return dict(optimizer=sum(each.itemsize for each in tensors) * n, gradients=size,
                parameters=size)


def model_state_bytes__from_the_total(n, recipe="mixed"):
    total = 8 * n if recipe == "bf16" else 16 * n
    weights = 4 * n if recipe == "fp32" else 2 * n
    return {"parameters": weights, "gradients": weights, "optimizer": float(total - 2 * weights)}


def activation_bytes__a_list_of_tensors(config, batch, seq, element=4, recompute=False):
    C, H, F = config.n_embd, config.n_head, 4 * config.n_embd
    tensors = [C, 1, 1, C, C, C, C, C, C, 1, 1, C, F, F]  # of a token
    if not config.flash:
        tensors.append(H * seq)
    of_block = sum(n * element for n in tensors) + config.flash * H * 4
    if recompute:
        of_block = element * C
    total = ends_bytes(config, batch, seq, element)
    for _ in range(config.n_layer):
        total += of_block * batch * seq
    return total


def activation_bytes__one_polynomial(config, batch, seq, element=4, recompute=False):
    C, H, L = config.n_embd, config.n_head, config.n_layer
    each = C if recompute else 16 * C + 4 + H * (4 / element if config.flash else seq)
    return np.float64(batch * seq * L * element * each) + ends_bytes(config, batch, seq, element)


def activation_bytes__early_return(config, batch, seq, element=4, recompute=False):
    numbers = batch * seq * config.n_embd
    if recompute:
        blocks = numbers * config.n_layer
        return blocks * element + ends_bytes(config, batch, seq, element)
    rows = 2 * batch * seq  # of the two norms
    core = batch * config.n_head * seq * (4 if config.flash else seq * element)
    return (config.n_layer * (element * (16 * numbers + 2 * rows) + core)
            + ends_bytes(config, batch, seq, element))


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


def accumulate_gradients__counts_first(loss_sum, inputs, targets, micro_batch):
    """Cut where pieces end, with tensor_split; the mean is a number of numpy."""
    weight = float(sum(int((row != IGNORE).sum()) for row in targets)) ** -1
    ends = [*range(micro_batch, len(inputs), micro_batch), len(inputs)]
    mean = 0.0
    for x, y in zip(torch.tensor_split(inputs, ends[:-1]), torch.tensor_split(targets, ends[:-1])):
        part = loss_sum(x, y).mul(weight)
        part.backward()
        mean += float(part.detach())
        del part
    return np.float64(mean)


def checkpointed__with_torchs_own(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False, early_stop=False)


def checkpointed__two_kinds_of_gradients(function, *inputs):
    """torch.autograd.grad for the inputs that need one, and .backward's sum for the weights."""
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.state, ctx.needs = random_state(), [x.requires_grad for x in inputs]
            ctx.save_for_backward(*[x.detach() for x in inputs])
            return function(*inputs)

        @staticmethod
        def backward(ctx, *gradients):
            kept = [x.clone().requires_grad_(True) if needs else x
                    for x, needs in zip(ctx.saved_tensors, ctx.needs)]
            with random_replayed(ctx.state):
                with torch.enable_grad():
                    outputs = function(*kept)
            outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            with torch.enable_grad():
                total = sum((y * g).sum() for y, g in zip(outputs, gradients))
            total.backward()
            return (*[x.grad for x in kept],)

    return Twice.apply(*inputs)


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


def scale_loss__the_rest_of_the_interval(loss, optimizer, state):
    """The scale goes with the gradient of the loss, and set_to_none is not used."""
    optimizer.zero_grad(set_to_none=False)
    loss.backward(torch.full_like(loss, state.scale))
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]
             if p.grad is not None]
    norm = torch.stack([g.double().norm() for g in grads]).sum()
    if not math.isfinite(norm):
        return state._replace(clean_steps=0, scale=state.scale / 2)
    torch._foreach_mul_(grads, 1 / state.scale)
    optimizer.step()
    whole, rest = divmod(state.clean_steps + 1, state.interval)
    return LossScale(state.scale * 2**whole, rest, state.interval)


def scale_loss__by_grad_scaler(loss, optimizer, state):
    scaler = torch.amp.GradScaler(loss.device.type, init_scale=state.scale,
                                  growth_interval=state.interval)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": state.clean_steps})
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    tracker = scaler.state_dict()["_growth_tracker"]
    return LossScale(scale=scaler.get_scale(), clean_steps=tracker, interval=state.interval)


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
