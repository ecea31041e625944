"""What the ranks do in the checks of lab 02: cases, and what is seen of each.

Inputs are a function of the rank. So the judge, one process, makes them too and adds them up: it
needs no other collective as an oracle.
"""

import re
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hint_of
from ranklab.checks.handles import DROPPED, Waits, drops_handles
from ranklab.checks.library_guard import LibrarysAnswer
from ranklab.checks.trial import on_ranks
from ranklab.collectives import node_groups
from ranklab.engine import device
from ranklab.meter import Traffic

MARK = 128  # ranks are counted to its base: up to 127 times each, for 8 ranks in an int64
WORLD_SIZES = (2, 3, 8, 1)  # for plain cases, 1 last: it has a hint of its own
TYPES = ("float32", "bfloat16", "int64")
ALONE = "With one rank there is nobody to talk to: the loop must not run at all."
UNEVEN = ("R does not divide this length: chunks differ by one, and some may be empty. "
          "tensor_split cuts any length, x's and that of `out`.")
ONE_WAY = {"call_broadcast", "call_server", "call_root_in_group"}  # these need no `sendrecv`
FAILURES = {
    "RuntimeError: view size is not compatible .*": "Here x is not contiguous, and torch.empty_like"
    "(x) keeps its strides, so that view fails: x.new_empty(x.shape) is contiguous.",
    "(Runtime|Value)Error: .*be contiguous.*": "Here x is not contiguous, and a message must be. "
    "x.clone() and torch.empty_like(x) keep the strides; x.contiguous(), x.flatten() and "
    "x.new_empty(x.shape) do not.",
}
SEND_WAITS = [f"A send waits until its receiver receives; here nobody does: {what}" for what in (
    "`sendrecv` sends and receives at the same time.",
    "only one of the two may send first, while the other receives.")]


@dataclass(frozen=True)
class Case:
    """One input. kind: "marks" (whose x is in it?), "numbers" (exact in every type), "normal"."""

    n: int
    kind: str = "numbers"
    dtype: str = "float32"
    strided: bool = False
    root: int = 0
    into: bool = False  # an `out` is given, and what lies in it is looked at
    returned: bool = False  # an `out` is given, and what is returned is looked at
    again: bool = False  # other numbers in the same shape: is a buffer kept between calls?

    def __str__(self):
        shape = "a matrix that is not contiguous" if self.strided else f"{self.n} elements"
        return f"{shape}, {self.dtype}" + ", `out` given" * (self.into or self.returned)


@dataclass
class Seen:
    """What one rank did with one case."""

    value: object  # a tensor on the CPU, or what else the function returned
    changed: bool  # its input is not what it was
    sent: int
    messages: int
    calls: dict
    bytes_to: dict
    talk: list  # ("send" or "recv", peer), in order
    missing: int  # calls that were not waited for
    itself: bool  # the result lies in its input's memory
    overwritten: bool = False  # a later call wrote into this one's result


def plain_cases(ranks):
    """First the one that says which rank is missing, then the types; R divides the length."""
    return [Case(2 * ranks, "marks", "int64")] + [Case(6 * ranks, dtype=dtype) for dtype in TYPES]


def uneven_cases():
    """Lengths that R does not divide, shorter than R, and a matrix that is not contiguous."""
    return [Case(n) for n in (1001, 7, 2, 1, 0)] + [Case(24, strided=True)]


def values(case, rank):
    """The input of `rank`: the same tensor in the rank and in the judge."""
    if case.kind == "marks":  # a sum of these tells, digit by digit, how often each rank is in it
        return torch.full((case.n,), MARK**rank, dtype=torch.int64)
    if case.kind == "normal":
        return torch.randn(case.n, generator=torch.Generator().manual_seed(rank))
    # Small whole numbers: the sum of 8 ranks is exact in bfloat16 too, in any order.
    x = (torch.arange(case.n) * 7 + rank * 5 + 3 * case.again) % 13 - 6
    x = x.to(getattr(torch, case.dtype))
    return x.reshape(2, -1).t() if case.strided else x


def sums(case, ranks):
    """Right on each rank: the sum. "normal" numbers have none: their bits depend on the order."""
    if case.kind == "normal":
        return []
    return [sum(values(case, rank) for rank in range(ranks))] * ranks


def of_root(case, ranks):
    """Right on each rank: what rank case.root has."""
    return [values(case, case.root)] * ranks


def observe(fn, call, cases, ranks, hint="", per_node=None):
    """[of each case [Seen of each rank]]; a crash or hang is a Mistake with `hint` added."""
    nodes, hint = ranks // per_node if per_node else 1, ALONE if ranks == 1 else hint
    try:
        seen = on_ranks(_trial, fn, call, cases, per_node, ranks=ranks, nodes=nodes)
    except LibrarysAnswer:
        raise
    except Mistake as mistake:
        named = hint_of(FAILURES, mistake)
        if mistake.cause.startswith("hang: ") and drops_handles(fn):
            named = DROPPED
        if not named and re.match(r"hang: .*\bsend\b", mistake.cause):
            named = f"{SEND_WAITS[call.__name__ in ONE_WAY]} {hint}".strip()
        mistake.hint = named or " ".join(filter(None, (mistake.hint, hint)))
        raise
    return list(zip(*seen))


def _trial(fn, call, cases, per_node):
    """Runs on every rank: [Seen of each case]."""
    groups = node_groups(per_node) if per_node else ()
    found = [_one(fn, call, case, groups) for case in cases]
    for value, seen in found:
        seen.overwritten = isinstance(value, torch.Tensor) and not same_bits(value, seen.value)
    return [seen for _, seen in found]


def same_bits(x, copy):
    """Whether x has still the numbers of its copy on the CPU; NaN, in memory that nobody wrote to,
    counts as itself.
    """
    return torch.equal(*(t.detach().cpu().flatten().view(torch.uint8) for t in (x, copy)))


def _one(fn, call, case, groups):
    x = values(case, dist.get_rank()).to(device())
    before = x.clone()
    with Traffic() as traffic, Waits() as waits:
        value = call(fn, x, case, *groups)
    changed, copied, itself = not torch.equal(x, before), value, False
    if isinstance(value, torch.Tensor):
        copied = value.detach().cpu().clone()
        itself = x.numel() and value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    talk = [(op.name, op.peer) for op in traffic.ops if op.peer is not None]
    return value, Seen(copied, changed, traffic.sent_bytes, traffic.sent_messages,
                       dict(traffic.calls), dict(traffic.bytes_to), talk,
                       waits.missing(sum(traffic.calls.values())), bool(itself))


