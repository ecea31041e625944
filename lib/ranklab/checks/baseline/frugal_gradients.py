"""The check of frugal_gradients: the plain step's gradient, at what peak and for how much work."""

import dataclasses
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from ranklab import baseline
from ranklab.basics.targets import IGNORE
from ranklab.checks.baseline.whole_batch import batch, gradients
from ranklab.checks.beside import expect
from ranklab.checks.trial import explain, is_near
from ranklab.meter.curve import MemoryPeak
from ranklab.meter.watcher import Watcher
from ranklab.models.gpt import GPT, GPTConfig

TINY = GPTConfig(vocab_size=31, n_ctx=40, n_layer=3, n_head=2, n_embd=16)
WIDE = GPTConfig(vocab_size=512, n_ctx=64, n_layer=4, n_head=2, n_embd=32)  # large logits
DEEP = GPTConfig(vocab_size=64, n_ctx=96, n_layer=8, n_head=2, n_embd=32)  # many blocks
SCORED = ("large logits, 3 rows", WIDE, 3, 242_192), ("many blocks, 2 rows", DEEP, 2, 402_704)
MOST, WORK = 2, 1.5  # times the bound, times the FLOPs of the plain step
CASES = (  # rows, tokens, IGNOREd targets of each row, whether the embedding is frozen
    ("1 row", 1, 40, (), False),
    ("5 rows of 27 tokens, fewer than n_ctx", 5, 27, (), False),
    ("3 rows, some targets are IGNORE, all of one row", 3, 40, (2, 40, 4), False),
    ("2 rows, a frozen embedding, a head of its own", 2, 40, (), True),
)
WEIGHTS = ("Divide every piece's sum by the count of the whole batch: the targets that are not "
           "IGNORE. The embedding has two jobs, so it gets two gradients; each block's goes on "
           "into the block before.")
LOST = ("Autograd ends where no input needs a gradient, as behind a frozen embedding. checkpointed "
        "needs an input that needs a gradient: x.requires_grad_().")


def _model(config, is_frozen=False):
    torch.manual_seed(5)
    model = GPT(config)
    if is_frozen:
        model.head.weight = nn.Parameter(torch.randn_like(model.head.weight) / 10)
        model.token.requires_grad_(False)
    for part in (model.norm, model.blocks["1"]):
        part.requires_grad_(False)
    return model


def check_frugal_gradients(frugal_gradients):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices as small as these a second one costs more than it gives
    try:
        for case, rows, tokens, ignored, is_frozen in CASES:
            _compare_step(case, partial(_step, frugal_gradients), partial(_model, TINY, is_frozen),
                         *batch(TINY, rows, tokens, ignored), lambda grad, count: {
                             f"{n} times too large": (n * grad, WEIGHTS) for n in (count, rows)},
                         lambda got: LOST if got is None else WEIGHTS)
        yield "1, 2, 3, 5 rows, IGNORE, a frozen embedding: the gradient of model(x, y).backward()"
        yield "gradients are added to what .grad held; model, inputs and targets are as they were"
        for name, config, rows, library_peak in SCORED:
            yield f"{name}: {_score(frugal_gradients, name, config, rows, library_peak)}"
    finally:
        torch.set_num_threads(threads)


def _compare_step(case, step, make_model, inputs, targets, slips, hint):
    """step(model, inputs, targets), twice, did what one backward does, and changed nothing else.

    slips  gradient, targets that count -> {what a mistake gets: (tensor, hint)}
    hint   the gradient that was found -> the hint for all else
    """
    model, oracle, x, y = make_model(), make_model(), inputs.clone(), targets.clone()
    right, weights = oracle(inputs, targets), [p.detach().clone() for p in model.parameters()]
    right.backward()
    loss = step(model, x, y)
    once = gradients(model)
    for name, grad in gradients(oracle).items():
        if grad is None:
            expect(once[name] is None, f"{case}: {name} is frozen, and yet it has a gradient",
                   "A frozen parameter gets no gradient.")
        else:
            explain(f"{case}: the gradient of {name}", once[name], grad,
                    slips(grad, int((targets != IGNORE).sum())), hint(once[name]))
    expect(loss is not None, f"{case}: it returned None", "Return the mean loss of the batch.")
    expect(not getattr(loss, "requires_grad", False), f"{case}: the loss it returned holds its "
           "graph", "Add up loss.detach(), or the graph of every piece stays in memory.")
    explain(f"{case}: the loss that it returned", float(loss), right.item(), through=torch.float32,
            hint="Return the mean over all targets that count, in the whole batch.")
    expect(torch.equal(x, inputs) and torch.equal(y, targets), "inputs or targets have changed",
           "Split them; do not write into them.")
    step(model, x, y)
    expect(all(grad is None or is_near(grad, 2 * once[name])
               for name, grad in gradients(model).items()),
           f"{case}: a second call did not add the same gradient again", "Leave .grad as you find "
           "it: setting it to zero is the caller's business. And leave the model as it was: put "
           "back what you replaced in it.")
    expect(all(map(torch.equal, model.parameters(), weights)), "the weights have changed",
           "Only .grad may change; the step comes later.")


def _step(frugal_gradients, model, inputs, targets):
    before = _parts(model)
    loss = frugal_gradients(model, inputs, targets)
    expect(before == _parts(model), "the model is not as it was", "If you replace something in it "
           "for the call, such as a block's forward or model.loss, put it back (try, finally). Or "
           "call the parts yourself: model.token, model.blocks, model.norm, model.loss.")
    return loss


def _parts(model):
    """What of a model must be the same afterwards, beside its weights."""
    return [(name, [*value] if isinstance(value, dict) else value) for module in model.modules()
            for name, value in vars(module).items()] + [p.requires_grad for p in model.parameters()]


def _measured(step, config, rows):
    """(FLOPs, the most bytes that live beside what lived before) of step(model, inputs, targets)"""
    model, flops = _model(config), []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    inputs, targets = batch(config, rows, config.n_ctx)

    def add_flops(func, args, kwargs, result):  # FlopCounterMode can't follow each backward
        if formula := flop_registry.get(func.overloadpacket):
            flops.append(formula(*args, **kwargs, out_val=result))

    with Watcher(flops, add_flops), MemoryPeak(model) as memory:
        step(model, inputs, targets)
    return sum(flops), memory.peak_bytes - memory.points[0].total


def _score(frugal_gradients, name, config, rows, library_peak):
    flops, peak = _measured(frugal_gradients, config, rows)
    plain_flops, plain_peak = _measured(lambda model, *data: model(*data).backward(), config, rows)
    work, bound = flops / plain_flops, least_bytes(config)
    expect(work <= WORK, f"{name}: {work:.2f} times the FLOPs of the plain step, more than {WORK}",
           "Each block may run forward twice, not three times, and no row or piece of the loss "
           "more often than that.")
    expect(peak <= MOST * bound, f"{name}: {peak:,} bytes at the peak, more than {MOST} times the "
           f"bound of {bound:,}; the library has {library_peak:,}", _why_large(peak, config))
    return (f"peak {peak:,} bytes, bound {bound:,}, limit {MOST * bound:,} (library "
            f"{library_peak:,}, plain step {plain_peak:,}); {work:.2f} times the plain step's "
            "FLOPs")


def least_bytes(config):
    """What one row keeps when each block keeps its input, and one of them all that it needs."""
    one = dataclasses.replace(config, n_layer=1)
    inputs = baseline.activation_bytes(config, 1, config.n_ctx, recompute=True)
    a_block = baseline.activation_bytes(one, 1, config.n_ctx)
    return inputs + a_block - 2 * baseline.ends_bytes(one, 1, config.n_ctx)


def _why_large(peak, config):
    if peak > 0.9 * config.n_layer * 16 * config.n_ctx * config.n_embd * 4:
        return ("All blocks of a row keep their activations at once, or blocks of many rows do. "
                "Keep the inputs of the blocks alone, and run each block again in backward.")
    if config is WIDE and peak < 3.5 * config.n_ctx * config.vocab_size * 4:
        return ("The logits of a whole row are in memory at once, with their softmax and their "
                "gradient. Take the head and the loss for some tokens at a time.")
    return ("Take one row at a time, and free each piece's tensors before the next. Or the logits "
            "of a whole row are in memory at once: take some tokens at a time.")
