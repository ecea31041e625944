"""The check of frugal_gradients: the plain step's gradient, the peak memory, and the work."""

import dataclasses
from functools import partial

import torch
from torch import nn

from ranklab import baseline
from ranklab.checks.baseline.whole_batch import batch, gradients, one_thread, times_right
from ranklab.checks.exercise import Exercise
from ranklab.checks.flops import add_flops
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.checks.trial import instead, is_near
from ranklab.meter.curve import MemoryPeak
from ranklab.meter.watcher import Watcher
from ranklab.models.gpt import GPT, GPTConfig, cross_entropy

TINY = GPTConfig(vocab_size=31, n_ctx=40, n_layer=3, n_head=2, n_embd=16)
WIDE = GPTConfig(vocab_size=512, n_ctx=64, n_layer=4, n_head=2, n_embd=32)  # large logits
DEEP = GPTConfig(vocab_size=64, n_ctx=96, n_layer=8, n_head=2, n_embd=32)  # many blocks
SCORED = ("large logits, 3 rows", WIDE, 3, 242_192), ("many blocks, 2 rows", DEEP, 2, 402_704)
MOST, WORK = 2, 1.5  # times the bound, times the FLOPs of the plain step
CASES = (  # rows, tokens, IGNOREd targets of each row, whether the embedding is frozen
    ("1 row", 1, 40, (), False),
    ("5 rows of 27 tokens, fewer than n_ctx", 5, 27, (), False),
    ("3 rows, some targets are IGNORE, including one whole row", 3, 40, (2, 40, 4), False),
    ("2 rows, a frozen embedding, a head of its own", 2, 40, (), True),
)
# What is said.
COUNT = ("Divide every piece's sum by the number of targets in the whole batch that are not "
         "IGNORE. Pass each block's gradient on to the block before it.")
TWO_JOBS = "All other gradients are right. The embedding has two jobs, so it gets two gradients."
LOST = ("Autograd stops where no input requires a gradient, as after a frozen embedding. "
        "checkpointed needs an input that requires one: x.requires_grad_().")
NONE = ("No gradient arrives here. Call backward() on each piece's loss, then run each block again "
        "and pass the gradient on.")
DETACH = "Add up loss.detach(), or the graph of every piece stays in memory."
MEAN = "Return the mean over all targets in the whole batch that are not IGNORE."
ADDS = ("Add to .grad, and never zero it: that is the caller's job. And leave the model as it was: "
        "restore whatever you replaced in it.")
PUT_BACK = ("If you replace part of the model for the call, such as a block's forward or "
            "model.loss, restore it (try, finally). Or call the parts yourself: model.token, "
            "model.blocks, model.norm, model.loss.")
TWICE = ("Run each block forward at most twice, not three times, and each row and each piece of "
         "the loss no more often than that.")
ALL_BLOCKS = ("So much is in memory as all blocks' activations, or several rows' logits, take. "
              "Take one row at a time, keep only each block's input, and run the block again in "
              "backward.")
LOGITS = ("The logits of a whole row are in memory at once, with their softmax and gradient. "
          "Compute the head and the loss for a few tokens at a time.")
SMALLER = ("Take one row at a time, and free each piece's tensors before the next. If the logits "
           "of a whole row are in memory, take a few tokens at a time.")


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
    with one_thread():
        for case, rows, tokens, ignored, is_frozen in CASES:
            _compare_step(case, partial(_step, frugal_gradients), partial(_model, TINY, is_frozen),
                          *batch(TINY, rows, tokens, ignored))
        yield "1, 2, 3, 5 rows, IGNORE, a frozen embedding: the gradient of model(x, y).backward()"
        yield "gradients are added to what .grad held; model, inputs and targets are as they were"
        for name, config, rows, library_peak in SCORED:
            yield f"{name}: {_score(frugal_gradients, name, config, rows, library_peak)}"


def _compare_step(case, step, make_model, inputs, targets):
    """Check that step(model, inputs, targets), twice, did one backward's work and nothing else."""
    model, oracle, x, y = make_model(), make_model(), inputs.clone(), targets.clone()
    right, weights = oracle(inputs, targets), [p.detach().clone() for p in model.parameters()]
    right.backward()
    loss = step(model, x, y)
    once = gradients(model)
    wrong = {name: grad for name, grad in gradients(oracle).items()
             if not (once[name] is None if grad is None else is_near(once[name], grad))}
    why_none = NONE if model.token.weight.requires_grad else LOST
    for name, grad in wrong.items():
        expect(grad is not None, f"{case}: {name} is frozen, and yet it has a gradient",
               "A frozen parameter gets no gradient.")
        text = times_right(once[name], grad) or instead(once[name], grad)
        expect(False, f"{case}: the gradient of {name} is {text}",
               why_none if once[name] is None else
               TWO_JOBS if [*wrong] == ["token.weight"] else COUNT)
    expect(loss is not None, f"{case}: it returned None", "Return the mean loss of the batch.")
    expect(not getattr(loss, "requires_grad", False), f"{case}: the loss it returned holds its "
           "graph", DETACH)
    expect(is_near(float(loss), right.item(), torch.float32), f"{case}: the loss that it returned "
           f"is {instead(float(loss), right.item())}", MEAN)
    expect(torch.equal(x, inputs) and torch.equal(y, targets), "inputs or targets have changed",
           "Split them; do not write into them.")
    step(model, x, y)
    expect(all(grad is None or is_near(grad, 2 * once[name])
               for name, grad in gradients(model).items()),
           f"{case}: a second call did not add the same gradient again", ADDS)
    expect(all(map(torch.equal, model.parameters(), weights)), "the weights have changed",
           "Only .grad may change; the step comes later.")


def _step(frugal_gradients, model, inputs, targets):
    before = _parts(model)
    loss = frugal_gradients(model, inputs, targets)
    expect(before == _parts(model), "the model is not as it was", PUT_BACK)
    return loss


def _parts(model):
    """Return everything besides a model's weights that must be unchanged afterwards."""
    return [(name, [*value] if isinstance(value, dict) else value) for module in model.modules()
            for name, value in vars(module).items()] + [p.requires_grad for p in model.parameters()]


def _measured(step, config, rows):
    """Return (FLOPs, peak bytes on top of what was held before) of step(model, inputs, targets)."""
    model, flops = _model(config), []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    inputs, targets = batch(config, rows, config.n_ctx)

    with Watcher(flops, add_flops(flops)), MemoryPeak(model) as memory:
        step(model, inputs, targets)
    return sum(flops), memory.peak_bytes - memory.points[0].total


def _score(frugal_gradients, name, config, rows, library_peak):
    flops, peak = _measured(frugal_gradients, config, rows)
    plain_flops, plain_peak = _measured(lambda model, *data: model(*data).backward(), config, rows)
    work, bound = flops / plain_flops, least_bytes(config)
    expect(work <= WORK, f"{name}: {work:.2f} times the FLOPs of the plain step, more than {WORK}",
           TWICE)
    expect(peak <= MOST * bound, f"{name}: {peak:,} bytes at the peak, more than {MOST} times the "
           f"bound of {bound:,}; the library has {library_peak:,}", _why_large(peak, config))
    return (f"peak {peak:,} bytes, bound {bound:,}, limit {MOST * bound:,} (library "
            f"{library_peak:,}, plain step {plain_peak:,}); {work:.2f} times the plain step's "
            "FLOPs")


def least_bytes(config):
    """Count one row's bytes when each block keeps its input, and one block all that it needs."""
    one = dataclasses.replace(config, n_layer=1)
    inputs = baseline.activation_bytes(config, 1, config.n_ctx, recompute=True)
    a_block = baseline.activation_bytes(one, 1, config.n_ctx)
    return inputs + a_block - 2 * baseline.ends_bytes(one, 1, config.n_ctx)


def _why_large(peak, config):
    if peak > 0.9 * config.n_layer * 16 * config.n_ctx * config.n_embd * 4:
        return ALL_BLOCKS
    return LOGITS if config is WIDE and peak < 3.5 * config.n_ctx * config.vocab_size * 4 else (
        SMALLER)


def by_checkpointed(model, inputs, targets):
    before, model.loss = model.loss, partial(cross_entropy, chunks=4)
    baseline.checkpoint_blocks(model)
    mean = baseline.accumulate_gradients(lambda x, y: model(x, y, "sum"), inputs, targets, 1)
    model.loss = before
    for block in model.blocks.values():
        del block.forward
    return mean


def without_backward(model, inputs, targets):
    return model(inputs, targets).detach()


ROWS, START = "inputs.split(1), targets.split(1)", "count, mean = "
PIECES = "hidden.pop().split(16, dim=1), y.split(16, dim=1)"
AGAIN = "block(h).backward(gradient)"
FRUGAL = Exercise(
    baseline.frugal_gradients, check_frugal_gradients, mistakes=(
        Slip(COUNT, ("(targets != IGNORE).sum()", "targets.numel()"),
             ('t, "sum") / count', "t) / len(inputs)")),
        Slip(TWO_JOBS, ("model.token(x).backward(gradient)", "pass")),
        Slip(LOST, by_checkpointed),
        Slip(NONE, without_backward),
        Slip(DETACH, ("mean = mean + loss.detach()", "mean = mean + loss")),
        Slip(MEAN, ("return mean", "return mean / len(inputs)")),
        Slip(ADDS, (START, f"model.zero_grad()\n    {START}")),
        Slip(PUT_BACK, (START, f"model.loss = partial(model.loss)\n    {START}"), partial=partial),
        Slip(TWICE, (AGAIN, f"{AGAIN[:-1]}, retain_graph=True)\n            again = block(h)\n"
                     "            block(again)")),
        Slip(ALL_BLOCKS, (ROWS, "[inputs], [targets]"), (
            "torch.no_grad()", "torch.enable_grad()",
            "hidden.pop().requires_grad_()", "hidden.pop().detach().requires_grad_()")),
        Slip(LOGITS, (PIECES, "hidden[-1:], [y]", "pieces.append(h.grad)",
                      "pieces.append(h.grad)\n        hidden.pop()")),
        Slip(SMALLER, (ROWS, "inputs.split(2), targets.split(2)")),
    ), hints=(
        "Three things are large in a plain step: the activations of all rows, the activations of "
        "all blocks, and the logits. Each has a remedy: take one row at a time, run the blocks "
        "again, compute the loss in pieces.",
        "Take one row at a time, with accumulate_gradients or your own loop. For the blocks, use "
        "checkpoint_blocks, or call them without autograd and keep their inputs. For the loss, "
        'call model.loss(model.head, hidden, targets, "sum") on a few tokens at a time.',
        "For each row, under torch.no_grad(): hidden = [model.token(x)], then append "
        "block(hidden[-1]) for each block. Compute the loss of 16 tokens at a time, / count, on "
        "h.detach().requires_grad_(), and call backward() at once; h.grad is the gradient to pass "
        "on. Then, from the last block to the first: h = hidden.pop().requires_grad_(); "
        "block(h).backward(gradient); gradient = h.grad. At the end, call "
        "model.token(x).backward(gradient) if model.token.weight.requires_grad."))
