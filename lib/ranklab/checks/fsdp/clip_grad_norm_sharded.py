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
EMPTY = ("A rank may have no gradient at all: its square is 0, and it takes part in the one "
         "all-reduce.")
FAILURES = {"RuntimeError: .*(non-empty|at least one|empty).*": EMPTY, STUCK: EMPTY,
            r"AttributeError: '(int|NoneType|float)' object has no attribute .*": EMPTY}


def _gradients(rank, dtype, scale):
    """Two gradients; that of rank 1 has no rows."""
    torch.manual_seed(rank)
    if not math.isfinite(scale) and rank != 2:
        scale = 1
    return [(scale * torch.randn(0 if rank == 1 else 4, *rest)).to(dtype) for rest in ((3,), ())]


def _trial(clip, ranks):
    rank, members = dist.get_rank(), ranks.members
    for case, (dtype, scale, most) in CASES.items():
        where = f"{case}, {ranks}"
        gradients = [x.to(device()) for x in _gradients(rank, dtype, scale)]
        parameters = [torch.nn.Parameter(torch.ones_like(x)) for x in gradients]
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient
        unused = torch.nn.Parameter(torch.ones(1, device=device()))
        given = [*parameters, unused] if math.isfinite(scale) or rank else []
        with Traffic() as traffic:
            norm = torch.tensor(float(clip((p for p in given), most, ranks.group)))
        if math.isfinite(scale):
            gradients = [p.grad.cpu() for p in parameters]
            yield partial(_compare, where, rank, members, *CASES[case], norm, gradients)
        else:
            yield partial(expect, 2 not in members or not norm.isfinite(),
                          f"{where}: the norm is {norm:.6g}", "A gradient of rank 2 is infinite or "
                          "NaN, and all ranks must know: add up all squares.")
        sent = [op.payload_bytes for op in traffic.ops]
        yield partial(expect, len(sent) == 1 and sent[0] <= 8,
                      f"{where}: {len(sent)} messages of {sum(sent)} bytes, not 1 of 8",
                      "Add this rank's squares up first: then one number travels.")


def check_clip_grad_norm_sharded(clip):
    on_groups(_trial, clip, failures=FAILURES)
    yield "the norm of all gradients before, alike on 4 ranks and in groups of 1, 2 and 3"
    yield "longer gradients get length max_norm, shorter ones stay, zeros too"
    yield "float64, float16, bfloat16; None, and a rank without rows; one all-reduce of a number"
    yield "infinity or NaN on one rank is seen by all, also by a rank without parameters"


def _compare(where, rank, members, dtype, scale, most, norm, gradients):
    norms = torch.stack([torch.cat([g.double().flatten() for g in _gradients(r, dtype, scale)]
                                   ).norm().float() for r in range(4)])
    own, right = norms[rank], norms[list(members)].norm()
    explain(f"{where}: the norm", norm, right, {
        "this rank's own": (own, "Add the squares of all ranks up: all_reduce, before the root."),
        "the sum of norms": (norms[list(members)].sum(), "Norms do not add up. Squares do; the "
                             "root comes last."),
        "the root of the mean square": (right / len(members)**0.5, "A sum over ranks, no mean."),
        "its square": (right.square(), "The root is missing."),
        "after clipping": (right.clamp(max=most), "Return the norm before."),
    }, "Squares add up, of all gradients on all ranks; then comes the root. Compute in float32 or "
       "float64: in float16 a square above 65504 is infinite.")
    kind = torch.float32 if dtype == torch.float64 else dtype  # the factor may have 32 bits
    for got, before in zip(gradients, _gradients(rank, dtype, scale)):
        scaled, by_own, longer = ((before.double() * (factor if right else 0)).to(kind) for factor
                                  in (min(1, most / right), min(1, most / own), most / right))
        explain(f"{where}: a gradient", got.to(kind), scaled, {
            "as before": (before.to(kind), "gradient *= factor, in place, for each, by the norm "
                          "of all. `parameters` may be a generator: one walk uses it up."),
            "scaled by this rank's own norm": (by_own, "All scale alike: by the norm of all."),
            "longer than before": (longer, "What is short enough stays: clamp(max=1.0)."),
        }, "All gradients times max_norm / norm, where that is below 1; 0 where all are 0.")
