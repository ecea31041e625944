"""The check of clip_grad_norm_sharded: beside the norm of all gradients in one place."""

import math
from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import expect, on_groups
from ranklab.checks.failures import STUCK
from ranklab.checks.trial import explain
from ranklab.engine import device
from ranklab.meter import Traffic

# name: the type, what all gradients are multiplied with, max_norm
CASES = {"float32": (torch.float32, 1, 2.0), "a norm below max_norm": (torch.float32, 1, 1e3),
         "each rank's norm below max_norm": (torch.float32, 1, 5.0),
         "max_norm=inf": (torch.float32, 1, math.inf), "zeros": (torch.float32, 0, 1.0),
         "float16": (torch.float16, 300, 2.0), "bfloat16": (torch.bfloat16, 1.1, 2.0),
         "float64": (torch.float64, 1, 2.0), "infinite on rank 2": (torch.float32, math.inf, 2.0),
         "NaN on rank 2": (torch.float32, math.nan, 2.0)}
EMPTY = "A rank may have no gradient: its square is 0, and it takes part in the one all-reduce."
FAILURES = {"RuntimeError: .*(non-empty|at least one|empty).*": EMPTY, STUCK: EMPTY,
            r"AttributeError: '(int|NoneType|float)' object has no attribute .*": EMPTY}


def _gradients(rank, dtype, scale):
    """Two gradients; that of rank 1 has no rows."""
    torch.manual_seed(rank)
    scale = scale if math.isfinite(scale) or rank == 2 else 1
    return [(scale * torch.randn(0 if rank == 1 else 4, *rest)).to(dtype) for rest in ((3,), ())]


def _trial(clip, ranks):
    for case, (dtype, scale, most) in CASES.items():
        parameters = [torch.nn.Parameter(torch.ones(1, device=device()))]  # has no gradient
        for gradient in _gradients(dist.get_rank(), dtype, scale):
            parameters.append(torch.nn.Parameter(torch.ones_like(gradient, device=device())))
            parameters[-1].grad = gradient.to(device())
        given = parameters if math.isfinite(scale) or dist.get_rank() else []
        with Traffic() as traffic:
            norm = torch.tensor(float(clip((p for p in given), most, ranks.group)))
        gradients = [p.grad.cpu() for p in parameters[1:]]
        sent = [op.payload_bytes for op in traffic.ops]
        yield partial(_compare, f"{case}, {ranks}", ranks, norm, gradients, dtype, scale,
                      most)
        yield partial(expect, len(sent) == 1 and sent[0] <= 8, f"{case}, {ranks}: {len(sent)} "
                      f"messages of {sum(sent)} bytes, not 1 of 8", "Add this rank's squares up.")


def check_clip_grad_norm_sharded(clip):
    on_groups(_trial, clip, failures=FAILURES)
    yield "the norm of all gradients before, alike on 4 ranks and in groups of 1, 2 and 3"
    yield "longer gradients get length max_norm, shorter ones stay, zeros too; inf or NaN is seen"
    yield "float64, float16, bfloat16; a rank without rows or gradients; one all-reduce of a number"


def _compare(where, ranks, norm, gradients, dtype, scale, most):
    if not math.isfinite(scale):
        return expect(2 not in ranks.members or not norm.isfinite(), f"{where}: the norm is "
                      f"{norm:.6g}", "A gradient of rank 2 is infinite or NaN, and all ranks must "
                      "know: add up all squares.")
    norms = torch.stack([torch.cat([x.double().flatten() for x in _gradients(r, dtype, scale)]
                                   ).norm().float() for r in ranks.members])
    own, right = norms[ranks.index], norms.norm()
    explain(f"{where}: the norm", norm, right, {
        "this rank's own": (own, "Add the squares of all ranks up: all_reduce, before the root."),
        "the sum of norms": (norms.sum(), "Norms do not add up. Squares do; the root comes last."),
        "the root of the mean square": (right / len(norms)**0.5, "A sum over ranks, no mean."),
        "its square": (right.square(), "The root is missing."),
        "after clipping": (right.clamp(max=most), "Return the norm before."),
    }, "Squares add up, of all gradients on all ranks; then comes the root. Compute in float32 or "
       "float64: in float16 a square above 65504 is infinite.")
    for got, before in zip(gradients, _gradients(dist.get_rank(), dtype, scale)):
        scaled, by_own, longer = ((before.double() * (factor if right else 0)).to(dtype) for factor
                                  in (min(1, most / right), min(1, most / own), most / right))
        explain(f"{where}: a gradient", got, scaled, {
            "as before": (before, "gradient *= factor, in place, for each, by the norm "
                          "of all. `parameters` may be a generator: one walk uses it up."),
            "scaled by this rank's own norm": (by_own, "All scale alike: by the norm of all."),
            "longer than before": (longer, "What is short enough stays: clamp(max=1.0)."),
        }, "All gradients times max_norm / norm, where that is below 1; 0 where all are 0.",
            through=torch.float32)  # the factor may have 32 bits
