"""sequence_parallel_norm."""

import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab.checks.prover import Proof, Slip
from ranklab.checks.tensor_parallel.inputs import (
    COST, GROUP, Whole, filled, normal, seen_of, stages,
)
from ranklab.tensor_parallel.regions import (
    RegionFunction, copy_to_region, gather_tokens, identity, scatter_tokens,
)
from ranklab.tensor_parallel.sequence import sequence_parallel_norm

B, T, C = 2, 12, 24


class Case(NamedTuple):
    name: str
    norm: type = nn.LayerNorm
    options: dict = {}  # never changed
    frozen: str = ""

    def __str__(self):
        return self.name


CASES = (Case("LayerNorm"),
         Case("LayerNorm without bias, eps=0.1", options={"bias": False, "eps": 0.1}),
         Case("RMSNorm", nn.RMSNorm), Case("LayerNorm, frozen weight", frozen="weight"))


def _see(fn, case, ranks):
    """Look at the calls of seen_of(); then at the norm called alone, which must work as before."""
    norm = filled(case.norm(C, **case.options), case.frozen, normal)
    alone, changed = copy.deepcopy(norm), copy.deepcopy(norm)
    x = Whole(normal(3, B, T, C).requires_grad_(), 1, ranks.at(T))
    local, weights = x.leaf(), normal(9, B, T, C)
    yield from seen_of(
        fn, ranks, lambda: fn(changed, local, **ranks.keywords),
        {"x": local, **dict(changed.named_parameters())}, lambda: norm(x.tensor),
        {"x": x, **{name: Whole(p) for name, p in norm.named_parameters()}},
        Whole(weights, *x[1:]),
        backward=[p.nbytes for p in norm.parameters() if p.requires_grad])
    changed.zero_grad()
    local, x = x.leaf(), Whole(x.leaf())
    for values in seen_of(
            fn, ranks, lambda: changed(local), {"x": local, **dict(changed.named_parameters())},
            lambda: alone(x.tensor),
            {"x": x, **{name: Whole(p) for name, p in alone.named_parameters()}},
            Whole(weights[:, :local.shape[1]])):
        yield {f"norm(x) by itself afterwards: {name}": value for name, value in values.items()}


def summed(gradient, group):
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total


def mean(gradient, group):
    return summed(gradient, group) / dist.get_world_size(group)


def hooks_that_stay(norm, x, group=None):
    for p in norm.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: summed(gradient, group))
    return norm(x)


def one_hook_that_stays(norm, x, group=None):
    for p in norm.parameters():
        if p.requires_grad and not p._backward_hooks:
            p.register_hook(lambda gradient: summed(gradient, group))
    return norm(x)


def hooks_on_frozen(norm, x, group=None):
    views = {name: p.view_as(p) for name, p in norm.named_parameters()}
    for view in views.values():
        view.register_hook(lambda gradient: summed(gradient, group))
    return torch.func.functional_call(norm, views, (x,))


def assigned(norm, x, group=None):
    norm.weight = norm.weight * 1
    return norm(x)


def weight_and_bias(norm, x, group=None):
    views = {"weight": copy_to_region(norm.weight, group),
             "bias": copy_to_region(norm.bias, group)}
    return torch.func.functional_call(norm, views, (x,))


CALL = "functional_call(norm, parameters, x)"
ENTERED = "copy_to_region(p, group)"
ALL = "for name, p in norm.named_parameters()"
NORM = Proof(
    sequence_parallel_norm,
    *stages({"this rank's tokens; gradients of the norm are sums: as in one process, on 4 "
             "ranks": (),
             "LayerNorm with and without bias, RMSNorm, frozen": (),
             "twice in a row, and afterwards the norm is as before": (),
             "one all-reduce for each parameter, in backward": COST}, _see, CASES),
    mistakes=(
        Slip("Each rank knows only the gradient from its own tokens, so the ranks' weights would "
             "drift apart. Pass all of the norm's parameters through copy_to_region.",
             (CALL, "norm(x)"),
             (ALL, f"{ALL} if name == 'weight'"), (ALL, f"{ALL} if name == 'bias'")),
        Slip("No other rank has these tokens, so x's gradient needs no sum. The gradients of the "
             "norm's parameters do.",
             (CALL, "functional_call(norm, parameters, copy_to_region(x, group))"),
             (CALL, "norm(copy_to_region(x, group))")),
        Slip(GROUP, (ENTERED, "copy_to_region(p)")),
        Slip("The norm is not always a LayerNorm, and it has its own eps: functional_call(norm, "
             "parameters, x).",
             (CALL, "F.layer_norm(x, x.shape[-1:], parameters['weight'], parameters.get('bias'))"),
             F=F),
        Slip("Do not divide by R: forward must use the norm's parameters unchanged.",
             (ENTERED, f"{ENTERED} / dist.get_world_size(group)"), dist=dist),
        Slip("Each rank has a part of the gradient: sum the parts, as copy_to_region does, without "
             "taking a mean.",
             (ENTERED, "RegionFunction.apply(p, group, identity, mean)"),
             RegionFunction=RegionFunction, identity=identity, mean=mean),
        Slip("A detached parameter gets no gradient.",
             (ENTERED, "copy_to_region(p.detach(), group)")),
        Slip("A norm looks at one token at a time, so there is no need to gather tokens.",
             (CALL, "scatter(functional_call(norm, parameters, gather(x, group)), group)"),
             (CALL, "scatter(norm(gather(x, group)), group)"),
             gather=gather_tokens, scatter=scatter_tokens),
        Slip("A hook on the norm's own parameter stays there, and every call adds another. "
             "functional_call(norm, {name: tensor}, x) leaves the norm unchanged.",
             hooks_that_stay),
        Slip("A hook on the norm's own parameter stays, and still runs when the norm is used by "
             "itself. functional_call(norm, {name: tensor}, x) leaves the norm unchanged.",
             one_hook_that_stays),
        Slip("A frozen parameter has no gradient to sum, and registering a hook on it fails.",
             hooks_on_frozen),
        Slip("torch does not let you put a tensor in a Parameter's place: functional_call(norm, "
             "{name: tensor}, x) computes with other tensors instead.", assigned),
        Slip("The norm might have no bias: use whatever norm.named_parameters() yields.",
             weight_and_bias),
    ), hints=(
        "The weight is the same on all ranks. From which tokens does one rank know the weight's "
        "gradient?",
        "The weight enters as x enters a region: unchanged, but its gradient is summed.",
        "functional_call(norm, {name: copy_to_region(p, group), ... of named_parameters()}, x)",
    ))
