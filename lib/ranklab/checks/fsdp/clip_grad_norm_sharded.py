"""clip_grad_norm_sharded: compared with the norm of all gradients in one place."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.prover import ALL, GROUPS, Agree, AtMost, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.fsdp import clip_grad_norm_sharded
from ranklab.meter import Traffic

LARGE = 1e3  # a max_norm above all norms


class Case(NamedTuple):
    """scale: of all gradients; one that is not finite applies only to rank 2."""

    name: str
    max_norm: float = 2.0
    dtype: torch.dtype = torch.float32
    scale: float = 1
    place: str = ""
    parameters: type = iter

    def __str__(self):
        return self.name

    def gradients(self, rank):
        """Return three gradients, the second one not contiguous; those of rank 1 have no rows."""
        random = torch.Generator().manual_seed(rank)
        scale = self.scale if math.isfinite(self.scale) or rank == 2 else 1
        rows = 0 if rank == 1 else 4
        gradients = [scale * torch.randn(shape, generator=random, dtype=torch.float64)
                     for shape in ((rows, 3), (rows, 2), (rows,))]
        first, second, third = (each.to(self.place or device(), self.dtype) for each in gradients)
        return [first, second.mT.contiguous().mT, third]


CASES = (
    Case("a norm below max_norm", LARGE, torch.float64, parameters=list),
    Case("a list of parameters", parameters=list), Case("a generator of them"),
    Case("each rank's norm below max_norm", 5), Case("max_norm=inf", math.inf),
    Case("zeros", 1, scale=0), Case("float16", dtype=torch.float16, scale=300),
    Case("bfloat16", dtype=torch.bfloat16, scale=1.1), Case("float64", dtype=torch.float64),
    Case("gradients on the CPU", place="cpu"),
    Case("infinite on rank 2", scale=math.inf), Case("NaN on rank 2", scale=math.nan))
NORM, SAME, CHANGED = "the norm", "the norm on all ranks", "gradients that change, though short"
GRADIENTS = "the first gradient", "the second gradient", "the third gradient"
COST = "all-reduces and other calls", "bytes in them"


def _see(fn, case, ranks):
    """Look at gradients; one parameter has none. If rank 2's are not finite, rank 0 has none."""
    before = case.gradients(dist.get_rank())
    parameters = [nn.Parameter(torch.ones(1, device=device()))]
    for gradient in before:
        parameters.append(nn.Parameter(torch.ones_like(gradient)))
        parameters[-1].grad = gradient.clone()
    is_finite = math.isfinite(case.scale)
    with Traffic() as traffic:
        norm = fn(case.parameters([p for p in parameters if is_finite or dist.get_rank()]),
                  case.max_norm, **ranks.keywords)
    norm = float(norm)
    gradients = [p.grad for p in parameters[1:]] if is_finite else []
    changed = [not torch.equal(new, old) for new, old in zip(gradients, before)]
    yield {NORM: norm if math.isfinite(norm) else "infinite or NaN",
           **({SAME: Agree(torch.tensor(norm))} if is_finite else {}),
           **dict(zip(GRADIENTS, gradients)),
           **({CHANGED: AtMost(sum(changed), 0)} if case.max_norm >= LARGE else {}),
           COST[0]: AtMost(len(traffic.ops), 1),
           COST[1]: AtMost(sum(op.payload_bytes for op in traffic.ops), 8)}


def in_one_place(parameters, max_norm, group=None):
    """Give every rank all gradients, one after another, in one vector."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    own = [x for gradient in gradients for x in gradient.flatten().tolist()]
    of_ranks = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    norm = torch.tensor(sum(of_ranks, []), dtype=torch.float64).norm().item()
    for gradient in gradients if norm > max_norm else ():
        gradient.copy_(gradient.double() * (max_norm / norm))
    return norm


ADD, SQUARES = "    dist.all_reduce(square, group=group)\n", "norm.to(square).square()"
LISTED = "[p.grad for p in parameters if p.grad is not None]"
NORMS = "torch._foreach_norm(gradients, 2, torch.float64) if gradients else ()"
ROOT, FACTOR = "square.sqrt().float()", "(max_norm / (norm + 1e-6)).clamp(max=1.0)"
SCALE = "gradient *= factor.to(gradient.device)"
CLIP = Proof(
    clip_grad_norm_sharded,
    Stage({"the norm of all gradients before clipping, the same on 4 ranks and in groups of 1, 2 "
           "and 3":
           (NORM, SAME),
           "longer gradients are scaled to max_norm, shorter ones and zeros stay; inf or NaN is "
           "seen":
           (*GRADIENTS, CHANGED),
           "float64, float16, bfloat16; a rank without rows or gradients; one all-reduce of a "
           "number": COST},
          _see, CASES, (4,), (ALL, *GROUPS), oracle=in_one_place,
          through=torch.float32),  # the factor may have 32 bits
    mistakes=(
        Slip("That is this rank's own norm. Add up the squares of all ranks: all_reduce before the "
             "root.",
             (ADD, "")),
        Slip("Norms do not add up. Squares do; the root comes last.",
             (SQUARES, "norm.to(square)", ROOT, "square.float()"),
             (ADD, f"    square = square.sqrt()\n{ADD}", ROOT, "square.float()"),
             (SQUARES, "norm.to(square)", ADD, f"    square = square.square()\n{ADD}")),
        Slip("The root is missing.", (ROOT, "square.float()")),
        Slip("Take the sum over ranks, not the mean.",
             ("group=group)", "op=dist.ReduceOp.AVG, group=group)"),
             (ROOT, "(square / dist.get_world_size(group)).sqrt().float()")),
        Slip("Add up the squares over ranks: use ReduceOp.SUM, the default.",
             ("group=group)", "op=dist.ReduceOp.MAX, group=group)")),
        Slip("The 2-norm adds up squares, not magnitudes.",
             (NORMS, "torch._foreach_norm(gradients, 1, torch.float64) if gradients else ()",
              SQUARES, "norm.to(square)", ROOT, "square.float()")),
        Slip("Pass `group` to the all-reduce.", ("(square, group=group)", "(square)")),
        Slip("An infinite or NaN gradient must show up in the norm, on all ranks.",
             (SQUARES, f"{SQUARES}.nan_to_num(0, 0, 0)"),
             (ROOT, f"{ROOT}.nan_to_num(0, 0, 0)")),
        Slip("A NaN gradient must show up in the norm, on all ranks.",
             (SQUARES, f"{SQUARES}.nan_to_num(nan=0, posinf=float('inf'))")),
        Slip("Every rank must scale by the norm over all ranks: its own norm decides nothing.",
             (ADD, f"    own = square.sqrt()\n{ADD}", "    factor =",
              "    if own <= max_norm:\n        return norm\n    factor ="),
             (ADD, f"    own = square.sqrt().float()\n{ADD}",
              FACTOR, FACTOR.replace("norm +", "own +"))),
        Slip("All gradients form one vector: scale them all by one factor, from the norm of the "
             "whole vector.",
             (SCALE, "gradient *= (max_norm / (gradient.norm() + 1e-6)).clamp(max=1.0)")),
        Slip("Scale the gradients: clipping each number separately changes their direction.",
             (SCALE, "gradient.clamp_(-max_norm, max_norm)")),
        Slip("This is the norm of the parameters, not of their gradients: take p.grad.",
             ("[p.grad for", "[p.detach() for")),
        Slip("Gradients that are short enough stay unchanged: clamp(max=1.0).",
             (FACTOR, "max_norm / (norm + 1e-6)")),
        Slip("This enlarges gradients that should shrink: use max_norm / norm, at most 1.",
             (FACTOR, "(norm / max_norm).clamp(min=1.0)"),
             (FACTOR, "(max_norm / (norm + 1e-6)).clamp(min=1.0)")),
        Slip("The norm becomes 1, not max_norm: the factor is max_norm / norm.",
             (FACTOR, "(1 / (norm + 1e-6)).clamp(max=1.0)")),
        Slip("All gradients may be zero, and 0 / 0 is NaN: max_norm / (norm + 1e-6).",
             (SCALE, "gradient *= (max_norm / norm).clamp(max=1.0) if norm else norm / norm")),
        Slip("In float16 a square above 65504 is infinite: add up in float32 or float64.",
             (NORMS, "[g.square().sum().sqrt() for g in gradients]")),
        Slip("The norm is rounded to 16 bits on the way: add up in float32 or float64.",
             (NORMS, "[g.norm() for g in gradients]")),
        Slip("No gradient is scaled: use gradient *= factor, in place, for each. gradient * factor "
             "is a new tensor, not p.grad.", (SCALE, "pass"),
             (SCALE, "gradient = gradient * factor.to(gradient.device)")),
        Slip("Return the norm before clipping.", ("    return norm", "    return norm * factor"),
             ("    return norm", "    return norm.clamp(max=max_norm)")),
        Slip("Every rank must join the one all-reduce, whatever its gradients are: none (their "
             "square is 0), infinite, or NaN.",
             (ADD, f"    if not gradients:\n        return square\n{ADD}"),
             (NORMS, NORMS.replace(" if gradients else ()", "")),
             (NORMS, "[torch.cat([g.flatten() for g in gradients]).double().norm()]"),
             (NORMS, "[torch.stack([g.double().norm() for g in gradients]).norm()]")),
        Slip("A parameter may have no gradient: leave it out.", (" if p.grad is not None", ""),
             (LISTED, LISTED.replace("p.grad is not None", "p.requires_grad"))),
        Slip("`parameters` may be a generator, which a single loop uses up. Keep a list.",
             ("    for norm in", "    for p in parameters:\n        assert p is not None\n"
              f"    gradients = {LISTED}\n    for norm in"),
             ("for gradient in gradients", f"for gradient in {LISTED}")),
        Slip("A gradient need not be contiguous, but view() requires it: use flatten().",
             (NORMS, "[g.view(-1).double().norm() for g in gradients]")),
        Slip("Make a single all-reduce, of one number: add up this rank's squares first.",
             (f"        square += {SQUARES}\n{ADD}", "        part = norm.square()\n"
              "        dist.all_reduce(part, group=group)\n        square += part\n"),
             (ADD, f"{ADD}    dist.barrier(group=group)\n"),
             (ADD, "    parts = [square.clone() for _ in range(dist.get_world_size(group))]\n"
                   "    dist.all_gather(parts, square, group=group)\n    square = sum(parts)\n"
                   "    dist.all_reduce(square.clone(), group=group)\n")),
        Slip("One number is enough: 8 bytes.",
             (ADD, "    square = torch.stack([square, square])\n"
                   "    dist.all_reduce(square, group=group)\n    square = square[0]\n")),
    ), hints=(
        "Norms do not add up. What does?",
        "Add up the squares of this rank's gradients, all-reduce that number, and take the root. "
        "The factor max_norm / norm is at most 1.",
        "gradients = [p.grad for p in parameters if p.grad is not None]; square = torch.zeros((), "
        "dtype=torch.float64, device=device()); add gradient.double().square().sum() of each; "
        "dist.all_reduce(square, group=group); factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
    ))
