"""The inputs of lab 02's exercises, and what one call of a verb shows.

Inputs are a function of the rank, so that every rank can make those of the others.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.handles import Waits
from ranklab.checks.prover import AtMost, InAll, Must, Told
from ranklab.engine import device
from ranklab.engine.report import rank_names
from ranklab.meter import Traffic

WORLD_SIZES = (3, 2, 8, 1)  # 3 first: of two ranks each is the other's left and right neighbour
MARK = 128  # ranks are counted to its base: a sum of marks tells how often each rank is in it
BACKENDS = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather",
            "scatter", "all_to_all", "barrier"}
FINE = {"float64": 1 + 2.0**-26, "int64": 2**40 + 1}  # times whole numbers: lost in float32
COST = ("x afterwards", "memory that the result shares with x", "handles that nobody waited for",
        "what it uses of the backend's collectives", "bytes sent", "messages sent",
        "ranks that it sends to", "bytes that all ranks send")


class Case(NamedTuple):
    """One input.

    kind  "marks" (whose x is in it?), "numbers" (exact in every type), "normal" (they round)
    root  of verbs that have one, in the group
    """

    n: int
    dtype: str = "float32"
    kind: str = "numbers"
    strided: bool = False
    has_out: bool = False
    root: int = 0

    def __str__(self):
        shape = "a matrix that is not contiguous" if self.strided else f"{self.n} elements"
        root = f", root {self.root}" * bool(self.root)
        return f"{shape}, {self.dtype}{root}" + ", `out` given" * self.has_out

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


def out_for(case, x):
    """Return an `out` as large as x, contiguous, and full of something that is no result."""
    return torch.full(x.shape, 99).to(x) if case.has_out else None


def shown(case, result):
    """Return a result that is told by the ranks that are in it, where x holds marks."""
    return Told(result, in_marks) if case.kind == "marks" else result


def in_marks(got, due):
    """Return which ranks are missing in a sum of marks, or in it twice."""
    if not isinstance(got, torch.Tensor) or got.shape != due.shape or not got.numel():
        return ""
    times, right = ([int(x.flatten()[0]) // MARK**rank % MARK for rank in range(8)]
                    for x in (got, due))
    lacks, twice, others = ([rank for rank in range(8) if is_so(times[rank], right[rank])]
                            for is_so in (lambda n, m: n < m, lambda n, m: n > m and m,
                                          lambda n, m: n > m and not m))
    texts = [text.format(rank_names(ranks)) for text, ranks in (
        ("lacks {}", lacks), ("counts {} more than once", twice),
        ("has {}, not of this group", others)) if ranks]
    return f"a sum that {' and '.join(texts)}" if texts else ""


def seen_of(call, ranks, case, x, out, cost, of_out=lambda out: out, size=None):
    """Return what one call shows: the result, the inputs afterwards, and what this rank sent.

    call    (x, keywords) -> the result
    cost    (share of the bytes that this rank sends, messages, ranks that it sends to)
    of_out  which part of `out` is looked at
    size    elements that bytes are told by; x's. What one rank sends is settled only where R
            divides them: else it depends on the way that chunks go
    """
    keywords = ranks.keywords | ({} if out is None else {"out": out})
    with Traffic() as traffic, Waits() as waits:
        got = call(x, keywords)
    shares = isinstance(got, torch.Tensor) and x.numel() and got.data_ptr() == x.data_ptr()
    size, (share, messages, peers) = size or x.numel(), cost
    whole = size * x.element_size()
    return {
        "the result": shown(case, got),
        **({} if out is None else {"`out`": shown(case, of_out(out))}),
        "x afterwards": x,
        "memory that the result shares with x": Must(bool(shares and out is None), False),
        "handles that nobody waited for": AtMost(waits.missing(traffic.calls.total()), 0),
        "what it uses of the backend's collectives": Must(sorted(BACKENDS & {*traffic.calls}), []),
        **({"bytes sent": AtMost(100 * traffic.sent_bytes / whole, 100 * share,
                                 "sends {:.1f} MB of a 100 MB tensor; {:.1f} MB is enough"),
            "messages sent": AtMost(traffic.sent_messages, messages),
            "ranks that it sends to": AtMost(len(traffic.bytes_to), peers)}
           if whole and size % ranks.size == 0 else {}),
        "bytes that all ranks send": InAll(traffic.sent_bytes, share * whole),
    }


def two_calls(fn, ranks, case, cost, **more):
    """Yield what two calls show: what is kept from the first would be seen in the second."""
    xs = [case.x(dist.get_rank(), turn) for turn in (0, 1)]
    yield from [seen_of(lambda x, keywords: fn(x, **keywords), ranks, case, x, out_for(case, x),
                        cost, **more) for x in xs]
