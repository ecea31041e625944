"""The check of mesh_grad_norm: the norm of gradients, some of which several ranks hold."""

import math

import torch
import torch.distributed as dist

from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.mesh import mesh_grad_norm
from ranklab.meter import Traffic

FACTORS = {"float32": 1, "bfloat16": 1.37, "float64": 1 + 2.0**-26, "numbers near 1e30": 1e30,
           "numbers near 1e-30": 1e-30, "zeros": 0, "one is inf": 1, "one is nan": 1}
NORM, FINITE = "the norm", "whether the norm is finite"
CALLS, BYTES = "calls of collectives", "the number of bytes that travel"


def _holders(members):
    """Return the ranks that hold each gradient: all but the last, two, or one; the last has none.
    """
    most = members[:-1] or members
    return [most, most[:2], *((rank,) for rank in most)]


def _gradient(case, holders):
    """Return the gradient, not contiguous, that all these ranks hold."""
    numbers = (torch.arange(12) * (5 + sum(holders)) + 3 * len(holders)) % 13 - 6
    x = numbers.double().view(4, 3).t() * FACTORS[case]
    if holders == (2,) and case.startswith("one is"):
        x[1, 1] = float(case.split()[-1])
    return x.to(device(), getattr(torch, case) if case.endswith(("16", "64")) else torch.float32)


def _see(fn, case, ranks):
    holders = [each for each in _holders(ranks.members) if dist.get_rank() in each]
    gradients = [(_gradient(case, each), len(each)) for each in holders]
    with Traffic() as traffic:
        norm = fn([*gradients], ranks.group)
    has_number = case.startswith("one is") and (2,) in _holders(ranks.members)
    yield {**({FINITE: Must(bool(torch.isfinite(torch.as_tensor(norm))), False),
               "its type": Must(_type_of(norm), "torch.float32")} if has_number else {NORM: norm}),
           CALLS: AtMost(len(traffic.ops), 1),
           BYTES: AtMost(sum(op.payload_bytes for op in traffic.ops), 8),
           **{f"gradient {i} afterwards": x for i, (x, _) in enumerate(gradients)}}


def _type_of(norm):
    return str(norm.dtype) if isinstance(norm, torch.Tensor) else type(norm).__name__


def by_hypot(held, group=None):
    """Gather all numbers on every rank, and take their math.hypot.

    math.hypot neither overflows nor loses the small ones.
    """
    of_rank = [number / math.sqrt(copies) for gradient, copies in held
               for number in gradient.double().flatten().tolist()]
    of_all = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, of_rank, group=group)
    return torch.tensor(math.hypot(*sum(of_all, [])), device=device())


def gathered_for_each_rank(held, group=None):
    total = torch.zeros(2, dtype=torch.float64, device=device())
    for gradient, copies in held:
        total[0] += gradient.double().square().sum() / copies
        total[1] += gradient.numel()
    dist.all_reduce(total, group=group)
    return total[0].sqrt().float()


BEGIN = "total = torch.zeros((), dtype=torch.float64, device=device())"
SQUARE = "gradient.double().square().sum() / copies"
REDUCE, RETURN = "    dist.all_reduce(total, group=group)\n", "return total.sqrt().float()"
MESH_NORM = Proof(
    mesh_grad_norm,
    Stage({"each number counts once, by one message of 8 bytes inside its group": (),
           "also for bf16, 1e30 and 1e-30; all ranks see inf or NaN of one rank": (FINITE,)},
          _see, tuple(FACTORS), (4,), (ALL, *GROUPS), oracle=by_hypot),
    mistakes=(
        Slip("A gradient held by `copies` ranks is counted `copies` times: divide its square by "
             "copies.", (" / copies", ""), (" / copies", " * copies")),
        Slip("Divide the square by copies, not the gradient itself: copies must not be squared.",
             (SQUARE, "(gradient.double() / copies).square().sum()"),
             (SQUARE, "(gradient.double().norm() / copies)**2")),
        Slip("This is the norm of this rank's own gradients: add up the squares of all ranks.",
             (REDUCE, "")),
        Slip("Norms do not add up, but squares do: sum the squares over all ranks, and take the "
             "root last.",
             (REDUCE, f"    total = total.sqrt()\n{REDUCE}", RETURN, "return total.float()"),
             (SQUARE, "gradient.double().norm() / copies", RETURN, "return total.float()")),
        Slip("Take the root: total.sqrt().", (RETURN, "return total.float()")),
        Slip("Use the sum, not the mean: ReduceOp.SUM, the default.",
             ("group=group", "op=dist.ReduceOp.AVG, group=group"),
             (REDUCE, f"{REDUCE}    total /= dist.get_world_size(group)\n")),
        Slip("Use the sum, not the maximum: ReduceOp.SUM, the default.",
             ("group=group", "op=dist.ReduceOp.MAX, group=group")),
        Slip("bf16 has only 8 bits of precision, and in float32 the squares of 1e30 and 1e-30 are "
             "inf and 0: call gradient.double() first.",
             (SQUARE, "gradient.square().sum().double() / copies")),
        Slip("In float32 the squares of 1e30 and 1e-30 are inf and 0: call gradient.double(), add "
             "up in float64, and all-reduce one float64.",
             (SQUARE, "gradient.float().square().sum().double() / copies"),
             ("dtype=torch.float64", "dtype=torch.float32"),
             (REDUCE, f"    total = total.float()\n{REDUCE}")),
        Slip("The norm of zeros is 0. Don't divide by a number that can be 0.",
             (SQUARE, "(gradient.double() / gradient.abs().max()).square().sum() * "
                      "gradient.abs().max().double()**2 / copies")),
        Slip("An inf or NaN must reach all ranks, so that either all of them skip the step or none "
             "does.",
             (REDUCE, f"    total = total.nan_to_num(0, 0, 0)\n{REDUCE}"),
             (SQUARE, "gradient.double().nan_to_num(0, 0, 0).square().sum() / copies")),
        Slip("The norm is a float32 tensor: call .float().", (RETURN, "return total.sqrt()")),
        Slip("Return a tensor, so that nothing waits for the GPU: leave out item().",
             (RETURN, "return total.sqrt().item()")),
        Slip("Return a tensor without dims.", (RETURN, "return total.sqrt().float().view(1)"),
             ("torch.zeros(()", "torch.zeros(1")),
        Slip("The optimizer still needs the gradients: square() makes a new tensor, but mul_ and "
             "square_ change them in place.",
             (SQUARE, "gradient.mul_(1.0).div_(2).double().square().sum() * 4 / copies"),
             (SQUARE, "gradient.square_().double().sum() / copies")),
        Slip("Add up on this rank first, then make a single all-reduce of one number.",
             (REDUCE, f"{REDUCE}    dist.barrier(group=group)\n"),
             (REDUCE, "    parts = [torch.empty_like(total) for _ in range(dist.get_world_size("
              "group))]\n    dist.all_gather(parts, total, group=group)\n"
              "    total = sum(parts)\n")),
        Slip("One number is enough: the sum of squares.", gathered_for_each_rank),
        Slip("Pass `group` on: dist.all_reduce(total, group=group).", (", group=group)", ")")),
        Slip("Every rank must call exactly one all-reduce in its `group`, even a rank that holds "
             "nothing.",
             (BEGIN, f"if not held:\n        return torch.zeros(())\n    {BEGIN}"),
             (REDUCE, "", f"        total += {SQUARE}\n",
              f"        total += {SQUARE}\n        dist.all_reduce(total, group=group)\n")),
        Slip("Start from torch.zeros((), dtype=torch.float64, device=device()): a rank that holds "
             "nothing has no gradient to start from.",
             (BEGIN, "total = 0")),
    ), hints=(
        "If all ranks add up the squares of all the numbers they hold, how many times is each "
        "number counted?",
        "Divide each sum of squares by its copies, add them up on this rank, then over all ranks, "
        "and take the root.",
        "total += gradient.double().square().sum() / copies; dist.all_reduce(total, group=group)",
    ))
