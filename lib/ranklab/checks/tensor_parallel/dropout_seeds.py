"""dropout_seeds: all seeds of a run, side by side."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ranklab.checks.prover import AtMost, Proof, Slip, Stage, Told
from ranklab.tensor_parallel.dropout import dropout_seeds

SEEDS = 0, 1, 2, 3, 10, 41, 42, 43, 1337
MANY = 2048  # data ranks of the largest runs


class Runs(NamedTuple):
    """Runs that differ in their seed; `ranks` are the tensor ranks to compare."""

    R: int
    ranks: tuple
    data: int = 8
    seeds: tuple = SEEDS

    def __str__(self):
        return f"{self.data} x {self.R} ranks"


@dataclass
class Alike:
    """Which kinds of seeds are equal; the example is only for the reader."""

    kinds: str
    example: str = field(compare=False)

    def __str__(self):
        return self.kinds


CASES = (*(Runs(R, tuple(range(R))) for R in (2, 3, 8, 16, 1)), Runs(8, (0, 7), MANY, (0, 1)))
TWICE = tuple(f"a seed shared by two {owners}" for owners in (
    "ranks, or shared and own, of one data rank", "data ranks", "runs"))


def no_seeds(*_):
    """Replace the answer as an oracle: without seeds, none is wrong."""


def _pair_of(value):
    """Return the two items of a value, or None."""
    items = tuple(value) if isinstance(value, Iterable) else ()
    return items if len(items) == 2 else None


def _see(fn, case):
    calls = [] if fn is no_seeds else list(
        itertools.product(case.seeds, range(case.data), case.ranks))
    state = torch.get_rng_state()
    results = {call: fn(*call, case.R) for call in calls}
    is_drawn = not torch.equal(state, torch.get_rng_state())
    torch.set_rng_state(state)
    pairs = {call: _pair_of(result) for call, result in results.items()}
    if odd := [call for call, pair in pairs.items() if pair is None]:
        yield {"what it returns": f"{results[odd[0]]!r:.60}"}
        return
    kinds = {type(number).__name__ for pair in pairs.values() for number in pair}
    yield {"what it returns": "two seeds",
           "torch's generator afterwards": "another one" if is_drawn else "as it was",
           "the type of seeds": sorted(kinds | {"int"})}
    if is_drawn or kinds - {"int"}:
        return
    again = {call: _pair_of(fn(*call, case.R)) for call in calls}
    yield {"a second call": "the same seeds" if again == pairs else "other seeds",
           "seeds that torch.manual_seed does not take": AtMost(
               sum(abs(number) >= 2**63 for pair in pairs.values() for number in pair), 0)}
    if again == pairs:
        yield _alike(pairs)


def _alike(pairs):
    """Return seeds that are equal and must not be, and vice versa, each with an example."""
    shared, uses, alike = {}, {}, {name: {} for name in (*TWICE, "shared")}
    for (seed, data_rank, rank), (number, own) in pairs.items():
        if shared.setdefault((seed, data_rank), number) != number:
            alike["shared"].setdefault("differs", f"not what tensor rank 0 has: seed {seed}, data "
                                       f"rank {data_rank}, tensor rank {rank}")
            number = shared[seed, data_rank]
        for use, value in (((seed, data_rank, "shared"), number),
                           ((seed, data_rank, f"own of tensor rank {rank}"), own)):
            first = uses.setdefault(value, use)
            if first != use:
                where = TWICE[2 if use[0] != first[0] else 1 if use[1] != first[1] else 0]
                kinds = " with ".join(sorted(each[2].split()[0] for each in (use, first)))
                alike[where].setdefault(kinds, f"{value}: " + ", and ".join(
                    f"{kind} of seed {seed}, data rank {data_rank}"
                    for seed, data_rank, kind in (first, use)))
    return {name: Told(Alike(" and ".join(sorted(kinds)), next(iter(kinds.values()), "")), _example)
            for name, kinds in alike.items()}


def _example(alike, _):
    return alike.example


FIRST = "seed * SPREAD + data_rank * (tensor_ranks + 1)"
OWN = "first + 1 + tensor_rank"
DROPOUT_SEEDS = Proof(
    dropout_seeds,
    Stage({"shared: the same on all ranks of a tensor group, a different one for each data rank":
           (),
           f"own: a different one on every rank, up to {MANY} x 8 ranks; none is a shared one": (),
           "runs with different seeds share none; nothing is sent or drawn": TWICE[2:]},
          _see, CASES, oracle=no_seeds),
    mistakes=(
        Slip("Runs with adjacent seeds would share numbers: use seed * SPREAD, which leaves room "
             "for all seeds of one run before the next.",
             (FIRST, FIRST.replace("seed * SPREAD", "seed")),
             (FIRST, FIRST.replace("SPREAD", "1000")), (FIRST, FIRST.replace("SPREAD", "10"))),
        Slip("Data ranks have different rows, so each needs its own seeds: data_rank is missing.",
             (FIRST, "seed * SPREAD")),
        Slip("Each data rank needs tensor_ranks + 1 numbers, one shared and one for each tensor "
             "rank. They start at offset data_rank * (tensor_ranks + 1).",
             (FIRST, "seed * SPREAD + data_rank * tensor_ranks"),
             (FIRST, "seed * SPREAD + data_rank"), (FIRST, "seed * SPREAD + data_rank * 8"),
             (FIRST, "seed * SPREAD + data_rank * 9"),
             (FIRST, "seed * SPREAD + data_rank + tensor_ranks")),
        Slip("Tensor rank 0 gets the shared seed as its own: own seeds must begin at first + 1.",
             (OWN, "first + tensor_rank")),
        Slip("own must be different on every tensor rank.", (OWN, "first + 1"),
             ("first + 1 + tensor_rank", "first + tensor_ranks")),
        Slip("shared must not depend on tensor_rank: all ranks must drop the same places of the "
             "tensors they all hold.",
             ("return first,", "return first + tensor_rank,"),
             ("return first,", "return first - tensor_rank,"),
             (f"return first, {OWN}", f"return {OWN}, first")),
        Slip("Leave torch's generator alone: it belongs to the caller. Compute the seeds from the "
             "arguments.", (OWN, "torch.randint(2**31, ()).item()"),
             ("    first =", "    torch.manual_seed(seed)\n    first =")),
        Slip("Seeds must depend only on the arguments: the same call must return the same seeds.",
             (OWN, "random.getrandbits(40)"), random=random),
        Slip("Seeds for torch.manual_seed are whole numbers: return ints, not tensors or floats.",
             (f"return first, {OWN}", f"return torch.tensor(first), torch.tensor({OWN})"),
             (f"return first, {OWN}", f"return float(first), float({OWN})")),
        Slip("Keep the seeds below 2**63 for torch.manual_seed.",
             (FIRST, f"({FIRST}) * 2**60")),
    ), hints=(
        "How many different seeds does one data_rank need?",
        "tensor_ranks + 1 of them: one shared, and one for each tensor rank. Number them all.",
        "first = seed * SPREAD + data_rank * (tensor_ranks + 1); own: first + 1 + tensor_rank",
    ))
