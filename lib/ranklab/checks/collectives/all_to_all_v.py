"""The check of all_to_all_v: right for any lengths, few messages; it prints the score."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.collectives.arguments import GROUP
from ranklab.checks.collectives.judging import no_backend
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import LEFT, MISMATCH, hinted
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.trial import (
    explain, group_of_mine, is_near, members_of, on_ranks, rank_name,
)
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
FAILURES = {
    r"hang: (?=.*\bsend).*":
        "A send waits until its receiver receives, and here nobody does. sendrecv "
                     "sends and receives at the same time, and skips what is empty.",
    MISMATCH: "A message is longer than the place made for it. No rank knows what the others "
               "send: the lengths have to travel first. Or the place has another type.",
    "RuntimeError: input tensor has to be contiguous":
        "A piece may be a view with steps: piece.contiguous() can be sent.",
    LEFT: "A rank waits for a piece that is not sent, perhaps because it is empty: both "
                    "sides must know. Or a send was not waited for.",
}


class Case(NamedTuple):
    lengths: str
    dtype: str = "float32"
    strided: bool = False

    def piece(self, i, j, R):
        """What rank i has for rank j. Its values tell both, also in bfloat16."""
        n = (LENGTHS | SCORED)[self.lengths](i, j, R)
        return (torch.arange(n) % 4 + 4 * (8 * i + j)).to(getattr(torch, self.dtype))


class Seen(NamedTuple):
    """What one rank did with one case."""

    values: list  # on the CPU
    flaw: str  # what is wrong, whatever the values are
    sent: int
    messages: int
    busy: float  # seconds of sending or of receiving, by alpha and beta
    calls: dict
    missing: int  # calls that were not waited for


CASES = [*(Case("lengths 0 to 6", dtype) for dtype in ("float32", "bfloat16", "int64")),
         Case("lengths 0 to 6", strided=True), *map(Case, LENGTHS)]


def check_all_to_all_v(all_to_all_v):
    most = []  # messages for lengths
    for ranks in (3, 2, 5, 1):
        with hinted(FAILURES):
            seen = on_ranks(_trial, all_to_all_v, CASES, ranks=ranks)
        most.append(_judge(CASES, seen))
    yield "right on 1, 2, 3, 5 ranks, three types, any lengths, views with steps; pieces unchanged"
    yield ("a piece goes once, straight to its rank, if it is not empty; messages of a rank of 5 "
           f"that tell lengths: {most[2]} (at most 4)")
    few, scored = CASES[-4:], [*map(Case, SCORED)]
    with hinted({".*": GROUP}):  # all else went well on other numbers of ranks
        seen = on_ranks(_two_trials, all_to_all_v, few, scored, ranks=4)
    for members in (members_of(0), members_of(1)):
        _judge(few, [seen[rank][0] for rank in members], f", group {members}")
    yield "in groups of one and of three it meets nobody else, and ranks count there"
    seen = [of_rank[1] for of_rank in seen]
    _judge(scored, seen)
    for name, of_ranks in zip(SCORED, zip(*seen)):
        nbytes = [[4 * SCORED[name](i, j, 4) for j in range(4)] for i in range(4)]
        times = (max(one.busy for one in of_ranks), all_to_all_v_time(nbytes, ALPHA, BETA),
                 all_to_all_v_time(nbytes, 0, BETA))
        yield (f"{name}: the busiest of 4 ranks takes {{:.1f}} us by the model; the library's "
               "{:.1f}, bound {:.1f}").format(*(1e6 * seconds for seconds in times))


def _two_trials(all_to_all_v, in_groups, of_all):
    group = group_of_mine()
    return _trial(all_to_all_v, in_groups, group=group), _trial(all_to_all_v, of_all)


def _trial(all_to_all_v, cases, **group):
    """On every rank: [Seen of each case]."""
    both = [_one(all_to_all_v, case, group) for case in cases]
    return [one if all(map(torch.equal, _copies(values), one.values)) else
            one._replace(flaw="a later call changed the result of this one")
            for values, one in both]


def _copies(values):
    return [x.detach().cpu().clone() for x in values]


def _one(all_to_all_v, case, group):
    rank, R = dist.get_rank(**group), dist.get_world_size(**group)
    pieces = [case.piece(rank, to, R).to(device()) for to in range(R)]
    if case.strided:
        pieces = [torch.stack([x, x], 1)[:, 0] for x in pieces]
    given, before = [*pieces], [x.clone() for x in pieces]
    with Traffic() as traffic, Waits() as waits:
        values = all_to_all_v(pieces, **group)
    if not isinstance(values, (list, tuple)) or not all(
            isinstance(x, torch.Tensor) for x in values):
        values = []
    come = [op.received_bytes for op in traffic.ops if op.name == "recv"]
    busy = max(ALPHA * len(come) + BETA * sum(come),
               ALPHA * traffic.sent_messages + BETA * traffic.sent_bytes)
    places = {x.untyped_storage().data_ptr() for x in given if x.numel()}
    flaw = ""
    if not (len(pieces) == R and all(map(torch.equal, pieces, before))):
        flaw = "`pieces` have changed"
    elif any(x.untyped_storage().data_ptr() in places for x in values if x.numel()):
        flaw = "a result lies in the memory of a piece"
    return values, Seen(_copies(values), flaw, traffic.sent_bytes, traffic.sent_messages, busy,
                        dict(traffic.calls), waits.missing(sum(traffic.calls.values())))


def _judge(cases, seen, inside=""):
    """Each case is right on these ranks, all of a world or of a group; seen is [[Seen]]. Returns
    the most messages of a rank that told lengths.
    """
    R, most = len(seen), 0
    for case, of_ranks in zip(cases, zip(*seen)):
        no_backend(of_ranks)
        for rank, one in enumerate(of_ranks):
            where = f"{case.lengths}, {case.dtype}: {rank_name(rank, R)}{inside}"
            if len(one.values) != R:
                raise Mistake(f"{where} returns {len(one.values)} tensors", f"Return a list of {R} "
                              "in rank order: from each rank, itself too, also what is empty.")
            all_awaited(one.missing, where)
            for source, got in enumerate(one.values):
                _compare(f"{where}: what rank {source} sent", got, case, source, rank, R)
            if one.flaw:
                raise Mistake(f"{where}: {one.flaw}", "Make new tensors for all that arrives, in "
                              "each call; this rank's own piece is copied.")
            most = max(most, _count(where, one, case, rank, R))
    return most


def _compare(where, got, case, source, rank, R):
    right = case.piece(source, rank, R)
    if is_near(got, right):
        return
    hint = "It is 1-dim, and has the length and type that its sender gave it."
    if got.shape == case.piece(rank, source, R).shape != right.shape:
        hint = "This is the length of what goes there; what comes has a length of its own."
    others = {f"what rank {i} has for rank {j}": case.piece(i, j, R)
              for i in range(R) for j in range(R)}
    explain(where, got, right, {name: (x, "What rank i sent to me is in place i, and was its "
                                       f"pieces[my rank]. {GROUP}")
                                for name, x in others.items() if x.numel()}, hint)


def _count(where, one, case, rank, R):
    pieces = [case.piece(rank, to, R) for to in range(R) if to != rank]
    away = [x.nbytes for x in pieces if x.numel()]
    if one.sent > sum(away) + TELLING:
        raise Mistake(f"{where} sends {one.sent:,} bytes; its pieces for others have "
                      f"{sum(away):,}, and {TELLING} may tell lengths", "Each piece goes once, "
                      "straight to its rank, without padding.")
    if one.messages > len(away) + R - 1:
        raise Mistake(f"{where} sends {one.messages} messages; {len(away)} for its pieces and "
                      f"{R - 1} for lengths are enough", "An empty piece is no message, nor is it "
                      "padded, and each other is one.")
    return one.messages - len(away)
