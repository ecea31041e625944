"""elastic_batch: the plan's rules, and its gradients on 1 to 5 ranks, added up in one process."""

from itertools import pairwise
from typing import NamedTuple

import torch

from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.resilience import elastic_batch

FORM = "lists of (range, float)"


class Case(NamedTuple):
    """The arguments."""

    batch: int
    ranks: int
    micro_batch: int

    def __str__(self):
        return f"batch={self.batch}, ranks={self.ranks}, micro_batch={self.micro_batch}"


def _see_plan(fn, case):
    plan = fn(*case)
    form = _form(plan, case.ranks)
    yield {"the form of what it returns": Must(form, FORM)} | (
        _rules(case, plan) if form == FORM and min(case) > 0 else {})


def _form(plan, ranks):
    """Return FORM, or what is there instead. (A generator can be read only once.)"""
    if not isinstance(plan, list | tuple):
        return f"a {type(plan).__name__}"
    if items := [each for each in plan if not isinstance(each, list | tuple)]:
        return f"a list of {_kinds(items)}"
    if len(plan) != ranks:
        return f"{len(plan)} lists"
    pairs = [pair for each in plan for pair in each]
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return f"lists of {_kinds(pairs)}"
    if all(isinstance(positions, range) and isinstance(weight, int | float)
           for positions, weight in pairs):
        return FORM
    return "lists of ({}, {})".format(*map(_kinds, zip(*pairs)))


def _kinds(values):
    return " and ".join(sorted({type(value).__name__ for value in values}))


def _rules(case, plan):
    batch, ranks, micro_batch = case
    sizes = [[len(positions) for positions, _ in each] for each in plan]
    shares = [sum(each) for each in sizes]
    times = -(-(-(-batch // ranks)) // micro_batch)
    places = sorted(place for each in plan for positions, _ in each for place in positions)
    off, weight, n = max(((abs(weight - len(positions) / batch), weight, len(positions))
                          for each in plan for positions, weight in each), default=(0.0, 0, 0))
    return {
        "the list of positions that come twice": Must(
            sorted({a for a, b in pairwise(places) if a == b})[:8], []),
        "the list of positions in no micro-batch": Must(
            sorted({*range(batch)} - {*places})[:8], []),
        "the list of positions outside the batch": Must(
            sorted({*places} - {*range(batch)})[:8], []),
        "the largest micro-batch": AtMost(max(map(max, filter(None, sizes)), default=0),
                                          micro_batch,
                                          "the largest micro-batch has {:g} positions; at most "
                                          "{:g} are allowed"),
        "the number of micro-batches of each rank": Must(
            [len(each) for each in sizes][:8], [times] * min(ranks, 8)),
        "the difference of shares": AtMost(max(shares) - min(shares), 1,
                                           f"ranks take {shares[:5]} positions, which differ by "
                                           f"{{:g}}, not by at most {{:g}}"),
        "the weights": AtMost(off, 1e-9, f"the weight of {n} of {batch} positions is {weight:.6g}, "
                                         f"not {n / batch:.6g}"),
    }


def _see_gradient(fn, case):
    """Look at a gradient; each position's loss has a different size, so each weight counts."""
    x = torch.randn(case.batch, 3, generator=torch.Generator().manual_seed(0))
    x = (x * torch.arange(1, case.batch + 1)[:, None]).to(device())
    w = torch.full((3,), 0.1, device=device(), requires_grad=True)
    w.grad = torch.zeros_like(w)
    for of_rank in fn(*case):
        for positions, weight in of_rank:
            if len(positions):
                scores = x[list(positions)] @ w
                (weight * (scores.tanh() + scores**2).mean()).backward()
    yield {"the gradient": w.grad}


def dealt_like_cards(batch, ranks, micro_batch):
    if min(batch, ranks, micro_batch) < 1:
        raise ValueError(f"{batch}, {ranks}, {micro_batch}")
    hands = [range(rank, batch, ranks) for rank in range(ranks)]
    return [[(hand[i:i + micro_batch], len(hand[i:i + micro_batch]) / batch)
             for i in range(0, len(hands[0]), micro_batch)] for hand in hands]


def on_one_rank(batch, ranks, micro_batch):
    return [[(range(batch), 1.0)]]


CASES = tuple(Case(*each) for each in (
    (24, 1, 4), (25, 4, 3), (24, 4, 3), (24, 5, 2), (7, 2, 8), (23, 3, 3), (5, 4, 1), (2, 3, 4),
    (9, 4, 2), (1000, 7, 16)))
GRADIENTS = tuple(Case(batch, ranks, micro_batch) for ranks in (5, 1, 4, 2, 3)
                  for batch, micro_batch in ((23, 3), (4, 1), (7, 10)))
BELOW = Case(0, 2, 1), Case(4, 0, 1), Case(4, 2, 0), Case(-4, 2, 1), Case(4, -2, 1), Case(4, 2, -1)
WEIGHT = "len(part) / batch"
SHARE = "shard_range(batch, rank, ranks)"
TIMES = "times = -(-largest // micro_batch)"
PARTS = "[shard_range(len(positions), i, times) for i in range(times)]"
CUT = "positions[part.start:part.stop]"
ADDED = "plan.append([(positions[part.start:part.stop], len(part) / batch) for part in parts])"
CHECK = "    if min(batch, ranks, micro_batch) < 1:"
FULL = "[range(len(positions))[i * micro_batch:(i + 1) * micro_batch] for i in range(times)]"
EQUAL = ("Sharded models communicate in each micro-batch, so a rank with fewer makes the others "
         "hang. Cut each rank's share into as many micro-batches as the fullest rank needs.")
SAME = ("In a mean over the batch, all positions count the same: a micro-batch of n positions has "
        "weight n / batch, whatever the number of ranks.")


def weighed(*weights):
    """Return edits to these weights, for even pieces and for pieces as large as possible."""
    return [(WEIGHT, weight, PARTS, parts) for weight in weights for parts in (PARTS, FULL)]


ELASTIC = Proof(
    elastic_batch,
    Stage({"each position once, at most micro_batch together; ranks differ by at most one": (),
           "all ranks have the same number of micro-batches, and no more than needed; n / batch":
           ("the number of micro-batches of each rank", "the weights")},
          _see_plan, CASES, oracle=dealt_like_cards),
    Stage("the gradients of 1 to 5 ranks are those of one process", _see_gradient, GRADIENTS,
          oracle=on_one_rank),
    Stage("numbers below 1 are a ValueError", _see_plan, BELOW, oracle=dealt_like_cards),
    mistakes=(
        Slip("Here each micro-batch has the same weight, but some have fewer positions. " + SAME,
             *weighed("1 / times / ranks", "1 / times / ranks * bool(part)")),
        Slip("This divides by the rank's own number of positions, so each rank computes its own "
             "mean. " + SAME, *weighed("len(part) / max(1, len(positions))")),
        Slip("This is the mean of the ranks' means, as in DDP. " + SAME,
             *weighed("len(part) / max(1, len(positions)) / ranks")),
        Slip("A weight of n gives a sum, not a mean. " + SAME, *weighed("len(part)")),
        Slip("All ranks' gradients are added up, and nothing divides by the number of ranks later. "
             + SAME,
             *weighed("len(part) / batch * ranks")),
        Slip("The weight must depend on the number of positions in the micro-batch. " + SAME,
             *weighed(*(f"{each}{times}" for each in ("micro_batch / batch", "1 / batch",
                                                     "1 / micro_batch")
                       for times in ("", " * bool(part)")))),
        Slip(EQUAL, ("        positions = ", "        times = -(-len(shard_range(batch, rank, "
                     "ranks)) // micro_batch)\n        positions = "),
             (PARTS, f"[part for part in {PARTS} if part]")),
        Slip("The fullest rank needs fewer micro-batches: its positions / micro_batch, rounded up.",
             (TIMES, "times = largest"), (TIMES, TIMES + " + 1"),
             (TIMES, "times = largest // micro_batch + 1"),
             (TIMES, "times = -(-batch // micro_batch)")),
        Slip("Round positions / micro_batch up: otherwise a micro-batch has more than micro_batch "
             "positions, and might not fit into memory.",
             (TIMES, "times = max(1, largest // micro_batch)")),
        Slip("The fullest rank decides: it has batch / ranks positions, rounded up.",
             ("-(-batch // ranks)", "max(1, batch // ranks)")),
        Slip("micro_batch is the largest number of positions in a micro-batch, not the number of "
             "micro-batches.", (TIMES, "times = micro_batch")),
        Slip("This drops the remainder of the batch: let the first ranks take one more position "
             "each.",
             (SHARE, "range(rank * (batch // ranks), (rank + 1) * (batch // ranks))")),
        Slip("Every rank waits for the fullest one, so the counts must differ by at most one: "
             "don't leave the whole shortfall to the last rank.",
             (SHARE, "range(rank * largest, min(batch, (rank + 1) * largest))"),
             (SHARE, "range(rank * largest, max(rank * largest, min(batch, (rank + 1) * "
              "largest)))")),
        Slip("Here the last rank takes the whole remainder. The counts must differ by at most one: "
             "let the first ranks take one more each.",
             (SHARE, "range(rank * (batch // ranks), batch if rank == ranks - 1 else (rank + 1) * "
              "(batch // ranks))")),
        Slip("Here every rank has the first positions of the batch. Each rank needs its own share, "
             "and cuts that: positions[part.start:part.stop].",
             (SHARE, f"range(len({SHARE}))"), (SHARE, "range(largest)"), (CUT, "part")),
        Slip("Here every rank has the whole batch. Each needs its own share.",
             (SHARE, "range(batch)")),
        Slip("A list can be read twice, but a generator or iterator cannot: return a list of "
             "lists.",
             ("plan.append([(", "plan.append(((", "for part in parts])", "for part in parts))"),
             ("    return plan", "    return iter(plan)")),
        Slip("Return positions as a range: its memory does not grow with the batch.",
             (f"({CUT}, ", f"(list({CUT}), "), (f"({CUT}, ", f"(tuple({CUT}), "),
             (f"({CUT}, ", "(len(part), ")),
        Slip("The plan consists of pairs: (positions, weight).",
             (ADDED, "plan.append([positions[part.start:part.stop] for part in parts])")),
        Slip("The plan has a list for each rank: [[(positions, weight), ...] of rank 0, ...].",
             ("plan.append([", "plan.extend(["), ("    return plan", "    return plan[0]")),
        Slip("Raise a ValueError if any of the three arguments is below 1.",
             (CHECK, "    if batch < 1:"), (CHECK, "    if False:"),
             (CHECK, "    if min(batch, ranks, micro_batch) < 0:"),
             (CHECK, "    if min(ranks, micro_batch) < 1:"),
             (CHECK, "    if min(batch, ranks) < 1:")),
    ), hints=(
        "How many positions does the fullest rank have, and how many micro-batches do they need?",
        "Every rank cuts its share into that many micro-batches, even a rank with one position "
        "fewer. The mean over n positions has the weight n / batch.",
        "times = ceil(ceil(batch / ranks) / micro_batch); mine = shard_range(batch, rank, ranks); "
        "part = shard_range(len(mine), i, times); (mine[part.start:part.stop], len(part) / batch)",
    ))
