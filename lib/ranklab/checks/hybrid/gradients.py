"""The checks of tied_embedding_sync and mesh_grad_norm: gradients of one step, on real ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import LEFT, MISMATCH, hinted
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.trial import (
    explain, group_of_mine, members_of, on_ranks, rank_name,
)
from ranklab.engine import device
from ranklab.meter import Traffic

ALL = tuple(range(4))
PAIR = ("Only the two ranks that hold a copy send and receive, one message each way. Begin both "
        "(dist.batch_isend_irecv), and wait for both: if both send first, both wait.")
GROUP = "`other` counts in the group: group_dst=other, group_src=other, or group_peer=other."
OWN = ("Send the gradient that backward has left, and receive into another tensor; add when both "
       "are here, and leave the sum in parameter.grad.")
TIED_FAILURES = {
    ".*never waited for": PAIR, "ValueError: .* part of group .*": GROUP,
    "RuntimeError: input tensor has to be contiguous":
        "A gradient may have any strides: send grad.contiguous().",
    "RuntimeError: .*grad_dtype.*": "The sum has the type of the gradients.",
    "hang: .*": f"{PAIR} {GROUP}", MISMATCH: f"{PAIR} {GROUP}",
    "(Type|Attribute)Error: .*'NoneType'.*": "On a rank without copies `other` is "
    "None: nothing is sent there."}
SQUARES = "Square, add up over all ranks, and take the root last: total.sqrt().float()."
COPIES = "What `copies` ranks hold is added up as often: divide its square by copies."
DOUBLE = ("In float32 the squares of 1e30 and of 1e-30 are infinite and 0, and bf16 has 8 bits: "
          "gradient.double() first.")
HINTS = {"plain": SQUARES, "zeros": "The norm of zeros is 0: divide by nothing that may be 0."}
CASES = "plain", "bf16", "large", "small", "zeros", "inf", "nan"
NORM_FAILURES = {LEFT: "Every rank calls one all-reduce, also one that holds nothing, in "
                                 "its `group`.",
                 "AttributeError: 'int' object .*|TypeError: Invalid function .* <class 'int'> .*":
                     "Begin with torch.zeros((), dtype=torch.float64, device=device())."}


def _groups():
    """[(the ranks of a group that this one is in, the group)]"""
    return [(ALL, None), (members_of(dist.get_rank()), group_of_mine())]


def _numbers(*seed):
    """(3, 4), not contiguous."""
    generator = torch.Generator().manual_seed(sum(n * 100**i for i, n in enumerate(seed)))
    return torch.randn(4, 3, generator=generator).T


def _at_end(rank, i):
    """The gradient of copy i; that of the second one is bf16."""
    return _numbers(rank, i).bfloat16() if i == 1 else _numbers(rank, i)


def _tied_trial(sync):
    """[(gradients after it, bytes sent, names of what is called)]"""
    seen = []
    for members, group in _groups():
        rank, ends = dist.get_rank(), members[:: max(1, len(members) - 1)]
        copies = []
        for i in range(3 * (rank in ends and len(ends) == 2)):
            gradient = _at_end(rank, i).to(device())
            copies.append(nn.Parameter(torch.zeros_like(gradient)))
            copies[i].grad = gradient
        other = len(members) - 1 - members.index(rank) if copies else None
        with Waits() as waits, Traffic() as traffic:
            sync(copies, other, group)
        all_awaited(waits.missing(len(traffic.ops)), "the sum")  # else what follows may hang
        seen.append(([p.grad for p in copies], traffic.sent_bytes,
                     [op.name for op in traffic.ops]))
    return seen


def check_tied_embedding_sync(sync):
    with hinted(TIED_FAILURES):
        seen = on_ranks(_tied_trial, sync, ranks=4)
    for case, ends in enumerate(((0, 3), (1, 3))):
        for rank, of_rank in enumerate(seen):
            where = f"{rank_name(rank, 4)}{', in a group of 3' * case}"
            _look_at_end(where, rank, ends[rank == ends[0]], *of_rank[case])
        if not all(map(torch.equal, *(seen[end][case][0] for end in ends))):
            raise Mistake(f"ranks {ends} have different bits", "Both must add the same two numbers,"
                          " in one precision, or the weights drift apart.")
        if not case:
            yield "both ends have the sum of both gradients, in their types, with the same bits"
            yield "each end sends its own gradients once, and waits; the other ranks send nothing"
    yield "in a group of some ranks, too, where `other` counts in the group"


def _look_at_end(where, rank, other, gradients, sent, names):
    for i, got in enumerate(gradients):
        mine, theirs = _at_end(rank, i), _at_end(other, i)
        explain(f"{where}: gradient {i} of the copies", got, mine + theirs, {
            "the mean": ((mine + theirs) / 2, "Each end has a part of one gradient: add, no mean."),
            "its own as it was": (mine, OWN), "that of the other end": (theirs, OWN)}, OWN)
    nbytes, messages = sum(gradient.nbytes for gradient in gradients), names.count("send")
    if others := set(names) - {"send", "recv"}:
        raise Mistake(f"{where} calls {', '.join(sorted(others))}", "No other rank needs to "
                      f"wait. {PAIR}")
    if sent > nbytes or messages > len(gradients):
        raise Mistake(f"{where} sends {messages} messages of {sent} bytes in all, not "
                      f"{len(gradients)} of {nbytes}", PAIR)


# --- mesh_grad_norm -------------------------------------------------------------------------------

def _holders(members):
    """Which ranks hold each gradient: all but the last, two, one; the last has nothing."""
    most = members[:-1] or members
    return [most, most[:2], *((rank,) for rank in most)]


def _shared(case, holders):
    """The gradient that they all hold; in two cases rank 2 has one that is not finite."""
    x = _numbers(*holders) * {"large": 1e30, "small": 1e-30, "zeros": 0}.get(case, 1)
    if holders == (2,) and case in ("inf", "nan"):
        x[1, 1] = float(case)
    return x.bfloat16() if case == "bf16" else x


def _norm_trial(norm):
    """[(the value, whether a gradient is changed, the bytes of each message)]"""
    seen = []
    for case, (members, group) in ((case, each) for each in _groups() for case in CASES):
        held = [(_shared(case, of).to(device()), len(of)) for of in _holders(members)
                if dist.get_rank() in of]
        before = [gradient.clone() for gradient, _ in held]
        with Traffic() as traffic:
            value = norm(list(held), group)
        kept = [a.allclose(b, 0, 0, equal_nan=True) for a, (b, _) in zip(before, held)]
        seen.append((value, not all(kept), [op.payload_bytes for op in traffic.ops]))
    return seen


def check_mesh_grad_norm(norm):
    with hinted(NORM_FAILURES):
        seen = on_ranks(_norm_trial, norm, ranks=4)
    for i, case in enumerate(CASES * 2):
        for rank, (value, is_changed, messages) in enumerate(of[i] for of in seen):
            members = ALL if i < len(CASES) else members_of(rank)
            where = f"{case}, {rank_name(rank, 4)} in the group {members}"
            _look_at_norm(where, case, value, rank, members)
            if is_changed:
                raise Mistake(f"{where}: a gradient is changed", "The optimizer still needs it.")
            if len(messages) > 1 or sum(messages) > 8:
                raise Mistake(f"{where}: messages of {messages} bytes, not one of 8",
                              "Add up here first; one float64 travels.")
    yield "each number once, whoever holds it, by one message of 8 bytes; inside its group"
    yield "bf16, 1e30 and 1e-30, too; inf or NaN of one rank is seen by all"


def _look_at_norm(where, case, value, rank, members):
    if not isinstance(value, torch.Tensor):
        raise Mistake(f"{where}: a {type(value).__name__}, no tensor", SQUARES)
    squares = [(_shared(case, of).double().square().sum(), of) for of in _holders(members)]
    right = sum(square for square, _ in squares)
    if math.isfinite(right):
        slips = {"the root of all squares": (sum(s * len(of) for s, of in squares), COPIES),
                 "with copies as factors": (sum(s * len(of)**2 for s, of in squares), COPIES),
                 "that of this rank alone": (
                     sum(s / len(of) for s, of in squares if rank in of), SQUARES)}
        explain(f"{where}: the norm", value, right.sqrt().float(), {
            name: (torch.as_tensor(wrong).sqrt().float(), hint)
            for name, (wrong, hint) in slips.items()}, HINTS.get(case, DOUBLE))
    elif math.isfinite(value):
        raise Mistake(f"{where}: {value.item():.6g}, where one rank has an {case}", "Then no "
                      "rank's norm is finite: all must skip the step, or none.")
