"""The checks of tied_embedding_sync and mesh_grad_norm: gradients of one step, on real ranks."""

import math
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.trial import explain
from ranklab.engine import device
from ranklab.meter import Traffic

PAIR = ("Only the two ranks that hold a copy send and receive, one message each way. Start both "
        "(dist.batch_isend_irecv), and wait for both: if both send first, both wait.")
GROUP = "`other` counts in the group: group_dst=other, group_src=other, or group_peer=other."
OWN = ("Send the gradient that backward has left, and receive into another tensor. Add when both "
       "are here, and put the sum into parameter.grad.")
TIED_FAILURES = {
    ".*never waited for": PAIR, "ValueError: .* part of group .*": GROUP,
    "RuntimeError: input tensor has to be contiguous":
        "A gradient may have any strides: send grad.contiguous().",
    "RuntimeError: .*grad_dtype.*": "The sum has the type of the gradients.",
    "hang: .*": f"{PAIR} {GROUP}", MISMATCH: f"{PAIR} {GROUP}",
    "(Type|Attribute)Error: .*'NoneType'.*":
        "On a rank without copies `other` is None: nothing is sent there.",
}
SQUARES = "Square, add up over all ranks, and take the root last: total.sqrt().float()."
COPIES = "A gradient on `copies` ranks is added up `copies` times: divide its square by copies."
DOUBLE = ("In float32 the squares of 1e30 and 1e-30 are inf and 0, and bf16 has only 8 bits of "
          "precision: call gradient.double() first.")
HINTS = {"plain": SQUARES, "zeros": "The norm of zeros is 0. Don't divide by a number that may be "
                                    "0."}
CASES = "plain", "bf16", "large", "small", "zeros", "inf", "nan"
NORM_FAILURES = {
    LEFT: "Every rank calls one all-reduce in its `group`, also one that holds nothing.",
    "AttributeError: 'int' object .*|TypeError: Invalid function .* <class 'int'> .*":
        "Begin with torch.zeros((), dtype=torch.float64, device=device()).",
}


def _numbers(*seed):
    """(3, 4), not contiguous."""
    generator = torch.Generator().manual_seed(sum(n * 100**i for i, n in enumerate(seed)))
    return torch.randn(4, 3, generator=generator).T


# --- tied_embedding_sync --------------------------------------------------------------------------

def _at_end(rank, turn):
    """{name: gradient of a copy}; the second is bf16."""
    found = {f"gradient {i} of the copies": _numbers(rank, i, turn) for i in range(3)}
    return found | {"gradient 1 of the copies": _numbers(rank, 1, turn).bfloat16()}


def _tied(sync, ranks):
    rank, ends, seen = dist.get_rank(), ranks.members[:: max(1, ranks.size - 1)], []
    has_copies = rank in ends and len(ends) == 2
    other = ends[rank == ends[0]] if has_copies else None

    def own(turn):
        return _at_end(rank, turn) if has_copies else {}

    def call(turn):
        copies = {}
        for name, gradient in own(turn).items():
            copies[name] = nn.Parameter(torch.zeros_like(gradient, device=device()))
            copies[name].grad = gradient.to(device())
        with Traffic() as traffic, Waits() as waits:
            sync([*copies.values()], ranks.members.index(other) if has_copies else None,
                 ranks.group)
        all_awaited(waits.missing(len(traffic.ops)), "the sum")  # else what follows may hang
        seen.append(traffic)
        return {name: parameter.grad for name, parameter in copies.items()}

    def right(turn):
        """The sums, which both ends have; a rank without copies has none."""
        return {name: [mine + _at_end(other, turn)[name]] * ranks.size
                for name, mine in own(turn).items()}

    def slips(name, turn):
        return {"the mean": (right(turn)[name][0] / 2,
                             "Each end has a part of one gradient: add, no mean."),
                "its own as it was": (own(turn)[name], OWN),
                "that of the other end": (_at_end(other, turn)[name], OWN)}

    yield from beside(f"{ranks}", ranks, call, right, slips=slips, advice=lambda name: OWN)
    calls, sent, mine = seen[0].calls, seen[0].sent_bytes, own(0).values()
    nbytes = sum(gradient.nbytes for gradient in mine)
    yield partial(expect, sent <= nbytes and calls <= Counter(send=len(mine), recv=len(mine)),
                  f"{ranks} sends {calls['send']} messages of {sent} bytes in all, not {len(mine)} "
                  f"of {nbytes}; it calls {', '.join(calls)}", f"No other rank has to wait. {PAIR}")


def check_tied_embedding_sync(sync):
    on_groups(_tied, sync, failures=TIED_FAILURES, group_hint=GROUP)
    yield "both ends have the sum of both gradients, in any type and with any strides"
    yield "each end sends its own gradients once, and waits; the other ranks send nothing"
    yield "also in a group of some ranks, where `other` counts in the group"


# --- mesh_grad_norm -------------------------------------------------------------------------------

def _holders(members):
    """The ranks that hold each gradient: all but the last, two, or one; the last holds nothing."""
    most = members[:-1] or members
    return [most, most[:2], *((rank,) for rank in most)]


def _shared(case, holders):
    """The gradient that all these ranks hold; in two cases rank 2 has one that is not finite."""
    x = _numbers(*holders) * {"large": 1e30, "small": 1e-30, "zeros": 0}.get(case, 1)
    if holders == (2,) and case in ("inf", "nan"):
        x[1, 1] = float(case)
    return x.bfloat16() if case == "bf16" else x


def _norms(norm, ranks):
    for case in CASES:
        where, of_mine = f"{case}, {ranks}", [
            of for of in _holders(ranks.members) if dist.get_rank() in of]
        held = [(_shared(case, of).to(device()), len(of)) for of in of_mine]
        with Traffic() as traffic:
            value = norm(list(held), ranks.group)
        sent = [op.payload_bytes for op in traffic.ops]
        yield partial(_look_at_norm, where, case, value, ranks.members)
        yield partial(expect, all(x.cpu().allclose(_shared(case, of), 0, 0, equal_nan=True)
                                  for (x, _), of in zip(held, of_mine)),
                      f"{where}: a gradient is changed", "The optimizer still needs it.")
        yield partial(expect, len(sent) <= 1 and sum(sent) <= 8, f"{where}: messages of {sent} "
                      "bytes, not one of 8", "Add up here first, and send one float64.")


def check_mesh_grad_norm(norm):
    on_groups(_norms, norm, failures=NORM_FAILURES)
    yield "each number counts once, by one message of 8 bytes inside its group"
    yield "also for bf16, 1e30 and 1e-30; all ranks see inf or NaN of one rank"


def _look_at_norm(where, case, value, members):
    if not isinstance(value, torch.Tensor):
        raise Mistake(f"{where}: a {type(value).__name__}, not a tensor", SQUARES)
    squares = [(_shared(case, of).double().square().sum(), of) for of in _holders(members)]
    sums = {"right": (sum(s for s, _ in squares), ""),
            "the root of all squares": (sum(s * len(of) for s, of in squares), COPIES),
            "with copies as factors": (sum(s * len(of)**2 for s, of in squares), COPIES),
            "that of this rank alone": (torch.as_tensor(sum(
                s / len(of) for s, of in squares if dist.get_rank() in of)), SQUARES)}
    slips = {name: (total.sqrt().float(), hint) for name, (total, hint) in sums.items()}
    right, _ = slips.pop("right")
    if math.isfinite(right):
        return explain(f"{where}: the norm", value.cpu(), right, slips, HINTS.get(case, DOUBLE))
    expect(not math.isfinite(value), f"{where}: {value}, where one rank has an {case}",
           "Then no rank's norm may be finite: all must skip the step, or none.")
