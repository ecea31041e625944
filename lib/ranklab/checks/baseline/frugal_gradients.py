"""The check of frugal_gradients: the plain step's gradient, at what peak and for how much work."""

import dataclasses
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from ranklab import baseline
from ranklab.checks.baseline.whole_batch import batch, compare_step
from ranklab.checks.beside import expect
from ranklab.meter.curve import MemoryPeak
from ranklab.meter.watcher import Watcher
from ranklab.models.gpt import GPT, GPTConfig

TINY = GPTConfig(vocab_size=31, n_ctx=40, n_layer=3, n_head=2, n_embd=16)
WIDE = GPTConfig(vocab_size=512, n_ctx=64, n_layer=4, n_head=2, n_embd=32)  # large logits
DEEP = GPTConfig(vocab_size=64, n_ctx=96, n_layer=8, n_head=2, n_embd=32)  # many blocks
SCORED = ("large logits, 3 rows", WIDE, 3, 242_192), ("many blocks, 2 rows", DEEP, 2, 402_704)
MOST, WORK = 2, 1.5  # times the bound, times the FLOPs of the plain step
CASES = (  # rows, tokens, IGNOREd targets of each row, the head where the embedding is frozen
    ("1 row", 1, 40, (0,), None),
    ("3 rows", 3, 40, (0, 0, 0), None),
    ("5 rows of 27 tokens, fewer than n_ctx", 5, 27, (0,) * 5, None),
    ("3 rows, some targets are IGNORE", 3, 40, (0, 31, 4), None),
    ("3 rows, one has nothing but IGNORE", 3, 40, (2, 40, 0), None),
    ("3 rows, a frozen embedding, a head of its own", 3, 40, (0, 5, 0), "its own"),
    ("1 row, a frozen embedding that is the head, too", 1, 40, (0,), "tied"),
)

WEIGHTS = ("Divide every piece's sum by the same number: the targets of the whole batch that are "
           "not IGNORE. The embedding has two jobs, so it gets two gradients; each block's goes "
           "on into the block before.")
LOST = ("Autograd ends where no input needs a gradient, as behind a frozen embedding. checkpointed "
        "needs one that does: x.requires_grad_().")


def _model(config, frozen=None):
    torch.manual_seed(5)
    model = GPT(config)
    if frozen == "its own":
        model.head.weight = nn.Parameter(torch.randn_like(model.head.weight) / 10)
    if frozen:
        model.token.requires_grad_(False)
    for part in (model.norm, model.blocks["1"]):
        part.requires_grad_(False)
    return model


def check_frugal_gradients(frugal_gradients):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices as small as these a second one costs more than it gives
    try:
        for case, rows, tokens, ignored, frozen in CASES:
            compare_step(case, partial(_step, frugal_gradients), partial(_model, TINY, frozen),
                         *batch(TINY, rows, tokens, ignored), partial(_slips, rows),
                         lambda got: LOST if got is None else WEIGHTS)
        yield "1, 3, 5 rows, IGNORE, a frozen embedding: the gradient of model(x, y).backward()"
        yield "gradients are added to what .grad held; model, inputs and targets are as they were"
        for name, config, rows, library_peak in SCORED:
            yield f"{name}: {_score(frugal_gradients, name, config, rows, library_peak)}"
    finally:
        torch.set_num_threads(threads)


def _step(frugal_gradients, model, inputs, targets):
    before = [*_parts(model)]
    loss = frugal_gradients(model, inputs, targets)
    expect(before == [*_parts(model)], "the model is not as it was", "What you replace in it for "
           "the call, such as a block's forward or model.loss, put back (try, finally). Or call "
           "the parts yourself: model.token, model.blocks, model.norm, model.loss.")
    return loss


def _parts(model):
    """What of a model must be the same afterwards, beside its weights."""
    yield model.loss
    for module in model.modules():
        yield (module.__dict__.get("forward"), module.training, tuple(module._forward_hooks),
               tuple(module._forward_pre_hooks), tuple(module._modules), tuple(module._buffers))
    yield from (p.requires_grad for p in model.parameters())


def _slips(rows, grad, count):
    return {"that of the sum": (count * grad, "Divide by the number of targets that count."),
            f"{rows} times too large": (rows * grad, "Each row's mean is added up whole; divide "
                                        "by the count of the whole batch.")}


def _peak(step, config, rows):
    """The most bytes that live in step(model, inputs, targets) beside what lived before."""
    model = _model(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    inputs, targets = batch(config, rows, config.n_ctx)
    with MemoryPeak(model) as memory:
        step(model, inputs, targets)
    return memory.peak_bytes - memory.points[0].total


def _flops(step, config, rows):
    """As torch's FlopCounterMode, whose hooks on modules can't follow each backward."""
    counts = []

    def told(func, args, kwargs, result):
        if formula := flop_registry.get(func.overloadpacket):
            counts.append(formula(*args, **kwargs, out_val=result))

    with Watcher(counts, told):
        step(_model(config), *batch(config, rows, config.n_ctx))
    return sum(counts)


def _plain(model, inputs, targets):
    model(inputs, targets).backward()


def _score(frugal_gradients, name, config, rows, library_peak):
    work = _flops(frugal_gradients, config, rows) / _flops(_plain, config, rows)
    expect(work <= WORK, f"{name}: {work:.2f} times the FLOPs of the plain step, more than {WORK}",
           "Each block may run forward twice, not three times, and no row or piece of the loss "
           "more often than that.")
    peak, bound = _peak(frugal_gradients, config, rows), least_bytes(config)
    expect(peak <= MOST * bound, f"{name}: {peak:,} bytes at the peak, more than {MOST} times the "
           f"bound of {bound:,}; the library has {library_peak:,}", _why_large(peak, config))
    return (f"peak {peak:,} bytes, bound {bound:,}, limit {MOST * bound:,} "
            f"(library {library_peak:,}, plain step {_peak(_plain, config, rows):,}); "
            f"{work:.2f} times its FLOPs")


def least_bytes(config):
    """What one row keeps when each block keeps its input, and one of them all that it needs."""
    one = dataclasses.replace(config, n_layer=1)
    inputs = baseline.activation_bytes(config, 1, config.n_ctx, recompute=True)
    a_block = baseline.activation_bytes(one, 1, config.n_ctx)
    return inputs + a_block - 2 * baseline.ends_bytes(one, 1, config.n_ctx)


def _why_large(peak, config):
    logits = config.n_ctx * config.vocab_size * 4
    blocks = config.n_layer * 16 * config.n_ctx * config.n_embd * 4
    if peak > 0.9 * blocks:
        return ("All blocks of a row keep their activations at once, or blocks of many rows do. "
                "Keep the inputs of the blocks alone, and run each block again in backward.")
    if config is WIDE and peak < 3.5 * logits:
        return ("The logits of a whole row stand at once, with their softmax and their gradient. "
                "Take the head and the loss for some tokens at a time.")
    return ("Take one row at a time, and free each piece's tensors before the next. Or the logits "
            "of a row stand at once: take some tokens at a time.")
