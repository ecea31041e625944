"""Lab 01: slips that a check once let through, or took for another mistake.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch

from ranklab.baseline import ends_bytes, transformer_flops
from ranklab.baseline.checkpointing import random_replayed, random_state
from ranklab.models.gpt import IGNORE


def _act(config, batch, seq, element, recompute, attention=None, early=False, kept=None):
    C, H, t = (config.n_embd, config.n_head, batch * seq)
    if attention is None:
        attention = 4 * H if config.flash else H * seq * element
    block = (16 * C + 4) * element + attention
    ends = ends_bytes(config, batch, seq, element)
    if recompute:
        block = C * element if kept is None else kept
        if early:
            ends = 0
    return t * config.n_layer * block + ends


def _acc(loss_sum, pieces, count):
    mean = 0.0
    for x, y in pieces:
        loss = loss_sum(x, y) / count
        loss.backward()
        mean = mean + loss.detach()
    return mean


def _ck(backward):

    def checkpointed(function, *inputs):

        class Recompute(torch.autograd.Function):

            @staticmethod
            def forward(ctx, *inputs):
                ctx.random = random_state()
                ctx.save_for_backward(*inputs)
                return function(*inputs)

            @staticmethod
            def backward(ctx, *gradients):
                return backward(ctx, function, gradients, inputs)
        return Recompute.apply(*inputs)
    return checkpointed


def _p(o):
    return [p.grad for g in o.param_groups for p in g['params'] if p.grad is not None]


def _start(loss, o, s):
    o.zero_grad()
    (loss * s.scale).backward()
    return _p(o)


def _next(s, ok):
    if not ok:
        return s._replace(scale=s.scale / 2, clean_steps=0)
    if s.clean_steps + 1 < s.interval:
        return s._replace(clean_steps=s.clean_steps + 1)
    return s._replace(scale=s.scale * 2, clean_steps=0)


def _run(loss, o, s, finite):
    g = _start(loss, o, s)
    ok = finite(g)
    if ok:
        for x in g:
            x.div_(s.scale)
        o.step()
    return _next(s, ok)


def transformer_flops__three_layers(config, batch, seq, backward=True):
    """torch counts"""
    C, V, t = (config.n_embd, config.vocab_size, batch * seq)
    f = 2 * t * (3 * (12 * C * C + 2 * seq * C) + C * V)
    return 3 * f if backward else f


def mfu__recompute(config, tokens_per_second, peak_flops, devices=1):
    """does not count as work"""
    flops = transformer_flops(config, 1, config.n_ctx) / config.n_ctx
    return flops * tokens_per_second / (peak_flops * devices) * 4 / 3


def model_state_bytes__per_parameter(n, recipe='mixed'):
    """multiply by n"""
    w = 4 if recipe == 'fp32' else 2
    optimizer = {'fp32': 8, 'mixed': 12, 'bf16': 4}[recipe]
    return {'parameters': w, 'gradients': w, 'optimizer': optimizer}


def activation_bytes__recompute_early(config, batch, seq, element=4, recompute=False):
    """are not checkpointed"""
    return _act(config, batch, seq, element, recompute, early=True)


def activation_bytes__recompute_float(config, batch, seq, element=4, recompute=False):
    """`element` bytes each"""
    return _act(config, batch, seq, element, recompute, kept=4 * config.n_embd)


def activation_bytes__two_numbers(config, batch, seq, element=4, recompute=False):
    """a block keeps"""
    attention = 8 if config.flash else config.n_head * seq * element
    return _act(config, batch, seq, element, recompute, attention)


def activation_bytes__scores_and_probabilities(config, batch, seq, element=4, recompute=False):
    """a block keeps"""
    attention = 4 * config.n_head if config.flash else 2 * seq * element
    return _act(config, batch, seq, element, recompute, attention)


def activation_bytes__recompute_one_block_more(config, batch, seq, element=4, recompute=False):
    """and nothing else"""
    got = _act(config, batch, seq, element, recompute)
    blocks = _act(config, batch, seq, element, False) - ends_bytes(config, batch, seq, element)
    return got + blocks // config.n_layer if recompute else got


def accumulate_gradients__chunk(loss_sum, inputs, targets, micro_batch):
    """chunk\\(n\\) makes n"""
    pieces = zip(inputs.chunk(micro_batch), targets.chunk(micro_batch))
    return _acc(loss_sum, pieces, (targets != IGNORE).sum())


def accumulate_gradients__row_by_row(loss_sum, inputs, targets, micro_batch):
    """keep a GPU less busy"""
    return _acc(loss_sum, zip(inputs.split(1), targets.split(1)), (targets != IGNORE).sum())


def accumulate_gradients__twice_forward(loss_sum, inputs, targets, micro_batch):
    """through loss_sum once"""
    count, mean = ((targets != IGNORE).sum(), 0.0)
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)):
        (loss_sum(x, y) / count).backward()
        with torch.no_grad():
            mean += loss_sum(x, y) / count
    return mean


def accumulate_gradients__mean_at_the_end(loss_sum, inputs, targets, micro_batch):
    """through loss_sum once"""
    count = (targets != IGNORE).sum()
    _acc(loss_sum, zip(inputs.split(micro_batch), targets.split(micro_batch)), count)
    with torch.no_grad():
        return loss_sum(inputs, targets) / count


def accumulate_gradients__columns(loss_sum, inputs, targets, micro_batch):
    """Cut between rows"""
    pieces = zip(inputs.split(micro_batch, 1), targets.split(micro_batch, 1))
    return _acc(loss_sum, pieces, (targets != IGNORE).sum())


def accumulate_gradients__marks_ignored(loss_sum, inputs, targets, micro_batch):
    """inputs or targets have changed"""
    count = (targets != IGNORE).sum()
    r = _acc(loss_sum, zip(inputs.split(micro_batch), targets.split(micro_batch)), count)
    targets[targets == IGNORE] = 0
    return r


def checkpointed__all_require(function, *inputs):
    """can't require a gradient"""

    def backward(ctx, function, gradients, _):
        kept = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), random_replayed(ctx.random):
            outputs = function(*kept)
        torch.autograd.backward(outputs, gradients)
        return tuple((x.grad for x in kept))
    return _ck(backward)(function, *inputs)


def checkpointed__first_input_only(function, *inputs):
    """gradients of all inputs"""

    def backward(ctx, function, gradients, _):
        kept = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad(), random_replayed(ctx.random):
            outputs = function(*kept)
        torch.autograd.backward(outputs, gradients)
        return (kept[0].grad, *(None for _ in kept[1:]))
    return _ck(backward)(function, *inputs)


def scale_loss__below_inf(loss, optimizer, state):
    """minus infinity"""
    return _run(loss, optimizer, state, lambda g: all(((x < float('inf')).all() for x in g)))


def scale_loss__max_finite(loss, optimizer, state):
    """minus infinity"""
    return _run(loss, optimizer, state, lambda g: all((x.max().isfinite() for x in g)))


def scale_loss__any(loss, optimizer, state):
    """in one number only"""
    return _run(loss, optimizer, state, lambda g: all((x.isfinite().any() for x in g)))


def scale_loss__first_group(loss, optimizer, state):
    """in all param_groups"""
    optimizer.zero_grad()
    (loss * state.scale).backward()
    g = [p.grad for p in optimizer.param_groups[0]['params'] if p.grad is not None]
    ok = all((x.isfinite().all() for x in g))
    if ok:
        for x in g:
            x.div_(state.scale)
        optimizer.step()
    return _next(state, ok)
