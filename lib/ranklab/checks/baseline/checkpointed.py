"""checkpointed, compared with the same layers run plainly."""

from typing import NamedTuple

import torch
from torch import nn

from ranklab.baseline import checkpointed
from ranklab.baseline.checkpointing import set_random_state
from ranklab.checks.baseline.whole_batch import one_thread, told_gradients, times_right
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.meter import SavedActivations

KEPT, CALLS = "bytes that are kept for backward", "the number of times that function ran"
GOES_ON = "torch.rand(4) afterwards"
INPUTS = 2 * (8 * 16 + 2 * 8) * 4  # bytes of x, shift and mask, of two layers


class Layers(NamedTuple):
    """Two layers in a row."""

    dropout: float = 0.0
    two_outputs: bool = False

    def __str__(self):
        return f"dropout {self.dropout:g}" + ", a function with two outputs" * self.two_outputs


class Layer(nn.Module):
    """A layer to recompute: weights, one frozen, dropout, three inputs, one or two outputs."""

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


def _see(fn, case):
    torch.manual_seed(3)
    layers = nn.ModuleList([Layer(*case) for _ in range(2)])
    start, shift = torch.randn(8, 16, requires_grad=True), torch.rand(8, 1, requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.int32)[:, None]  # has no gradient
    out = (start * 1.0,)
    with one_thread():
        with SavedActivations(layers) as saved:
            for layer in layers:
                out = fn(layer, out[0], shift, mask)
                out = out if case.two_outputs else (out,)
        if not (isinstance(out, tuple | list) and all(isinstance(x, torch.Tensor) for x in out)):
            yield {"the value": out if case.two_outputs else out[0]}
            return
        # Random numbers are used between forward and backward. The last output is used alone:
        # what the others are made of has a gradient of zeros then, or none.
        (out[-1] * torch.randn(out[-1].shape)).sum().backward()
        for parameter in layers.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    yield {
        "the value": out[-1],
        **told_gradients(layers),
        "the gradient of the second input": Told(shift.grad, times_right),
        "the gradient of the first input": Told(start.grad, times_right),
        KEPT: AtMost(saved.bytes, INPUTS),
        CALLS: Must(layers[0].calls, 2),
        GOES_ON: torch.rand(4),
    }


def plainly(function, *inputs):
    return function(*inputs)


FORWARD = "return function(*inputs)"
CUT_OFF = "[x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]"
AGAIN = "with torch.enable_grad(), random_replayed(ctx.random):"
BACKWARD = "torch.autograd.backward(outputs, gradients)"
GRAD, RETURN = "torch.autograd.grad(outputs, leaves, gradients)", "tuple(x.grad for x in leaves)"
NEEDED = GRAD.replace("leaves", "[x for x in leaves if x.requires_grad]")
CHECKPOINTED = Proof(
    checkpointed,
    Stage({"same value, same gradients of input and weights, through two layers in a row": (),
           f"only the inputs are kept, {INPUTS:,} bytes; function runs once more": (KEPT, CALLS)},
          _see, (Layers(),), oracle=plainly),
    Stage({"same gradients with dropout: the second forward draws the same random numbers": (),
           "afterwards random numbers continue as if nothing had been computed twice": (GOES_ON,)},
          _see, (Layers(dropout=0.5),), oracle=plainly),
    Stage("the same for a function with two outputs", _see, (Layers(two_outputs=True),),
          oracle=plainly),
    mistakes=(
        Slip("Keep only the inputs: call ctx.save_for_backward(*inputs), and run function inside "
             "forward, where autograd records nothing.",
             ("Recompute.apply(*inputs)", "function(*inputs)")),
        Slip("Do not keep what function returns: backward computes it again.",
             (f"            ctx.save_for_backward(*inputs)\n            {FORWARD}",
              "            outputs = function(*inputs)\n"
              "            ctx.save_for_backward(*inputs, outputs * 1)\n"
              "            return outputs",
              "in ctx.saved_tensors]", "in ctx.saved_tensors[:-1]]")),
        Slip("function must run once in forward and once more in backward.",
             ("outputs = function", "function(*leaves); outputs = function"),
             (FORWARD, f"function(*inputs); {FORWARD}")),
        Slip("This fails only with dropout: the second forward drops different numbers than the "
             "first. Run it inside random_replayed(ctx.random).",
             (", random_replayed(ctx.random)", "")),
        Slip("Save the random state before function runs: afterwards, dropout has already drawn "
             "its numbers.",
             (FORWARD, "outputs = function(*inputs)\n            ctx.random = random_state()\n"
                       "            return outputs")),
        Slip("Restore the random state after the second forward, as random_replayed does.",
             (AGAIN, "set_random_state(ctx.random)\n            with torch.enable_grad():"),
             set_random_state=set_random_state),
        Slip("Autograd is off inside forward and backward of a Function: run function again inside "
             "torch.enable_grad(), on inputs that require a gradient where the originals did.",
             ("torch.enable_grad(), ", "")),
        Slip("A graph is gone through twice. Cut the kept inputs off, "
             "x.detach().requires_grad_(x.requires_grad), and call torch.autograd.backward only "
             "once.", (CUT_OFF, "ctx.saved_tensors")),
        Slip("No gradient reaches the inputs. Kept inputs must require one where the originals "
             "did, x.detach().requires_grad_(x.requires_grad), and backward returns it.",
             (CUT_OFF, "[x.detach() for x in ctx.saved_tensors]")),
        Slip("`mask` holds integers and can't require a gradient: require one only where the "
             "original input did.", (CUT_OFF, CUT_OFF.replace("x.requires_grad)", ")"))),
        Slip("One input, `mask`, needs no gradient, and torch.autograd.grad can't be asked for it; "
             "torch.autograd.backward(outputs, gradients) can.", (BACKWARD, f"return {GRAD}")),
        Slip("Weights inside function are not among its inputs: torch.autograd.backward(outputs, "
             "gradients) fills their .grad, but torch.autograd.grad of the inputs alone does not.",
             (BACKWARD, f"grads = iter({NEEDED})",
              RETURN, "tuple(next(grads) if x.requires_grad else None for x in leaves)")),
        Slip("Use the gradients that backward receives, not ones.",
             (BACKWARD, BACKWARD.replace("gradients", "torch.ones_like(outputs)"))),
        Slip("Pass the gradients that backward receives to torch.autograd.backward.",
             (BACKWARD, "torch.autograd.backward(outputs)"), (BACKWARD, "outputs.backward()")),
        Slip("Run backward from outputs: torch.autograd.backward(outputs, gradients).",
             (BACKWARD, "pass")),
        Slip("function may return a tuple; backward then receives one gradient for each output. "
             "torch.autograd.backward(outputs, gradients) accepts both as they are.",
             (BACKWARD, "outputs.backward(*gradients)"),
             (BACKWARD, "outputs.backward(gradients[0])")),
        Slip("Each output has its own gradient: pass all of them on, not only the first.",
             (BACKWARD, "first = outputs[0] if isinstance(outputs, tuple) else outputs\n"
                        "            first.backward(gradients[0])")),
        Slip("backward must return a tuple with one gradient for each input, or None where none is "
             "needed.", (RETURN, "leaves[0].grad"), (RETURN, "gradients"),
             (RETURN, "tuple(x.grad for x in leaves if x.requires_grad)"),
             (f"return {RETURN}", "pass")),
        Slip("Return the gradients of all inputs, not only of the first: tuple(x.grad for x in "
             "leaves).", (RETURN, "(leaves[0].grad, *[None] * (len(leaves) - 1))")),
        Slip("Return the gradients in the order of the inputs.",
             (RETURN, "(leaves[1].grad, leaves[0].grad, None)")),
    ), hints=(
        "backward gets the gradients of the outputs. What has to exist again before it can use "
        "them?",
        "Detach the inputs, run function on them with autograd on and the old random state, then "
        "torch.autograd.backward.",
        "leaves = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]; outputs "
        "= function(*leaves) inside torch.enable_grad() and random_replayed(ctx.random); "
        "torch.autograd.backward(outputs, gradients); return tuple(x.grad for x in leaves).",
    ))
