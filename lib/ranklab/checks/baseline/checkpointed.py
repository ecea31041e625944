"""The check of checkpointed: against the same layers run plainly."""

import torch
from torch import nn

from ranklab.checks.baseline.accumulate_gradients import gradients
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hint_of
from ranklab.checks.trial import explain, is_near
from ranklab.meter import SavedActivations


class Layer(nn.Module):
    """Something to recompute: weights, a frozen weight, dropout, three inputs."""

    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.up.bias.requires_grad_(False)
        self.drop = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x, shift, mask):
        self.calls += 1
        return x + self.drop(self.down(torch.tanh(self.up(x)))) * shift * mask


def _two_layers(dropout, run):
    """A step through two layers by run(layer, *inputs): all that may differ from the plain one."""
    torch.manual_seed(3)
    layers = nn.ModuleList([Layer(dropout), Layer(dropout)])
    start = torch.randn(8, 16, requires_grad=True)
    shift = torch.rand(8, 1, requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.int32)[:, None]  # has no gradient
    x = start * 1.0
    with SavedActivations(layers) as saved:
        for layer in layers:
            x = run(layer, x, shift, mask)
    loss = (x * torch.randn(8, 16)).sum()  # random numbers are used between forward and backward
    loss.backward()
    grads = {**gradients(layers), "the second input, shift": shift.grad, "the input": start.grad}
    return {"value": x.detach(), "gradients": grads,
            "saved": saved.bytes, "calls": layers[0].calls, "random": torch.rand(4)}  # fmt: skip


# What autograd says, and what it means here.
RAISED = {
    "RuntimeError: One of the differentiated Tensors does not require grad":
        "One input, `mask`, needs no gradient, and torch.autograd.grad can't be asked for it. "
        "torch.autograd.backward(outputs, gradients) can: then return each x.grad.",
    "RuntimeError: element 0 of tensors does not require grad.*":
        "Autograd is off inside forward and backward of a Function: run function again inside "
        "torch.enable_grad(), on inputs that require a gradient where the originals did.",
    "RuntimeError: Trying to backward through the graph a second time.*":
        "The kept inputs still hang on the graph that they came from, and backward ran on into "
        "the layer before. Detach them first: x.detach().requires_grad_(x.requires_grad).",
    "RuntimeError: .* incorrect number of gradients .*":
        "backward must return one gradient for each input, in a tuple: here there are three, x, "
        "shift and mask. None will do for one that needs no gradient.",
    "RuntimeError: .* can require gradients":
        "An input of whole numbers, like `mask`, can't require a gradient: "
        "x.detach().requires_grad_(x.requires_grad) asks only where the original did.",
}  # fmt: skip


TWO_OUTPUTS = ("function may return a tuple. backward then receives a gradient for each output: "
               "torch.autograd.backward(outputs, gradients) takes both as they are.")


def _recomputed(checkpointed, dropout):
    try:
        return _two_layers(dropout, lambda layer, *inputs: checkpointed(layer, *inputs))
    except RuntimeError as error:
        mistake = Mistake(str(error).partition(". ")[0], cause=f"RuntimeError: {error}")
        mistake.hint = hint_of(RAISED, mistake)
        if not mistake.hint:
            raise
        raise mistake from None


def check_checkpointed(checkpointed):
    for dropout in (0.0, 0.5):
        right = _two_layers(dropout, lambda layer, *inputs: layer(*inputs))
        got = _recomputed(checkpointed, dropout)
        _compare_recomputed(got, right, dropout)
        if dropout == 0.0:
            yield "same value, same gradients of input and weights, through two layers in a row"
            least = 2 * (8 * 16 + 2 * 8) * 4  # x, shift, mask; two are shared, so a bit less
            if got["saved"] > least:
                raise Mistake(f"{got['saved']:,} bytes are kept; the inputs have at most {least:,}",
                              "Keep the inputs only: ctx.save_for_backward(*inputs), and run "
                              "function inside forward, where autograd records nothing.")
            if got["calls"] != 2:
                raise Mistake(f"function ran {got['calls']} times; twice is right",
                              "Once in forward, and once again in backward.")
            yield f"{got['saved']:,} bytes are kept instead of {right['saved']:,}"
    yield "same gradients with dropout: the random numbers are those of the first time"
    if not torch.equal(got["random"], right["random"]):
        raise Mistake("after backward, torch.rand repeats itself",
                      "Put the random state back after the second forward: random_replayed does.")
    yield "random numbers go on as if nothing had been computed twice"
    _compare_two_outputs(checkpointed)
    yield "the same of a function with two outputs"


def _compare_two_outputs(checkpointed):
    """A function that returns a tuple: both are used, or the second alone."""
    weight = torch.linspace(0.5, 2, 6, dtype=torch.float64).requires_grad_()

    def both(x, y):
        return x * y * weight, (x + weight).sin()

    def gradients_of(run, first):
        x, y = (torch.linspace(a, 3, 6, dtype=torch.float64).requires_grad_() for a in (1, 2))
        weight.grad = None
        one, two = run(x, y)
        (first * one.sum() + 3 * two.square().sum()).backward()
        return [one.detach(), two.detach(), x.grad, weight.grad, *([y.grad] if first else [])]

    for first in (1.0, 0.0):
        try:
            got = gradients_of(lambda *inputs: checkpointed(both, *inputs), first)
        except (RuntimeError, TypeError, AttributeError, ValueError) as error:
            raise Mistake(f"a function with two outputs: {str(error).partition('. ')[0]}",
                          TWO_OUTPUTS) from None
        for mine, right in zip(got, gradients_of(both, first)):
            if not is_near(mine, right):
                raise Mistake("a function with two outputs: a value or a gradient is off",
                              TWO_OUTPUTS)


def _compare_recomputed(got, right, dropout):
    explain(f"dropout {dropout}: the value", got["value"], right["value"],
            hint="forward returns function(*inputs) as it is.")
    for name, grad in right["gradients"].items():
        if grad is None:
            continue
        seen = got["gradients"][name]
        if "shift" in name and seen is None:
            hint = "Return the gradients of all inputs: tuple(x.grad for x in kept)."
        elif seen is None or (not seen.any() and grad.any()):
            hint = ("Weights inside function are no inputs of it: "
                    "torch.autograd.backward(outputs, gradients) fills their .grad, "
                    "torch.autograd.grad of the inputs alone does not. And kept inputs must "
                    "require a gradient if the originals did.")
        elif dropout:
            hint = ("With dropout only: the second forward drops other numbers than the first. Run "
                    "it inside random_replayed(ctx.random).")
        else:
            hint = ("Use the gradients that backward receives, not ones; detach the kept inputs, "
                    "or backward goes on into the layer before and counts it twice.")
        explain(f"dropout {dropout}: the gradient of {name}", seen, grad, hint=hint)
