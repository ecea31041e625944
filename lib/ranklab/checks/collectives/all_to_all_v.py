"""The check of all_to_all_v: right for any lengths, few messages; it prints the score."""

from functools import partial
from typing import NamedTuple

import torch

from ranklab.checks.beside import GROUPINGS, beside, expect, on_groups
from ranklab.checks.collectives.cases import FAILURES, GROUP, SEND_WAITS
from ranklab.checks.collectives.traffic import no_backend
from ranklab.checks.failures import MISMATCH
from ranklab.collectives import all_to_all_v_time
from ranklab.engine import device
from ranklab.meter import Traffic

# The fabric of the lab, told of pieces of 1 MB, counted on pieces of 10 kB.
ALPHA, BETA, SMALLER = 10e-6, 1 / 100e9, 100
TELLING = 1000  # bytes that a rank may send to tell lengths
LENGTHS = {  # from rank i to rank j of R
    "lengths 0 to 6": lambda i, j, R: (3 * i + 5 * j + 2) % 7,
    "longer for higher ranks": lambda i, j, R: 300 * j + i,
    "other lengths on rank 1 only": lambda i, j, R: (3 * i + 5 * j + 2 + 4 * (i == 1)) % 7,
    "all to the last rank": lambda i, j, R: 9 + i if j == R - 1 else 0,
    "nothing at all": lambda i, j, R: 0,
    "each to itself": lambda i, j, R: 4 if i == j else 0,
    "even": lambda i, j, R: 2_500,
    "skewed": lambda i, j, R: 2_500 if j == 0 else 25,
    "sparse": lambda i, j, R: 5_000 if j == i + 1 else 0,
}
SCORED = "even", "skewed", "sparse"
HINTS = FAILURES | {
    r"hang: .*\bsend\b.*": f"{SEND_WAITS} sendrecv skips what is empty, too.",
    MISMATCH: "A message is longer than the place made for it. No rank knows what the others "
              "send: the lengths have to travel first. Or the place has the wrong type."}
ORDER = ("Place i of the list must hold what rank i sent to this rank, its pieces[my rank], even "
         "where that is empty, in the length and type that the sender gave it.")
NEW = "`pieces` have changed: receive into new tensors, and copy this rank's own piece."


class Case(NamedTuple):
    lengths: str
    dtype: str = "float32"

    def pieces(self, R, turn):
        """[[what rank i has for rank j]], with steps. Values tell i and j, also in bfloat16."""
        n = LENGTHS[self.lengths]
        return [[(torch.arange(2 * n(i, j, R)) // 2 % 4 + 4 * (8 * i + j + turn)).to(
            getattr(torch, self.dtype))[::2] for j in range(R)] for i in range(R)]


CASES = [*(Case("lengths 0 to 6", dtype) for dtype in ("bfloat16", "int64")),
         Case("longer for higher ranks", "bfloat16"), *map(Case, LENGTHS)]


def check_all_to_all_v(all_to_all_v):
    for ranks, groupings in ((3, None), (4, GROUPINGS[:1])):
        notes = on_groups(_trial, all_to_all_v, CASES, ranks=ranks, groupings=groupings,
                          failures=HINTS)
    yield "right on 3 and 4 ranks, three types, any lengths, views with steps; pieces unchanged"
    most = max(told for of_rank in notes for told, _ in of_rank)
    yield ("a piece goes once, straight to its rank, if it is not empty; messages of a rank of 4 "
           f"that tell lengths: {most} (at most 3)")
    on_groups(_trial, all_to_all_v, CASES[:5], groupings=GROUPINGS[1:], failures={".*": GROUP},
              group_hint="")
    yield "in groups of one, two and three it talks to nobody outside, and ranks count there"
    for name, of_ranks in zip(SCORED, list(zip(*notes))[-len(SCORED):]):
        nbytes = [[4 * SMALLER * LENGTHS[name](i, j, 4) for j in range(4)] for i in range(4)]
        yield (f"{name}: the busiest of 4 ranks takes {max(us for _, us in of_ranks):.1f} us by "
               f"the model; the library's {1e6 * all_to_all_v_time(nbytes, ALPHA, BETA):.1f}, "
               f"bound {1e6 * all_to_all_v_time(nbytes, 0, BETA):.1f}")


def _trial(fn, ranks, cases):
    R = ranks.size
    for case in cases:
        seen = []

        def call(turn):
            pieces = [x.to(device()) for x in case.pieces(R, turn)[ranks.index]]
            with Traffic() as traffic:
                results = fn(pieces, **ranks.keywords)
            results = results if isinstance(results, (list, tuple)) else []
            seen.append((traffic, pieces, results))
            return ({f"what rank {i} sent": x for i, x in enumerate(results)}
                    | {f"pieces[{j}]": x for j, x in enumerate(pieces)})

        def right(turn):
            pieces = case.pieces(R, turn)
            return ({f"what rank {i} sent": pieces[i] for i in range(R)}
                    | {f"pieces[{j}]": [mine[j] for mine in pieces] for j in range(R)})

        def slips(name, turn):
            return {f"what rank {i} has for rank {j}": (x, f"{ORDER} {GROUP}")
                    for i, mine in enumerate(case.pieces(R, turn)) for j, x in enumerate(mine)
                    if name.startswith("what") and x.numel()}

        where = f"{case.lengths}, {case.dtype}: {ranks}"
        yield from beside(where, ranks, call, right, slips=slips,
                          advice=lambda name: ORDER if name.startswith("what") else NEW)
        yield partial(_counted, where, ranks, *seen[0])


def _counted(where, ranks, traffic, pieces, results):
    """How many of this rank's messages told lengths; how many us it sends or receives."""
    expect(len(results) == ranks.size, f"{where}: a list of {len(results)}", ORDER)
    memory = [{x.untyped_storage().data_ptr() for x in each if x.numel()}
              for each in (pieces, results)]
    expect(not memory[0] & memory[1], f"{where}: a result is in the memory of a piece", NEW)
    no_backend([(None, traffic)])
    away = [x.nbytes for to, x in enumerate(pieces) if to != ranks.index and x.numel()]
    expect(traffic.sent_bytes <= sum(away) + TELLING, f"{where} sends {traffic.sent_bytes:,} bytes;"
           f" its pieces for others have {sum(away):,}, and {TELLING} may tell lengths",
           "Each piece goes once, straight to its rank, without padding.")
    told = traffic.sent_messages - len(away)
    expect(told < ranks.size, f"{where} sends {traffic.sent_messages} messages; {len(away)} for "
           f"its pieces and {ranks.size - 1} for lengths are enough", "An empty piece is no "
           "message, nor is it padded, and each other is one.")
    come = [op.received_bytes for op in traffic.ops if op.name == "recv"]
    both = (traffic.sent_messages, traffic.sent_bytes), (len(come), sum(come))
    return told, 1e6 * max(ALPHA * count + SMALLER * BETA * nbytes for count, nbytes in both)
