"""The check of checkpointed: against the same layers run plainly."""

import torch
from torch import nn

from ranklab.checks.baseline.whole_batch import gradients
from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hint_of
from ranklab.checks.trial import explain
from ranklab.meter import SavedActivations


RAISED = {  # what autograd says, and what it means here
    "RuntimeError: One of the differentiated Tensors does not require grad": "One input, `mask`, "
    "needs no gradient, and torch.autograd.grad can't be asked for it; "
    "torch.autograd.backward(outputs, gradients) can.",
    "RuntimeError: element 0 of tensors does not require grad.*": "Autograd is off inside forward "
    "and backward of a Function: run function again inside torch.enable_grad(), on inputs that "
    "require a gradient where the originals did.",
    "RuntimeError: Trying to backward through the graph a second time.*": "The kept inputs still "
    "hang on the graph that they came from. Detach them first: "
    "x.detach().requires_grad_(x.requires_grad).",
    "RuntimeError: .* incorrect number of gradients .*": "backward must return one gradient for "
    "each input, in a tuple; None where none is needed.",
    "RuntimeError: .* can require gradients": "`mask` holds whole numbers, and can't require a "
    "gradient: ask only where the input did.",
}
TWO_OUTPUTS = {".*": "function may return a tuple. backward then receives a gradient for each "
               "output: torch.autograd.backward(outputs, gradients) takes both as they are."}


class Layer(nn.Module):
    """Something to recompute: weights, one frozen, dropout, three inputs, perhaps two outputs."""

    def __init__(self, dropout, two_outputs):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(dropout)
        self.up.bias.requires_grad_(False)
        self.two_outputs, self.calls = two_outputs, 0

    def forward(self, x, shift, mask):
        self.calls += 1
        hidden = torch.tanh(self.up(x))
        x = x + self.drop(self.down(hidden)) * shift * mask
        return (x, hidden.square()) if self.two_outputs else x


def _two_layers(run, dropout, two_outputs):
    """({name: value or gradient}, bytes kept, calls of a layer, random numbers afterwards)"""
    torch.manual_seed(3)
    layers = nn.ModuleList([Layer(dropout, two_outputs) for _ in range(2)])
    start, shift = torch.randn(8, 16, requires_grad=True), torch.rand(8, 1, requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.int32)[:, None]  # has no gradient
    out = (start * 1.0,)
    with SavedActivations(layers) as saved:
        for layer in layers:
            out = run(layer, out[0], shift, mask)
            out = out if two_outputs else (out,)
    # Random numbers are used between forward and backward. The last output is used alone.
    (out[-1] * torch.randn(out[-1].shape)).sum().backward()
    values = {"value": out[-1].detach()} | gradients(layers)
    values |= {"second input, shift": shift.grad, "input": start.grad}
    return values, saved.bytes, layers[0].calls, torch.rand(4)


def check_checkpointed(checkpointed):
    kept, calls, _, plain = _compare(checkpointed, "dropout 0")
    yield "same value, same gradients of input and weights, through two layers in a row"
    least = 2 * (8 * 16 + 2 * 8) * 4  # x, shift, mask; two are shared, so a bit less
    expect(kept <= least, f"{kept:,} bytes are kept; the inputs have at most {least:,}", "Keep the "
           "inputs only: ctx.save_for_backward(*inputs), and run function inside forward, where "
           "autograd records nothing.")
    expect(calls == 2, f"function ran {calls} times; twice is right", "Once in forward, and once "
           "again in backward.")
    yield f"{kept:,} bytes are kept instead of {plain:,}"
    _, _, goes_on, _ = _compare(checkpointed, "dropout 0.5", 0.5)
    yield "same gradients with dropout: the second forward draws the same random numbers"
    expect(goes_on, "after backward, torch.rand repeats itself", "Put the random state back after "
           "the second forward: random_replayed does.")
    yield "afterwards random numbers go on as if nothing had been computed twice"
    _compare(checkpointed, "a function with two outputs", failures=TWO_OUTPUTS)
    yield "the same of a function with two outputs"


def _compare(checkpointed, case, dropout=0.0, failures=RAISED):
    """(bytes kept, calls of a layer, whether random numbers go on, bytes that plain layers keep)"""
    settings = dropout, failures is TWO_OUTPUTS
    right, plain, _, random = _two_layers(lambda layer, *inputs: layer(*inputs), *settings)
    try:
        got, kept, calls, goes_on = _two_layers(checkpointed, *settings)
    except Exception as error:
        mistake = Mistake(f"{case}: {str(error).partition('. ')[0]}",
                          cause=f"{type(error).__name__}: {error}")
        mistake.hint = hint_of(failures, mistake)
        raise mistake if mistake.hint else error from None
    for name, value in right.items():
        if value is not None:
            hint = failures.get(".*") or _why_off(name, got[name], value, dropout)
            explain(f"{case}: the value or gradient of {name}", got[name], value, hint=hint)
    return kept, calls, torch.equal(goes_on, random), plain


def _why_off(name, seen, grad, dropout):
    if dropout:
        return ("It is wrong only with dropout: the second forward drops other numbers than the "
                "first. Run it inside random_replayed(ctx.random).")
    if name == "value":
        return "forward returns function(*inputs) as it is."
    if "shift" in name and seen is None:
        return "Return the gradients of all inputs: tuple(x.grad for x in kept)."
    if seen is None or (not seen.any() and grad.any()):
        return ("Weights inside function are not among its inputs: torch.autograd.backward("
                "outputs, gradients) fills their .grad, but torch.autograd.grad of the inputs "
                "alone does not. And kept inputs must require a gradient if the originals did.")
    return ("Use the gradients that backward receives, not ones; detach the kept inputs, or "
            "backward goes on into the layer before and counts it twice.")
