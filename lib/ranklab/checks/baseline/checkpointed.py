"""The check of checkpointed: against the same layers run plainly."""

import torch
from torch import nn

from ranklab.checks.baseline.whole_batch import gradients
from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hint_of
from ranklab.checks.trial import explain
from ranklab.meter import SavedActivations


class Layer(nn.Module):
    """Something to recompute: weights, a frozen weight, dropout, three inputs, perhaps two outputs.
    """

    def __init__(self, dropout, two_outputs):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.up.bias.requires_grad_(False)
        self.drop = nn.Dropout(dropout)
        self.two_outputs, self.calls = two_outputs, 0

    def forward(self, x, shift, mask):
        self.calls += 1
        hidden = torch.tanh(self.up(x))
        x = x + self.drop(self.down(hidden)) * shift * mask
        return (x, hidden.square()) if self.two_outputs else x


def _two_layers(dropout, two_outputs, run):
    """A step through two layers by run(layer, *inputs): all that may differ from the plain one."""
    torch.manual_seed(3)
    layers = nn.ModuleList([Layer(dropout, two_outputs) for _ in range(2)])
    start = torch.randn(8, 16, requires_grad=True)
    shift = torch.rand(8, 1, requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.int32)[:, None]  # has no gradient
    out = (start * 1.0,)
    with SavedActivations(layers) as saved:
        for layer in layers:
            out = run(layer, out[0], shift, mask)
            out = out if two_outputs else (out,)
    # Random numbers are used between forward and backward. The last output is used alone.
    (out[-1] * torch.randn(out[-1].shape)).sum().backward()
    grads = {**gradients(layers), "the second input, shift": shift.grad, "the input": start.grad}
    return {"value": out[-1].detach(), "gradients": grads, "random": torch.rand(4),
            "saved": saved.bytes, "calls": layers[0].calls}


# What autograd says, and what it means here.
RAISED = {
    "RuntimeError: One of the differentiated Tensors does not require grad":
        "One input, `mask`, needs no gradient, and torch.autograd.grad can't be asked for it; "
        "torch.autograd.backward(outputs, gradients) can.",
    "RuntimeError: element 0 of tensors does not require grad.*":
        "Autograd is off inside forward and backward of a Function: run function again inside "
        "torch.enable_grad(), on inputs that require a gradient where the originals did.",
    "RuntimeError: Trying to backward through the graph a second time.*":
        "The kept inputs still hang on the graph that they came from. Detach them first: "
        "x.detach().requires_grad_(x.requires_grad).",
    "RuntimeError: .* incorrect number of gradients .*":
        "backward must return one gradient for each input, in a tuple; None where none is needed.",
    "RuntimeError: .* can require gradients":
        "`mask` holds whole numbers, and can't require a gradient: ask only where the input did.",
}  # fmt: skip


TWO_OUTPUTS = ("function may return a tuple. backward then receives a gradient for each output: "
               "torch.autograd.backward(outputs, gradients) takes both as they are.")


def check_checkpointed(checkpointed):
    got, right = _compare(checkpointed, "dropout 0", 0.0, _why_off)
    yield "same value, same gradients of input and weights, through two layers in a row"
    least = 2 * (8 * 16 + 2 * 8) * 4  # x, shift, mask; two are shared, so a bit less
    expect(got["saved"] <= least, f"{got['saved']:,} bytes are kept; the inputs have at most "
           f"{least:,}", "Keep the inputs only: ctx.save_for_backward(*inputs), and run function "
           "inside forward, where autograd records nothing.")
    expect(got["calls"] == 2, f"function ran {got['calls']} times; twice is right",
           "Once in forward, and once again in backward.")
    yield f"{got['saved']:,} bytes are kept instead of {right['saved']:,}"
    got, right = _compare(checkpointed, "dropout 0.5", 0.5, lambda *_: "With dropout only: the "
                          "second forward drops other numbers than the first. Run it inside "
                          "random_replayed(ctx.random).")
    yield "same gradients with dropout: the random numbers are those of the first time"
    expect(torch.equal(got["random"], right["random"]), "after backward, torch.rand repeats "
           "itself", "Put the random state back after the second forward: random_replayed does.")
    yield "random numbers go on as if nothing had been computed twice"
    _compare(checkpointed, "a function with two outputs", 0.0, lambda *_: TWO_OUTPUTS, True)
    yield "the same of a function with two outputs"


def _compare(checkpointed, case, dropout, hint, two_outputs=False):
    """Returns what was seen, and what is right."""
    right = _two_layers(dropout, two_outputs, lambda layer, *inputs: layer(*inputs))
    try:
        got = _two_layers(dropout, two_outputs,
                          lambda layer, *inputs: checkpointed(layer, *inputs))
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        mistake = Mistake(f"{case}: {str(error).partition('. ')[0]}", cause=cause)
        mistake.hint = TWO_OUTPUTS if two_outputs else hint_of(RAISED, mistake)
        if not mistake.hint:
            raise
        raise mistake from None
    explain(f"{case}: the value", got["value"], right["value"],
            hint="forward returns function(*inputs) as it is.")
    for name, grad in right["gradients"].items():
        seen = got["gradients"][name]
        if grad is not None:
            explain(f"{case}: the gradient of {name}", seen, grad, hint=hint(name, seen, grad))
    return got, right


def _why_off(name, seen, grad):
    if "shift" in name and seen is None:
        return "Return the gradients of all inputs: tuple(x.grad for x in kept)."
    if seen is None or (not seen.any() and grad.any()):
        return ("Weights inside function are no inputs of it: torch.autograd.backward(outputs, "
                "gradients) fills their .grad, torch.autograd.grad of the inputs alone does not. "
                "And kept inputs must require a gradient if the originals did.")
    return ("Use the gradients that backward receives, not ones; detach the kept inputs, or "
            "backward goes on into the layer before and counts it twice.")
