"""The checks of tied_embedding_sync and mesh_grad_norm: gradients of one step, on real ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.trial import (
    explain, group_of_mine, hinted, is_near, members_of, on_ranks, rank_name,
)
from ranklab.engine import device
from ranklab.meter import Traffic

PAIR = ("Only the two ranks that hold a copy send and receive, one message each way. Begin both "
        "(dist.batch_isend_irecv), then wait: two ranks that send first wait for each other.")
GROUP = "`other` counts in the group: group_dst=other, group_src=other, or group_peer=other."
OWN = ("Send the gradient that backward has left, and receive into another tensor; add when both "
       "are here, and leave the sum in parameter.grad.")
DTYPES = torch.float32, torch.bfloat16, torch.float32  # of the copies
SQUARES = "The norm of the whole is the root of a sum of squares, over all ranks; the root is last."
COPIES = "What `copies` ranks hold is added up as often: divide its square by copies."
DOUBLE = ("Squares of float32 or bf16 numbers are too large, too small or too rough for their own "
          "type: gradient.double() first.")


def _gradient(rank, i):
    """Of the copy number i; the second one is not contiguous."""
    made = torch.randn(4, 3 + i, generator=torch.Generator().manual_seed(10 * rank + i))
    return made.to(device(), DTYPES[i]).T if i == 1 else made.to(device(), DTYPES[i])


def _tied_trial(sync):
    """[(gradients after it, bytes sent, messages sent, handles not waited for)]"""
    seen = []
    for members, group in ((range(4), None), (members_of(dist.get_rank()), group_of_mine())):
        rank, ends = dist.get_rank(), (members[0], members[-1])
        place, is_end = members.index(rank), len(members) > 1 and rank in ends
        copies = []
        for i in range(3 * is_end):
            copies.append(nn.Parameter(torch.zeros_like(_gradient(rank, i))))
            copies[i].grad = _gradient(rank, i)
        with Waits() as waits, Traffic() as traffic:
            sync(copies, len(members) - 1 - place if is_end else None, group)
        seen.append(([p.grad.cpu() for p in copies], traffic.sent_bytes, traffic.sent_messages,
                     waits.missing(len(traffic.ops))))
    return seen


def check_tied_embedding_sync(sync):
    hints = {"does not end": f"{PAIR} {GROUP}", "killed": f"{PAIR} {GROUP}", "roup": GROUP,
             "contiguous": "A gradient may have any strides: send grad.contiguous().", "ank": GROUP}
    with hinted(hints):
        seen = on_ranks(_tied_trial, sync, ranks=4)
    for case, (first, last) in enumerate(((0, 3), (1, 3))):
        name = "a group of ranks 1, 2, 3: " if case else ""
        for rank, (gradients, *costs) in enumerate(of_rank[case] for of_rank in seen):
            _look_at_end(f"{name}{rank_name(rank, 4)}", rank, (first, last), gradients, *costs)
        if any(not torch.equal(*pair) for pair in zip(seen[first][case][0], seen[last][case][0])):
            raise Mistake(f"{name}the two ranks have different bits", "Both must add the same two "
                          "numbers, in one precision, or the weights drift apart.")
        if not case:
            yield "both ends have the sum of both gradients, in their types, with the same bits"
            yield "each end sends its own gradients once, and waits; the other ranks send nothing"
    yield "in a group of some ranks, too, where `other` counts in the group"


def _look_at_end(where, rank, ends, gradients, sent, messages, missing):
    pairs = [[_gradient(end, i).cpu() for end in ends] for i in range(len(gradients))]
    for i, (got, (a, b)) in enumerate(zip(gradients, pairs)):
        explain(f"{where}: gradient {i} of the copies", got, a + b, {
            "the mean": ((a + b) / 2, "Each end has a part of one gradient: add, no mean."),
            "its own as it was": (a if rank == ends[0] else b, OWN),
            "that of the other end": (b if rank == ends[0] else a, OWN),
            "its own, and twice that of the other end": ((a + b) + (b, a)[rank == ends[1]], OWN),
            "twice its own, and that of the other end": ((a + b) + (a, b)[rank == ends[1]], OWN),
        }, OWN)
    all_awaited(missing, where)
    nbytes = sum(a.nbytes for a, _ in pairs)
    if sent > nbytes or messages > len(pairs):
        raise Mistake(f"{where} sends {messages} messages of {sent} bytes in all, not {len(pairs)} "
                      f"of {nbytes}", PAIR)


# --- mesh_grad_norm -------------------------------------------------------------------------------

def _held(case, rank, members):
    """[(gradient, copies)] of one of `members`: one that all have, one that the first two have,
    one of its own; the last rank has nothing. And the squared norm of what nobody else has counted.
    """
    if len(members) > 1 and rank == members[-1]:
        return [], 0.0
    scale = {"large": 1e30, "small": 1e-30}.get(case, 1)
    holders = list(members[:-1] or members)
    found, squares = [], 0.0
    for those in (holders, holders[:2], [rank]):
        if rank in those:
            seed = torch.Generator().manual_seed(100 * those[0] + len(those))
            x = torch.randn(5, 3, generator=seed) * scale
            if case in ("inf", "nan") and those == [holders[-1]]:
                x[1, 1] = float(case)
            x = (x.bfloat16() if case == "bf16" else x).to(device()).T
            found.append((x, len(those)))
            squares += x.double().square().sum().item() * (rank == those[0])
    return found, squares


CASES = "plain", "bf16", "large", "small", "inf", "nan"


def _norm_trial(norm):
    """[(the value, what is wrong besides, messages, bytes of them)]"""
    seen = []
    groups = [(tuple(range(4)), None), (members_of(dist.get_rank()), group_of_mine())]
    for case, (members, group) in ((case, each) for each in groups for case in CASES):
        held, _ = _held(case, dist.get_rank(), members)
        before = [gradient.clone() for gradient, _ in held]
        with Traffic() as traffic:
            value = norm(list(held), group)
        is_changed = any(not torch.equal(a.nan_to_num(), b.nan_to_num())
                         for a, (b, _) in zip(before, held))
        seen.append((value, is_changed, len(traffic.ops),
                     sum(op.payload_bytes for op in traffic.ops)))
    return seen


def check_mesh_grad_norm(norm):
    with hinted({"does not end": "Every rank calls one all-reduce, also one that holds nothing; "
                                 "hand `group` on.", "'int' object": "Begin with torch.zeros((), "
                 "dtype=torch.float64, device=device()): a rank may hold nothing."}):
        seen = on_ranks(_norm_trial, norm, ranks=4)
    for i, case in enumerate(CASES * 2):
        for rank, (value, is_changed, messages, nbytes) in enumerate(of[i] for of in seen):
            members = range(4) if i < len(CASES) else members_of(rank)
            where = f"{case}, {rank_name(rank, 4)}" + f" in {members}" * (i >= len(CASES))
            _look_at_norm(where, case, value, rank, members)
            if is_changed:
                raise Mistake(f"{where}: a gradient is changed", "The optimizer still needs it.")
            if messages > 1 or nbytes > 8:
                raise Mistake(f"{where}: {messages} messages of {nbytes} bytes, not 1 of 8",
                              "Add up here first; one float64 travels.")
        if i == len(CASES) - 1:
            yield "each number once, whoever holds it, by one message of 8 bytes"
            yield "bf16, 1e30 and 1e-30, too; inf or NaN of one rank is seen by all"
    yield "inside a group it meets nobody else"


def _look_at_norm(where, case, value, rank, members):
    by_rank = [_held(case, member, members) for member in members]
    if not isinstance(value, torch.Tensor):
        raise Mistake(f"{where}: a {type(value).__name__}, no tensor", "A number would make every "
                      "rank wait for its GPU: total.sqrt().float() stays there.")
    if case in ("inf", "nan"):
        if math.isfinite(value):
            raise Mistake(f"{where}: {value.item():.6g}, where one rank has an {case}", "Then no "
                          "rank's norm is finite: all must skip the step, or none.")
        return
    own = [[(g.double().square().sum().item(), copies) for g, copies in held]
           for held, _ in by_rank]
    mine = sum(square / copies for square, copies in own[list(members).index(rank)])
    right = sum(squares for _, squares in by_rank)
    parts = [sum(square / copies for square, copies in one) for one in own]
    slips = {
        "the root of the sum of all squares": (sum(s for one in own for s, _ in one), COPIES),
        "with copies as factors": (sum(s * copies for one in own for s, copies in one), COPIES),
        "with norms divided by copies": (sum(s / c**2 for one in own for s, c in one), COPIES),
        "that of this rank alone": (mine, SQUARES),
        "the sum of the ranks' norms": (sum(part**0.5 for part in parts)**2, SQUARES),
        "the mean over ranks": (right / len(members), "dist.ReduceOp.SUM, the default."),
        "the square of the norm": (right**2, SQUARES),
        "the sum of the norms": (sum(s**0.5 / c for one in own for s, c in one)**2, SQUARES),
    }
    def as_tensor(squares):
        return torch.tensor(squares**0.5, dtype=torch.float32)

    if not is_near(value.cpu(), as_tensor(right)):
        explain(f"{where}: the norm", value.cpu(), as_tensor(right), {
            name: (as_tensor(squares), hint) for name, (squares, hint) in slips.items()},
            DOUBLE if case != "plain" else f"{SQUARES} {COPIES}")
