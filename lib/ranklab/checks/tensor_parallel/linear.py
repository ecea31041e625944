"""The checks of ColumnParallelLinear and RowParallelLinear: beside the whole nn.Linear."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from ranklab.checks.tensor_parallel.beside import GROUP, Whole, beside, on_four, refused, seeded
from ranklab.engine import device
from ranklab.tensor_parallel.regions import (
    as_it_is, copy_to_region, gather_tokens, scatter_tokens,
)

B, T, IN, OUT = 2, 12, 24, 48
FUSED = (24, 12, 12)  # q, k and v in one matrix
CASES = "with bias", "without bias", "frozen weight", "frozen bias", "each rank its tokens"
CUT = ("torch's weight is (out, in): a column of the paper's A is a row of weight, dim 0. A bias "
       "has a number for each output: cut in a column layer, whole in a row layer.")
FAILURES = {"cannot be multiplied": CUT, "size of tensor": CUT, "must match": CUT,
            "expanded size": CUT, "'NoneType'": "There may be no bias: None stays None.",
            "raised ValueError": f"{CUT} {GROUP}"}
COLUMN = {"value": f"F.linear(self.enter(x, self.group), this rank's rows of weight, of bias). {CUT}",
          "x": "x enters by self.enter(x, self.group), whatever that is: copy_to_region sums "
          "gradients over ranks, as_it_is does not."}
ROW = {"value": "The sum over ranks of x @ weight.T leaves by self.leave(y, self.group). The bias "
       "is added once, after it: each rank that adds it before the sum adds it once more.",
       "bias": "The bias is added outside, whole, on each rank: self.outside(self.bias, "
       "self.group). Where each rank has its tokens, that sums the gradient."}


def _linear(case):
    linear = nn.Linear(IN, OUT, case != "without bias").to(device())
    for place, (name, p) in enumerate(linear.named_parameters()):
        p.data = seeded(place, *p.shape)
        p.requires_grad_(case != f"frozen {name}")
    return linear


def _wholes(linear, dim, at):
    """A row layer, where dim is 1, has its bias whole."""
    return {name: Whole(p) if p.dim() == dim else Whole(p, dim, at)
            for name, p in linear.named_parameters()}


def _column(layer_class, ranks):
    for case in (*CASES, f"parts={FUSED}", "enter=as_it_is"):
        one, x, at = _linear(case), seeded(5, B, T, IN).requires_grad_(), ranks.at(OUT)
        options, whole, out = {}, Whole(x), Whole(None, 2, at)
        backward, forward = (x.nbytes,), ()
        if "tokens" in case:
            options, whole, forward = {"enter": gather_tokens}, Whole(x, 1, ranks.at(T)), backward
        if "parts" in case:
            options, at = {"parts": FUSED}, torch.cat([
                sum(FUSED[:n]) + ranks.at(size) for n, size in enumerate(FUSED)])
            out = Whole(None, 2, at)
        call = lambda: one(x)  # noqa: E731
        if "as_it_is" in case:
            options, out, backward = {"enter": as_it_is}, Whole(None), ()
            call = lambda: F.linear(x, one.weight[at], one.bias[at])  # noqa: E731
        layer, mine = layer_class(copy.deepcopy(one), ranks.group, **options), whole.leaf()
        yield from beside(
            case, ranks, lambda: layer(mine), {"x": mine, **dict(layer.named_parameters())}, call,
            {"x": whole, **_wholes(one, 0, at)}, out, COLUMN, forward, backward)
    if ranks.size == 4:
        yield refused("tp=4, 10 outputs", lambda: layer_class(nn.Linear(4, 10), ranks.group))


def _row(layer_class, ranks):
    for case in CASES:
        one, x, at = _linear(case), seeded(5, B, T, IN).requires_grad_(), ranks.at(IN)
        options, out, forward, backward = (), Whole(None), (B * T * OUT * 4,), ()
        if "tokens" in case:
            options, out = (scatter_tokens, copy_to_region), Whole(None, 1, ranks.at(T))
            backward = (*forward, one.bias.nbytes)
        layer = layer_class(copy.deepcopy(one), ranks.group, *options)
        whole = Whole(x, 2, at)
        mine = whole.leaf()
        yield from beside(
            case, ranks, lambda: layer(mine), {"x": mine, **dict(layer.named_parameters())},
            lambda: one(x), {"x": whole, **_wholes(one, 1, at)}, out, ROW, forward, backward)
    if ranks.size == 4:
        yield refused("tp=4, 10 inputs", lambda: layer_class(nn.Linear(10, 4), ranks.group))


def check_ColumnParallelLinear(layer_class):
    on_four(_column, layer_class, FAILURES)
    yield "this rank's outputs, and all gradients: as one process, on 4, 3, 2 and 1 ranks"
    yield "with and without bias, frozen or not; parts of a fused q, k, v; x enters by `enter`"
    yield "only its part in memory, which knows its Split; 10 outputs on 4 ranks are an error"


def check_RowParallelLinear(layer_class):
    on_four(_row, layer_class, FAILURES)
    yield "all outputs, the bias added once, and all gradients: as one process, on 1 to 4 ranks"
    yield "with and without bias, frozen or not; y leaves by `leave`, the bias through `outside`"
    yield "only its part in memory, which knows its Split; 10 inputs on 4 ranks are an error"
