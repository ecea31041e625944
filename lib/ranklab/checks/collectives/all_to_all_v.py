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

ALPHA, BETA = 10e-6, 1 / 100e9  # the fabric of the lab
TELLING = 1000  # bytes that a rank may send to tell lengths
LENGTHS = {  # from rank i to rank j of R
    "lengths 0 to 6": lambda i, j, R: (3 * i + 5 * j + 2) % 7,
    "other lengths on rank 1 only": lambda i, j, R: (3 * i + 5 * j + 2 + 4 * (i == 1)) % 7,
    "all to the last rank": lambda i, j, R: 9 + i if j == R - 1 else 0,
    "only rank 1 has something": lambda i, j, R: 3 + j if i == 1 else 0,
    "nothing at all": lambda i, j, R: 0,
    "each to itself": lambda i, j, R: 4 if i == j else 0,
    "longer for higher ranks": lambda i, j, R: 300 * j + i,
}
SCORED = {  # on 4 ranks: mostly 1 MB or 2
    "even": lambda i, j, R: 250_000,
    "skewed": lambda i, j, R: 250_000 if j == 0 else 2_500,
    "sparse": lambda i, j, R: 500_000 if j == i + 1 else 0,
}
HINTS = FAILURES | {
    r"hang: .*\bsend\b.*": f"{SEND_WAITS} sendrecv skips what is empty, too.",
    MISMATCH: "A message is longer than the place made for it. No rank knows what the others "
              "send: the lengths have to travel first. Or the place has another type."}
ADVICE = {  # by the first word of what is looked at
    "list:": "Return a list in rank order: from each rank, itself too, also what is empty.",
    "memory": "Make new tensors for all that arrives; this rank's own piece is copied.",
    "what": "It is 1-dim, and has the length and type that its sender gave it. The length of what "
            "comes is not that of what goes there.",
    "pieces": "`pieces` have changed: receive into new tensors.",
}


class Case(NamedTuple):
    lengths: str
    dtype: str = "float32"
    strided: bool = False

    def piece(self, i, j, R, turn=0):
        """What rank i has for rank j. Its values tell both, also in bfloat16."""
        n = (LENGTHS | SCORED)[self.lengths](i, j, R)
        return (torch.arange(n) % 4 + 4 * (8 * i + j + turn)).to(getattr(torch, self.dtype))


CASES = [*(Case("lengths 0 to 6", dtype) for dtype in ("float32", "bfloat16", "int64")),
         Case("lengths 0 to 6", strided=True), Case("longer for higher ranks", "bfloat16"),
         *map(Case, LENGTHS)]


def check_all_to_all_v(all_to_all_v):
    for ranks, groupings in ((3, None), (4, GROUPINGS[:1])):
        most = on_groups(_trial, all_to_all_v, CASES, _messages, ranks=ranks,
                         groupings=groupings, failures=HINTS)
    yield "right on 3 and 4 ranks, three types, any lengths, views with steps; pieces unchanged"
    yield ("a piece goes once, straight to its rank, if it is not empty; messages of a rank of 4 "
           f"that tell lengths: {max(map(max, most))} (at most 3)")
    on_groups(_trial, all_to_all_v, CASES[-4:], _messages, groupings=GROUPINGS[1:],
              failures={".*": GROUP}, group_hint="")
    yield "in groups of one, two and three it meets nobody else, and ranks count there"
    busy = on_groups(_trial, all_to_all_v, [*map(Case, SCORED)], _seconds,
                     groupings=GROUPINGS[:1], timeout=30)  # large pieces, beside one process
    for name, seconds in zip(SCORED, map(max, zip(*busy))):
        nbytes = [[4 * SCORED[name](i, j, 4) for j in range(4)] for i in range(4)]
        times = (seconds, all_to_all_v_time(nbytes, ALPHA, BETA),
                 all_to_all_v_time(nbytes, 0, BETA))
        yield (f"{name}: the busiest of 4 ranks takes {{:.1f}} us by the model; the library's "
               "{:.1f}, bound {:.1f}").format(*(1e6 * seconds for seconds in times))


def _trial(fn, ranks, cases, count):
    for case in cases:
        traffics = []
        where = f"{case.lengths}, {case.dtype}: {ranks}"
        yield from beside(where, ranks, partial(_call, fn, ranks, case, traffics),
                          partial(_right, ranks, case), slips=partial(_slips, ranks, case),
                          advice=lambda name: ADVICE[name.split()[0].partition("[")[0]])
        yield partial(count, where, ranks, case, traffics[0])


def _call(fn, ranks, case, traffics, turn):
    pieces = [case.piece(ranks.index, to, ranks.size, turn).to(device())
              for to in range(ranks.size)]
    if case.strided:
        pieces = [torch.stack([x, x], 1)[:, 0] for x in pieces]
    places = {x.untyped_storage().data_ptr() for x in pieces if x.numel()}
    with Traffic() as traffic:
        results = fn(pieces, **ranks.keywords)
    traffics.append(traffic)
    results = results if isinstance(results, (list, tuple)) else []
    shared = [x for x in results if isinstance(x, torch.Tensor) and x.numel()
              and x.untyped_storage().data_ptr() in places]
    return {"list: its length": len(results), "memory of a piece: results in it": len(shared),
            **{f"what rank {source} sent": x for source, x in enumerate(results)},
            **{f"pieces[{to}]": x for to, x in enumerate(pieces)}}


def _right(ranks, case, turn):
    R, everybody = ranks.size, range(ranks.size)
    return {"list: its length": [R] * R, "memory of a piece: results in it": [0] * R,
            **{f"what rank {i} sent": [case.piece(i, j, R, turn) for j in everybody]
               for i in everybody},
            **{f"pieces[{j}]": [case.piece(i, j, R, turn) for i in everybody]
               for j in everybody}}


def _slips(ranks, case, name, turn):
    named = {f"what rank {i} has for rank {j}": case.piece(i, j, ranks.size, turn)
             for i in range(ranks.size) for j in range(ranks.size) if name.startswith("what")}
    return {what: (x, "What rank i sent to me is in place i, and was its pieces[my rank]. "
                   f"{GROUP}") for what, x in named.items() if x.numel()}


def _messages(where, ranks, case, traffic):
    """Returns how many of this rank's messages told lengths."""
    R, n = ranks.size, traffic.sent_messages
    pieces = [case.piece(ranks.index, to, R) for to in range(R) if to != ranks.index]
    away = [x.nbytes for x in pieces if x.numel()]
    no_backend([(None, traffic)])
    expect(traffic.sent_bytes <= sum(away) + TELLING, f"{where} sends {traffic.sent_bytes:,} bytes;"
           f" its pieces for others have {sum(away):,}, and {TELLING} may tell lengths",
           "Each piece goes once, straight to its rank, without padding.")
    expect(n <= len(away) + R - 1, f"{where} sends {n} messages; {len(away)} for its pieces and "
           f"{R - 1} for lengths are enough", "An empty piece is no message, nor is it padded, and "
           "each other is one.")
    return n - len(away)


def _seconds(where, ranks, case, traffic):
    """Returns how long this rank sends or receives, by alpha and beta."""
    _messages(where, ranks, case, traffic)
    come = [op.received_bytes for op in traffic.ops if op.name == "recv"]
    return max(ALPHA * len(come) + BETA * sum(come),
               ALPHA * traffic.sent_messages + BETA * traffic.sent_bytes)
