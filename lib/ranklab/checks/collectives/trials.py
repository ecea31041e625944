"""What the checks of lab 02 do on the ranks, and what they make of it.

The judge knows every rank's input, since inputs are a function of the rank; so it adds up in one
process and needs no other collective as an oracle.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ranklab.checks.handles import DROPPED, Waits, all_awaited, drops_handles
from ranklab.collectives import node_groups
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

MARK = 128  # ranks are counted to its base: up to 127 times each, for 8 ranks in an int64
WORLD_SIZES = (2, 3, 8, 1)  # for plain cases, 1 last: it has a hint of its own
BACKENDS = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather",
            "scatter", "all_to_all", "barrier"}
ONE_WAY = {"call_broadcast", "call_server", "call_root_in_group"}  # these need no `sendrecv`
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
        return f"{shape}, {self.dtype}" + (
            ", `out` given" if self.into or self.returned else "")


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


def trial(fn, call, cases, per_node):
    """Runs on every rank: [Seen of each case]."""
    groups = node_groups(per_node) if per_node else ()
    found = [_one(fn, call, case, groups) for case in cases]
    for value, seen in found:
        seen.overwritten = (isinstance(value, torch.Tensor)
                            and not torch.equal(value.detach().cpu(), seen.value))
    return [seen for _, seen in found]


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


def observe(fn, call, cases, ranks, hint="", per_node=None):
    """[of each case [Seen of each rank]]; a crash or hang is a Mistake with `hint` added."""
    nodes = ranks // per_node if per_node else 1
    try:
        seen = on_ranks(trial, fn, call, cases, per_node, ranks=ranks, nodes=nodes)
    except Mistake as mistake:
        if mistake.what.startswith("it calls the library"):
            raise
        named = _hint_failure(mistake.what, fn)
        if not named and "waits in send" in mistake.what:
            hint = f"{SEND_WAITS[call.__name__ in ONE_WAY]} {hint}".strip()
        elif not named:
            hint = " ".join(filter(None, (mistake.hint, hint)))
        raise Mistake(mistake.what, named or hint) from None
    return list(zip(*seen))


def _hint_failure(what, fn):
    """A hint about this very failure, or nothing."""
    if "view size is not compatible" in what:
        return ("Here x is not contiguous, and torch.empty_like(x) keeps its strides, so that view "
                "fails: x.new_empty(x.shape) is contiguous.")
    if "be contiguous" in what:
        return ("Here x is not contiguous, and a message must be. x.clone() and torch.empty_like(x)"
                " keep the strides; x.contiguous(), x.flatten() and x.new_empty(x.shape) do not.")
    if "does not end" in what and drops_handles(fn):
        return DROPPED
    return ""


def compare(case, ranks, seen, wanted, explain=None):
    """Every rank has its wanted value, in shape and type; `explain` may name the mistake first."""
    for rank, one in enumerate(seen):
        _is_tensor(one, rank)
        all_awaited(one.missing, f"rank {rank} of {ranks}")
        if one.changed:
            raise Mistake(f"x itself is changed on rank {rank} of {ranks}",
                          "Receive and add into a copy of x, or into what arrived. (Where x is cut "
                          "into chunks, these are views of x.)")
    for rank, (one, right) in enumerate(zip(seen, wanted)):
        if one.itself:
            raise Mistake(f"rank {rank} of {ranks} returns x itself, not a new tensor",
                          "Whoever writes into the result would write into x: return a copy.")
        if one.overwritten:
            raise Mistake(f"rank {rank} of {ranks}: a later call changed the result of this one",
                          "Make the buffer inside the function, new in each call.")
        same_shape = one.value.shape == right.shape
        if same_shape and one.value.dtype == right.dtype and torch.equal(one.value, right):
            continue
        if explain:
            explain(rank, ranks, one.value, right)
        if not same_shape:
            raise Mistake(f"rank {rank} of {ranks} returns shape {tuple(one.value.shape)}, not "
                          f"{tuple(right.shape)} ({case})", "Compare with the docstring's first "
                          "line. (When R does not divide the length, tensor_split says how long "
                          "each chunk is.)")
        if one.value.dtype != right.dtype:
            raise Mistake(f"{right.dtype} came in, {one.value.dtype} went out",
                          "Make every buffer with empty_like or new_empty: same type, same device.")
        _differs(case, rank, ranks, one.value, right)


def _is_tensor(one, rank):
    if one.value is None:
        raise Mistake(f"rank {rank} returns None", "Return the result; x itself stays as it is.")
    if not isinstance(one.value, torch.Tensor):
        raise Mistake(f"rank {rank} returns a {type(one.value).__name__}, not a tensor",
                      "Return one tensor.")


def _differs(case, rank, ranks, got, right):
    where = f"rank {rank} of {ranks}"
    if case.kind == "marks" and got.numel():
        raise Mistake(*who_is_missing(where, int(got.flatten()[0]), ranks))
    at = int((got != right).flatten().nonzero()[0])
    hint = ("x is not contiguous here. torch.empty_like(x) keeps its strides, and then chunks "
            "are copies: x.new_empty(x.shape) is contiguous.") if case.strided else ""
    raise Mistake(f"{where} has {got.flatten()[at].item():g} at element {at} where "
                  f"{right.flatten()[at].item():g} is right ({case})", hint)


def times_in(value, ranks):
    """How often each rank is in a sum of marks."""
    return [value // MARK**r % MARK for r in range(ranks)]


def who_is_missing(where, value, ranks):
    """(what, hint) for a sum of marks: which ranks are in it, and how often."""
    times = times_in(value, ranks)
    missing = [r for r in range(ranks) if not times[r]]
    doubled = [r for r in range(ranks) if times[r] > 1]
    if missing:
        present = [r for r in range(ranks) if times[r]]
        holds = f"{_names(present)} only" if present else "no rank's number"
        if doubled:
            return (f"the sum on {where} lacks {_names(missing)}, and counts {_names(doubled)} "
                    "more than once", "What arrives needs a place of its own: do you receive into "
                    "the tensor that you send, or that you add to?")
        return (f"the sum on {where} lacks {_names(missing)}: it holds {holds}",
                "Either there are too few steps, or what arrived is passed on without your own "
                "share, or it is thrown away.")
    return (f"the sum on {where} counts {_names(doubled)} more than once",
            "Something is added twice: one step too many, or a partner that has it already.")


def _names(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def no_backend(seen):
    """Only sends and receives were used, not the collective that is to be built."""
    for one in seen:
        for name in BACKENDS & set(one.calls):
            raise Mistake(f"it calls the backend's own {name}",
                          "Here the verb itself is built: from sendrecv, send and recv only.")


def total(case, ranks):
    """The sum over ranks, in one process."""
    return sum(values(case, rank) for rank in range(ranks))


def sends(seen, nbytes, wanted, hint_for):
    """Every rank sends `wanted` bytes; sizes are told as if the tensor of `nbytes` had 100 MB."""
    per_rank = [one.sent for one in seen]
    for rank, sent in enumerate(per_rank):
        if sent == wanted:
            continue
        who = "each rank" if len(set(per_rank)) == 1 else f"rank {rank} of {len(seen)}"
        what = (f"{who} sends {100 * sent / nbytes:.1f} MB of a 100 MB tensor; "
                f"{100 * wanted / nbytes:.1f} MB is enough")
        raise Mistake(what, hint_for(per_rank))


def is_mean(got, right, ranks):
    """True when `got` is the sum divided by the ranks, whatever rounding did to it."""
    if got.shape != right.shape or not right.numel() or ranks == 1:
        return False
    return bool(((got.double() * ranks - right.double()).abs() < ranks).all())


def ranks_agree(seen, hint="Let one rank finish a chunk and send the finished chunk to the others, "
                           "or replicas drift apart."):
    """All ranks hold the same bits, whatever the order of the sum was."""
    for rank, one in enumerate(seen):
        if not torch.equal(one.value, seen[0].value):
            raise Mistake(f"rank {rank} and rank 0 differ in the last bits of the sum",
                          f"Each rank adds in another order. {hint}")
