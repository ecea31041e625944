"""The inputs of lab 02's exercises, and the observations of one call of a verb.

Inputs are a function of the rank, so that every rank can make the others' inputs.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ranklab.checks.handles import Waits
from ranklab.checks.prover import Agree, AtMost, InAll, Must, Told
from ranklab.engine import device
from ranklab.engine.report import rank_names
from ranklab.meter import Traffic

WORLD_SIZES = 4, 3, 2, 1  # of two ranks each is the other's left and right neighbour
MARK = 128  # ranks are counted to its base: a sum of marks tells how often each rank is in it
BACKENDS = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather",
            "scatter", "all_to_all", "barrier"}
FINE = {"float64": 1 + 2.0**-26, "int64": 2**40 + 1}  # times whole numbers: lost in float32
BUILD = "Build the collective yourself here, using only sendrecv, send and recv."
EMPTY = ("Send nothing when x is empty: every rank knows that there is nothing to receive, and "
         "even an empty message pays latency.")
CHANGED = "x itself is changed and returned, so writing into the result would change x. "
KEPT = ("Something is left over from an earlier call: make new buffers inside the function on "
        "every call.")
MEAN = "Do not divide by R: a caller that wants the mean divides afterwards."
OWN_TYPE = ("Add and send in the input's own dtype: no .float(), and every buffer by empty_like "
            "or new_empty.")
STRIDED = ("x is not contiguous here, but a message must be. x.clone() and torch.empty_like(x) "
           "keep the strides; x.contiguous(), x.flatten() and x.new_empty(x.shape) do not.")
FLAT = ("x is not contiguous here: view(-1) fails on it, and on torch.empty_like(x), which keeps "
        "its strides. Use x.flatten(), and x.new_empty(x.shape) for the result.")
COST = ("x afterwards", "memory that the result shares with x", "handles that nobody waited for",
        "what it uses of the backend's collectives", "bytes sent", "messages sent",
        "ranks that it sends to", "bytes that all ranks send")


class Case(NamedTuple):
    """One input.

    kind  "marks" (whose x is in it?), "numbers" (exact in every type), "normal" (they round)
    root  which rank of the group, for verbs that have one: "first", "middle" or "last"
    """

    n: int
    dtype: str = "float32"
    kind: str = "numbers"
    strided: bool = False
    has_out: bool = False
    root: str = "first"

    def __str__(self):
        shape = "a matrix that is not contiguous" if self.strided else f"{self.n} elements"
        root = f", root: the {self.root} rank" * (self.root != "first")
        return f"{shape}, {self.dtype}{root}" + ", `out` given" * self.has_out

    def root_of(self, R):
        return {"first": 0, "middle": R // 2, "last": R - 1}[self.root]

    def x(self, rank, turn=0):
        """Return the input of `rank`: the same tensor on every rank that asks."""
        if self.kind == "marks":
            return torch.full((self.n,), float(MARK**rank), dtype=torch.float64, device=device())
        if self.kind == "normal":
            generator = torch.Generator().manual_seed(rank + 9 * turn)
            return torch.randn(self.n, generator=generator).to(device())
        # Small whole numbers: the sum of 8 ranks is exact in bfloat16 too, in any order.
        x = (torch.arange(self.n) * 7 + rank * 5 + 3 * turn) % 13 - 6
        x = x.to(device(), getattr(torch, self.dtype)) * FINE.get(self.dtype, 1)
        return x.reshape(2, -1).t() if self.strided else x


MARKS = Case(24, "float64", "marks")
TYPES = tuple(Case(24, dtype) for dtype in ("float32", "float64", "bfloat16", "int64"))
# Lengths that R does not divide, shorter than R, and a matrix that is not contiguous.
UNEVEN = (Case(48), *map(Case, (1001, 7, 2, 1, 0)), Case(24, strided=True))
INTO = tuple(case._replace(has_out=True) for case in (Case(48), Case(1001), Case(24, strided=True)))
MARKS_INTO = MARKS, MARKS._replace(has_out=True)
ROOTS = tuple(MARKS._replace(root=root) for root in ("first", "middle", "last"))


def out_for(case, x):
    """Return an `out` as large as x, contiguous, and filled with values that are no result."""
    return torch.full(x.shape, 99).to(x) if case.has_out else None


def in_marks(got, due):
    """Return which ranks a sum of marks lacks, or has twice, where it first differs."""
    if not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (due.shape, due.dtype):
        return ""
    if (got != got.round()).any() or torch.equal(got, due.float().to(due)):
        return ""  # a mean, or no number; or rounded to float32
    at = int((got != due).flatten().int().argmax())
    times, right = ([int(x.flatten()[at]) // MARK**rank % MARK for rank in range(8)]
                    for x in (got, due))
    lacks, twice, strangers = ([rank for rank in range(8) if is_so(times[rank], right[rank])]
                               for is_so in (lambda n, m: n < m, lambda n, m: n > m and m,
                                             lambda n, m: n > m and not m))
    texts = [text.format(rank_names(ranks)) for text, ranks in (
        ("lacks {}", lacks), ("counts {} more than once", twice),
        ("includes {}, not in this group", strangers)) if ranks]
    where = f" at element {at}" * bool((got != got.flatten()[at]).any())
    return f"a sum that {' and '.join(texts)}{where}" if texts else ""


class Works(TorchDispatchMode):
    """A mode that records the handles of all messages, as the dispatcher knows them."""

    def __init__(self):
        super().__init__()
        self.handles = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and isinstance(result, torch.ScriptObject):
            self.handles.append(result)
        return result


def watched(call):
    """Return (the result of the call, its Traffic, how many handles nobody waited for).

    Those are waited for here: otherwise it depends on chance whether their messages are lost.
    """
    with Traffic() as traffic, Waits() as waits, Works() as works:
        result = call()
    dropped = waits.missing(traffic.calls.total())
    for work in map(dist.Work.unbox, works.handles if dropped else ()):
        if not waits.is_over(work):
            work.wait()
    return result, traffic, dropped


def seen_of(call, ranks, case, x, out, cost, of_out=lambda out: out, size=None, tell=in_marks,
            cuts=True, in_all=None, more=lambda traffic: {}):
    """Return what is observed of a call: the result, the inputs afterwards, this rank's messages.

    call    (x, keywords) -> the result
    cost    (share of the bytes that this rank sends, messages, ranks that it sends to)
    of_out  which part of `out` is compared
    size    number of elements in which bytes are expressed; by default x's
    tell    how a wrong result is described, where x holds marks
    cuts    x is cut into chunks: then the bytes that one rank sends are fixed only where R divides
            the elements; otherwise they depend on the way that chunks take
    in_all  share of the bytes that the average rank sends, where that is less
    more    traffic -> further observations
    """
    keywords = ranks.keywords | ({} if out is None else {"out": out})
    got, traffic, dropped = watched(lambda: call(x, keywords))
    shares = isinstance(got, torch.Tensor) and x.numel() and got.data_ptr() == x.data_ptr()
    size, (share, messages, peers) = size or x.numel(), cost
    whole = size * x.element_size()
    is_settled = not cuts or size % ranks.size == 0

    def shown(result):
        return Told(result, tell) if case.kind == "marks" else result

    return {
        "the result": shown(got),
        **({} if out is None else {"`out`": shown(of_out(out))}),
        "x afterwards": x,
        "memory that the result shares with x": Must(bool(shares and out is None), False),
        "handles that nobody waited for": AtMost(dropped, 0),
        "what it uses of the backend's collectives": Must(sorted(BACKENDS & {*traffic.calls}), []),
        **more(traffic),
        **({"bytes sent": AtMost(100 * traffic.sent_bytes / whole, 100 * share,
                                 "sends {:.1f} MB for each 100 MB of x; {:.1f} MB is enough")}
           if whole and is_settled else {}),
        **({"messages sent": AtMost(traffic.sent_messages, messages),
            "ranks that it sends to": AtMost(len(traffic.bytes_to), peers)} if is_settled else {}),
        "bytes that all ranks send": InAll(
            traffic.sent_bytes, whole * (share if in_all is None else in_all)),
    }


def two_calls(fn, ranks, case, cost, **more):
    """Yield the observations of two calls: state kept from the first would show in the second."""
    xs = [case.x(dist.get_rank(), turn) for turn in (0, 1)]
    yield from [seen_of(lambda x, keywords: fn(x, **keywords), ranks, case, x, out_for(case, x),
                        cost, **more) for x in xs]


def two_sums(fn, ranks, case, cost, **more):
    """Yield the observations of two calls. All ranks must have the same bits of rounded numbers."""
    for values in two_calls(fn, ranks, case, cost, **more):
        agree = {"the sum": Agree(values["the result"])} if case.kind == "normal" else {}
        yield values | agree


def all_reduce_by_torch(x, group=None, out=None):
    total = x.contiguous().clone()
    if group is None or dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total if out is None else out.copy_(total)
