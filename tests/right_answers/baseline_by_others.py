"""Lab 01: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import numpy as np
import torch
from ranklab.baseline import ends_bytes, random_replayed, random_state
from ranklab.data import IGNORE


def transformer_flops__list_of_products(config, batch, seq, backward=True):
    """Lists (rows, inner, columns, times) of each product, in a loop."""
    C, H, D = config.n_embd, config.n_head, config.n_embd // config.n_head
    tokens, L = batch * seq, config.n_layer
    products = [(tokens, C, C, 4 * L), (tokens, C, 4 * C, L), (tokens, 4 * C, C, L),
                (seq, D, seq, batch * H * L), (seq, seq, D, batch * H * L),
                (tokens, C, config.vocab_size, 1)]
    total = 0
    for rows, inner, columns, times in products:
        total += 2 * rows * inner * columns * times
    return total * (3 if backward else 1)


def transformer_flops__closed_form(config, batch, seq, backward=True):
    """One formula: 24 C^2 + 4 T C for each layer and token, 2 C V for each token."""
    C = config.n_embd
    per_token = config.n_layer * (24 * C * C + 4 * seq * C) + 2 * C * config.vocab_size
    return (1 + 2 * bool(backward)) * batch * seq * per_token


def model_state_bytes__of_dtypes(n, recipe="mixed"):
    """Takes the bytes from torch's dtypes."""
    single, half = torch.float32, torch.bfloat16
    weight, moment, master = {"fp32": (single, single, None), "mixed": (half, single, single),
                              "bf16": (half, half, None)}[recipe]
    optimizer = 2 * moment.itemsize + (master.itemsize if master else 0)
    return {"parameters": n * weight.itemsize, "gradients": n * weight.itemsize,
            "optimizer": n * optimizer}


def model_state_bytes__numpy_row(n, recipe="mixed"):
    """A table of numpy, and the keys zipped to its row."""
    table = np.array([[4, 4, 8], [2, 2, 12], [2, 2, 4]])
    row = table[("fp32", "mixed", "bf16").index(recipe)]
    return dict(zip(("parameters", "gradients", "optimizer"), (int(each) * n for each in row)))


def accumulate_gradients__split(loss_sum, inputs, targets, micro_batch):
    """torch.split, and each piece's sum divided by the count of the whole batch."""
    count = (targets != IGNORE).sum()
    mean = torch.zeros((), device=targets.device)
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)):
        part = loss_sum(x, y) / count
        part.backward()
        mean += part.detach()
    return mean


def accumulate_gradients__from_the_end(loss_sum, inputs, targets, micro_batch):
    """Slices from the last row back; the division is the gradient that backward begins with."""
    count = int((targets != IGNORE).sum())
    total, end = 0.0, len(inputs)
    while end > 0:
        start = max(0, end - micro_batch)
        loss = loss_sum(inputs[start:end], targets[start:end])
        loss.backward(torch.full_like(loss, 1 / count if count else float("nan")))
        total, end = total + loss.detach(), start
    return total / count if count else total * float("nan")


def checkpointed__detached(function, *inputs):
    """Detached copies, and torch.autograd.backward over the outputs that have a graph."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.random = random_state()
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        def backward(ctx, *gradients):
            copies = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            with torch.enable_grad(), random_replayed(ctx.random):
                outputs = function(*copies)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [(y, g) for y, g in zip(outputs, gradients) if y.requires_grad]
            torch.autograd.backward(*zip(*pairs))
            return tuple(x.grad for x in copies)

    return Recompute.apply(*inputs)


def checkpointed__scalar_product(function, *inputs):
    """Backward from one scalar, the sum of outputs times gradients."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.random = random_state()
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        def backward(ctx, *gradients):
            leaves = []
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad):
                leaves.append(x.detach().clone())
                leaves[-1].requires_grad = needed
            with random_replayed(ctx.random):
                with torch.enable_grad():
                    outputs = function(*leaves)
                    if torch.is_tensor(outputs):
                        outputs = [outputs]
                    scalar = sum((y * g).sum() for y, g in zip(outputs, gradients)
                                 if y.requires_grad)
            scalar.backward()
            return tuple(leaf.grad for leaf in leaves)

    return Recompute.apply(*inputs)


def mfu__own_count(config, tokens_per_second, peak_flops, devices=1):
    """FLOPs of a second, from one sequence of n_ctx tokens."""
    sequence = transformer_flops__closed_form(config, 1, config.n_ctx)
    return sequence * (tokens_per_second / config.n_ctx) / (devices * peak_flops)


def activation_bytes__rows(config, batch, seq, element=4, recompute=False):
    """The table as a list of rows, added up."""
    C, H, tokens = config.n_embd, config.n_head, batch * seq
    rows = [2 * (C + 2), C, 3 * C, C, C, 4 * C, 4 * C]
    block = element * sum(rows) + (4 * H if config.flash else element * H * seq)
    if recompute:
        block = element * C
    return config.n_layer * tokens * block + ends_bytes(config, batch, seq, element)


def activation_bytes__per_layer(config, batch, seq, element=4, recompute=False):
    """Adds layer by layer, beginning with the ends."""
    C, H, T = config.n_embd, config.n_head, seq
    total = ends_bytes(config, batch, seq, element)
    for _ in range(config.n_layer):
        if recompute:
            total += batch * T * C * element
            continue
        total += batch * T * (16 * C + 4) * element
        total += batch * H * T * 4 if config.flash else batch * H * T * T * element
    return total


def scale_loss__isfinite(loss, optimizer, state):
    """isfinite on each gradient, then a division in place."""
    optimizer.zero_grad()
    (loss * state.scale).backward()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in held if p.grad is not None]
    if not all(torch.isfinite(g).all() for g in gradients):
        return state._replace(scale=state.scale / 2, clean_steps=0)
    for g in gradients:
        g /= state.scale
    optimizer.step()
    clean = state.clean_steps + 1
    if clean >= state.interval:
        return state._replace(scale=state.scale * 2, clean_steps=0)
    return state._replace(clean_steps=clean)


def scale_loss__differences(loss, optimizer, state):
    """g - g is 0 only where g is finite; new gradients by a product; one LossScale at the end."""
    optimizer.zero_grad()
    (loss * state.scale).backward()
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    overflowed = any(bool((p.grad - p.grad).ne(0).any()) for p in held)
    factor, clean = 0.5, 0
    if not overflowed:
        for p in held:
            p.grad = p.grad * (1 / state.scale)
        optimizer.step()
        is_last = state.clean_steps + 1 == state.interval
        factor, clean = (2.0, 0) if is_last else (1.0, state.clean_steps + 1)
    return type(state)(state.scale * factor, clean, state.interval)
