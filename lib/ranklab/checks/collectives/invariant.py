"""The check of invariant_all_reduce: numbers whose sum shows in which order they were added."""

import itertools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.collectives.inputs import BUILD, COST, FINE, KEPT, MEAN, seen_of
from ranklab.checks.prover import AtMost, Proof, Slip, Stage, must_refuse
from ranklab.checks.prover.slips import edited
from ranklab.collectives import (
    invariant_all_reduce, recursive_doubling, ring_all_reduce, tree_sum, verbs,
)
from ranklab.engine import device
from ranklab.meter import Traffic

LARGE = {"float32": 2.0**30, "float64": 2.0**60, "bfloat16": 2.0**16}  # 1 is lost next to it


class Spread(NamedTuple):
    """Contributions of all ranks together.

    n  elements of each; None: one for each pair of contributions, which are LARGE and -LARGE there,
       and the others are 1. The sum is the number of ones that were not lost next to a large
       number: it depends on the order of additions.
    """

    total: int
    n: int | None = None
    dtype: str = "float32"
    strided: bool = False

    def __str__(self):
        shape = "matrices that are not contiguous" if self.strided else f"{self.size} elements"
        return f"{self.total} contributions of {shape}, {self.dtype}"

    @property
    def size(self):
        return math.comb(self.total, 2) if self.n is None else self.n

    def part(self, ranks, turn=0):
        """Return this rank's contributions."""
        dtype, m = getattr(torch, self.dtype), self.total // ranks.size
        if self.n is None:
            whole = torch.ones(self.total, self.size, dtype=dtype)
            pairs = [*itertools.combinations(range(self.total), 2)]
            for at, pair in enumerate(pairs[turn:] + pairs[:turn]):
                whole[pair, at] = torch.tensor((1, -1), dtype=dtype) * LARGE[self.dtype]
        else:  # small whole numbers: exact in every type, in any order
            numbers = torch.arange(self.total * self.size).view(self.total, -1)
            whole = ((numbers * 7 + 3 * turn) % 13 - 6).to(dtype) * FINE.get(self.dtype, 1)
        part = whole[m * ranks.index:m * (ranks.index + 1)].to(device())
        return part.view(m, 2, -1).transpose(1, 2) if self.strided else part


class _Case(NamedTuple):
    """What seen_of asks of a case."""

    kind: str = "numbers"


def _see(fn, spread, ranks):
    R = ranks.size
    if spread.total % R:
        return
    messages = 2 * (R - 1) if spread.size else 0
    # Both calls come first: state kept from one would show in the other.
    yield from [seen_of(lambda x, keywords: fn(x, **keywords), ranks, _Case(),
                        spread.part(ranks, turn), None, (2 * (R - 1) / R, messages, R - 1),
                        size=spread.size) for turn in (0, 1)]


def _see_refusal(fn, spread, ranks):
    with Traffic() as traffic:
        error = must_refuse(fn, spread.part(ranks), **ranks.keywords)
    yield {"what it raises": error, "messages before the error": AtMost(len(traffic.ops), 0)}


def in_one_place(contributions, group=None):
    """Gather all contributions, and add them up in the tree of the contract."""
    R = dist.get_world_size(group)
    if R & (R - 1):
        raise ValueError(f"{R} ranks")
    rows = [torch.empty_like(contributions, memory_format=torch.contiguous_format)
            for _ in range(R)]
    if R > 1 and contributions.numel():
        dist.all_gather(rows, contributions.contiguous(), group=group)
    else:
        rows = [contributions]
    return _halved([row for of_rank in rows for row in of_rank])


def _halved(rows):
    half = len(rows) // 2
    return _halved(rows[:half]) + _halved(rows[half:]) if half else rows[0].clone()


# --- mistakes -------------------------------------------------------------------------------------

def round_a_ring(contributions, group=None):
    return ring_all_reduce(tree_sum(contributions), group)


def by_doubling(contributions, group=None):
    return recursive_doubling(tree_sum(contributions), group)


def gathers_contributions(contributions, group=None):
    R = dist.get_world_size(group)
    if R & (R - 1):
        raise ValueError("1, 2, 4, 8, ... ranks")
    return tree_sum(verbs.all_gather(contributions.contiguous(), group).flatten(0, 1)).clone()


def by_torch(contributions, group=None):
    total = tree_sum(contributions).contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def adds_up(contributions):
    """Add up row after row, as gradients are accumulated."""
    total = contributions[0].clone()
    for row in contributions[1:]:
        total += row
    return total


def _by(says, *programs):
    """Return the Slip of another local sum: functions, or edits of the library's tree_sum."""
    return Slip(says, *(edited(invariant_all_reduce, (), tree_sum=program if callable(program)
                               else edited(tree_sum, program)) for program in programs))


LOCAL = "contributions.new_empty(contributions.shape[1:]).copy_(tree_sum(contributions))"
ADD = "piece += sendrecv(other, partner, torch.empty_like(piece), partner, group)"
KEEP = "halves if rank < partner else halves[::-1]"
BACK = ("    for partner, finished, other in reversed(swaps):\n"
        "        sendrecv(finished, partner, other, partner, group)\n")
REFUSE, SUM, START = "if R & (R - 1):", "    return total\n", "    rank, R ="
ORDER = ("Each element here is a large number in one contribution, its negative in another, and 1 "
         "in the others. Ones that are added to a large number are lost, so the sum shows in which "
         "order you add.")
ORDERS = (Spread(8), Spread(12), Spread(16), Spread(8, dtype="bfloat16"),
          Spread(8, dtype="float64"))
LENGTHS = (Spread(8, 48), Spread(8, 24, "int64"), *(Spread(4, n) for n in (1001, 7, 2, 1, 0)),
           Spread(8, 24, strided=True), Spread(4, 24, strided=True))
INVARIANT = Proof(
    invariant_all_reduce,
    Stage({"the same 8, 12 or 16 contributions on 4, 2 and 1 ranks: the bits of one process's "
           "tree, in three types": (),
           "the contributions are unchanged; each rank sends 2(R-1)/R of one contribution, as a "
           "ring does": COST},
          _see, ORDERS, (4, 2, 1), oracle=in_one_place, note=ORDER),
    Stage("for lengths 0, 1, 2, 7, 1001, integers, when they are not contiguous", _see, LENGTHS,
          (4, 1), oracle=in_one_place),
    Stage("inside a group it talks to nobody outside", _see, (Spread(8), Spread(4, 48)), (4,),
          (((0, 3), (1, 2)), ((1, 3), (0,), (2,))), oracle=in_one_place),
    Stage("3 ranks are a ValueError on all of them, and nothing is sent", _see_refusal,
          (Spread(12, 24),), (3,), oracle=in_one_place),
    mistakes=(
        _by("Here this rank's contributions are added one after the other. The tree adds the first "
            "half, then the rest, and then the two sums.", adds_up),
        _by("The first half has n // 2 contributions. With 3 of them it is the first one alone, "
            "and the other two are added to each other.",
            ("len(contributions) // 2",
             "(len(contributions) + 1) // 2 * (len(contributions) > 1)")),
        _by("Even rows are separated from odd rows here. The tree splits a rank's rows into the "
            "first n // 2 and the rest.", ("[:half]", "[::2]", "[half:]", "[1::2]")),
        Slip("Swap with the neighbour first, then with the rank 2 away, then 4 away: "
             "neighbours hold contributions that are neighbours in the tree.",
             ("rank ^ 2**k", "rank ^ (R >> (k + 1))")),
        Slip("A ring starts the sum of each chunk on a different rank, so the order of additions "
             "depends on the chunk and on R. Halve the piece and swap with one partner at a time.",
             round_a_ring),
        Slip("The order is right, but the whole sum travels log2 R times. Swap halves, then "
             "quarters, and add only the part that you keep; then give the finished parts back.",
             by_doubling),
        Slip("All contributions travel here. Add up this rank's own first, and send sums.",
             gathers_contributions),
        Slip("This rank's other contributions are missing: add up all m of them.",
             (LOCAL, LOCAL.replace("tree_sum(contributions)", "contributions[0]"))),
        Slip("Each rank has the finished sum of one piece only. The swaps in reverse order bring "
             "the other pieces.", (BACK, "")),
        Slip("Give back in reverse order: the last swap's pieces are the smallest, and are "
             "finished first.", ("reversed(swaps)", "swaps")),
        Slip("Both partners keep the same half. The lower rank keeps the first half, the other one "
             "the second.", (KEEP, "halves")),
        Slip("Add what arrives to the piece that you keep.",
             (ADD, "piece.copy_(sendrecv(other, partner, torch.empty_like(piece), partner, "
              "group))")),
        Slip(MEAN, (SUM, "    return (total / R).to(total.dtype)\n")),
        Slip("Add in the contributions' own dtype. A wider one rounds differently, so the bits are "
             "not the tree's, and it sends more bytes.",
             *((LOCAL, f"tree_sum(contributions.{wide}()).contiguous().clone()",
                SUM, "    return total.to(contributions.dtype)\n")
               for wide in ("float", "double"))),
        Slip("With 3 ranks the tree would be cut inside a rank's part: raise a ValueError on every "
             "rank, before anything is sent.", (REFUSE, "if False:")),
        Slip("Raise ValueError(...): an assert is an AssertionError, and python -O drops it.",
             (REFUSE, "assert not R & (R - 1)\n    if False:")),
        Slip("The sum of one contribution is that contribution itself, so adding to it changes the "
             "input. Copy it first.", (LOCAL, "tree_sum(contributions).contiguous()")),
        Slip("These contributions are not contiguous, and clone() keeps the strides. Before "
             "view(-1) or a message, copy with clone(memory_format=torch.contiguous_format).",
             (LOCAL, "tree_sum(contributions).clone()")),
        Slip("Give the result the shape of one contribution.",
             (SUM, "    return total.view(-1)\n"), (SUM, "    return total[None]\n")),
        Slip(KEPT, ("group=None):", "group=None, kept={}):", LOCAL,
                    "kept.setdefault((R, contributions.shape, contributions.dtype), "
                    "contributions.new_empty(contributions.shape[1:]))"
                    ".copy_(tree_sum(contributions))")),
        Slip("Pass `group` on wherever you ask or send: get_rank(group), sendrecv(..., group).",
             (START, f"    group = None\n{START}"), (ADD, ADD.replace(", group)", ")"))),
        Slip(BUILD, by_torch),
    ), hints=(
        "Cut the tree below its root: which ranks have the contributions of the left half? Which "
        "ranks meet at the lowest level that is not inside one rank?",
        "First this rank's own rows, by a function that calls itself on the first half and on the "
        "rest. Then rounds k = 0, 1, ...: the partner is rank ^ 2**k, and both have the same "
        "piece. Each keeps one half, sends the other, and adds what arrives. At the end undo the "
        "swaps.",
        "piece, other = halves if rank < partner else halves[::-1]; piece += sendrecv(other, "
        "partner, torch.empty_like(piece), partner, group); remember (partner, piece, other); then "
        "for each of them in reverse: sendrecv(piece, partner, other, partner, group)",
    ))
