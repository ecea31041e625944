"""find_straggler: on step seconds with the patterns of real runs."""

from typing import NamedTuple

import torch

from ranklab.checks.prover import Must, Proof, Slip, Stage, Traced
from ranklab.checks.resilience.edge import edge
from ranklab.resilience import find_straggler

EVERY = slice(None)
PAUSES = tuple((slice(r, None, 8), r, 6.0) for r in range(8))  # one step in eight, each another one
TURNS = tuple((slice(i, None, 5), EVERY, 4.0) for i in (2, 3, 4))  # three of five steps are long


class Case(NamedTuple):
    """Seconds of steps on ranks: a second each, with 3% noise, except for the changes.

    changes  (steps, ranks, factor), as indices
    options  threshold, recent
    """

    name: str
    steps: int
    ranks: int
    changes: tuple = ()
    unit: float = 1.0
    dtype: torch.dtype = torch.float32
    options: dict = {}

    def __str__(self):
        return self.name

    def seconds(self):
        random = torch.Generator().manual_seed(0)
        seconds = 1 + 0.03 * torch.randn(self.steps, self.ranks, generator=random)
        for steps, ranks, factor in self.changes:
            seconds[steps, ranks] *= factor
        return (self.unit * seconds).to(self.dtype)


class Shape(NamedTuple):
    """Seconds that must be refused."""

    shape: tuple

    def __str__(self):
        return f"seconds of shape {self.shape}"

    options = {}

    def seconds(self):
        return torch.ones(self.shape)


def _turns(slow):
    """Rank 2 is slow in `slow` of five steps."""
    return tuple((slice(i, None, 5), 2, 1.5) for i in range(slow)) + TURNS


def _see(fn, case):
    seconds = case.seconds()
    slow = fn(seconds, **case.options)
    name = "the list of false alarms" if case in QUIET else "the list of slow ranks"
    yield {"what it returns": Must(_kind(slow), "a list of int"),
           name: Traced(slow, lambda got, due: _thresholds(fn, case, got, due)),
           "`seconds` afterwards": Must(torch.equal(seconds, case.seconds()) or "changed", True)}


def _thresholds(fn, case, got, due):
    """Return the threshold up to which each wrong rank is slow: one list has many reasons."""
    if _kind(got) != "a list of int":
        return None
    return [edge(lambda threshold: rank in fn(case.seconds(), **case.options | {
        "threshold": threshold}), 0.1, 100) for rank in sorted({*got} ^ {*due})[:2]] or None


def _kind(slow):
    kinds = sorted({type(rank).__name__ for rank in slow}) if isinstance(slow, list) else ()
    return f"a list of {', '.join(kinds or ['int'])}" if isinstance(slow, list) else (
        f"a {type(slow).__name__}")


def by_counting(seconds, threshold=1.2, recent=32):
    """Count the steps in which a rank is slow, in Python."""
    if seconds.dim() != 2 or 0 in seconds.shape:
        raise ValueError(f"{tuple(seconds.shape)}")
    rows = seconds.tolist()[-recent:]
    ratios = [sorted(row[rank] / sorted(row)[(len(row) - 1) // 2] for row in rows)
              for rank in range(len(rows[0]))]
    slow = [rank for rank, of_rank in enumerate(ratios)
            if 2 * sum(ratio > threshold for ratio in of_rank) > len(rows)]
    return sorted(slow, key=lambda rank: -ratios[rank][(len(rows) - 1) // 2])


SLOW = (
    Case("one of 8 slow by half", 40, 8, ((EVERY, 5, 1.5),)),
    Case("two of 64 slow", 40, 64, ((EVERY, 9, 1.4), (EVERY, 40, 1.7))),
    Case("a slow rank among pauses", 40, 8, (*PAUSES, (EVERY, 2, 1.5))),
    Case("a slow rank in 3 of 5 steps", 40, 8, _turns(3)),
    Case("one of 2 slow", 40, 2, ((EVERY, 1, 1.3),)),
    Case("two of 4 slow", 40, 4, ((EVERY, 0, 1.7), (EVERY, 3, 1.9))),
    Case("3 steps", 3, 8, ((EVERY, 4, 1.5),)),
    Case("milliseconds", 40, 8, ((EVERY, 5, 1.5),), unit=1000),
    Case("seconds in float64", 40, 8, ((EVERY, 5, 1.5),), dtype=torch.float64),
)
QUIET = (
    Case("noise alone", 40, 8),
    Case("each rank pauses in one step of eight", 40, 8, PAUSES),
    Case("one rank pauses for 100 s, once", 40, 8, ((11, 3, 100.0),)),
    Case("all ranks slow in half of the steps", 40, 8, ((slice(0, None, 2), EVERY, 3.0),)),
    Case("all ranks slow from step 20 on", 40, 8, ((slice(20, None), EVERY, 2.0),)),
    Case("a slow rank in 2 of 5 steps", 40, 8, _turns(2)),
    Case("a slow rank in half of the last 32 steps", 32, 8, ((slice(0, None, 2), 2, 1.5),)),
    Case("three of 8 fast", 40, 8, tuple((EVERY, r, 0.5) for r in (0, 3, 6))),
    Case("one rank alone", 40, 1),
)
RECENT = (
    Case("rank 1 slow in the last 40 of 200 steps", 200, 8, ((slice(160, None), 1, 1.5),)),
    Case("rank 1 slow in the first 160 of 200 steps", 200, 8, ((slice(160), 1, 1.5),)),
)
OPTIONS = (
    Case("threshold=2, slow by half", 40, 8, ((EVERY, 5, 1.5),), options={"threshold": 2.0}),
    Case("threshold=1.1, slow by 15%", 40, 8, ((EVERY, 5, 1.15),), options={"threshold": 1.1}),
    Case("recent=8, slow in the last 8", 40, 8, ((slice(32, None), 5, 1.5),),
         options={"recent": 8}),
)
SHAPES = tuple(map(Shape, ((0, 4), (4, 0), (4,), (2, 3, 4))))
USUAL = "seconds.median(dim=1, keepdim=True).values"
OVER = "(seconds / usual).median(dim=0).values"
LAST = "    seconds = seconds[-recent:]\n"
KEPT = "[rank for rank in order if slowness[rank] > threshold]"
REFUSED = "seconds.dim() != 2 or not seconds.numel()"
OF_STEP = ("Steps differ in work, and all ranks can be slow in one: divide by the median rank's "
           "time in the same step, then take the median over the steps.")
MOST = ("A rank must be slow in more than half of the steps: take the median of its slowdown over "
        "the steps.")
STRAGGLER = Proof(
    find_straggler,
    Stage({"a slow rank, two of 64, half of the ranks; the slowest first": (),
           "no false alarm: noise, pauses, all slow together, some fast ranks":
           ("the list of false alarms",)}, _see, (*SLOW, *QUIET), oracle=by_counting),
    Stage("only the last steps count", _see, RECENT, oracle=by_counting),
    Stage("threshold and recent are taken as given", _see, OPTIONS, oracle=by_counting),
    Stage("no steps, no ranks or another shape are a ValueError", _see, SHAPES,
          oracle=by_counting),
    mistakes=(
        Slip("A few long pauses distort a mean over the steps. Take the median over the steps.",
             (OVER, "(seconds / usual).mean(dim=0)")),
        Slip("One long pause is enough to make a maximum large. " + MOST,
             (OVER, "(seconds / usual).amax(dim=0)")),
        Slip("It need not be slow in every step. " + MOST,
             (KEPT, "[rank for rank in order if (seconds > threshold * usual).all(dim=0)[rank]]")),
        Slip("This looks only at the last step. " + MOST, (OVER, "(seconds / usual)[-1]")),
        Slip(OF_STEP, (OVER, "seconds.mean(dim=0) / seconds.mean()"),
             (OVER, "seconds.sum(dim=0) / seconds.sum(dim=0).median()"),
             (OVER, "seconds.median(dim=0).values / seconds.median(dim=0).values.median()"),
             (USUAL, "seconds[:8].median()"), (USUAL, "seconds.median()"), (USUAL, "1.0")),
        Slip("A few fast ranks don't make stragglers of the others: compare with the median rank, "
             "not with the fastest.", (USUAL, "seconds.amin(dim=1, keepdim=True)")),
        Slip("The slow ranks themselves raise a mean over ranks: compare with the median rank.",
             (USUAL, "seconds.mean(dim=1, keepdim=True)")),
        Slip("Compare with the median rank, not with a faster one.",
             (USUAL, 'seconds.quantile(0.25, dim=1, keepdim=True, interpolation="lower")')),
        Slip("If half of the ranks are slow, the middle lies between fast and slow: take the lower "
             "of the two middle values, as torch.median does.",
             (USUAL, "seconds.quantile(0.5, dim=1, keepdim=True)"),
             (USUAL, 'seconds.quantile(0.5, dim=1, keepdim=True, interpolation="higher")')),
        Slip("A rank that is slow in less than half of the steps is not a straggler: take the "
             "median over the steps.",
             (OVER, "(seconds / usual).quantile(0.7, dim=0)")),
        Slip("A rank is slow in exactly half of the last `recent` steps, and that is not more than "
             "half. The newest step counts; of two middle values take the lower.",
             (OVER, "(seconds / usual).quantile(0.5, dim=0)"),
             (OVER, '(seconds / usual).quantile(0.5, dim=0, interpolation="higher")'),
             (LAST, LAST.replace("-recent:", "-recent - 1:-1"))),
        Slip("Compare each rank's seconds with the other ranks' in the same step, not with its own "
             "in other steps.",
             (USUAL, "seconds.median(dim=0, keepdim=True).values")),
        Slip("Only the last `recent` steps count.", (LAST, ""),
             (LAST, LAST.replace("-recent:", ":recent"))),
        Slip("The slowest comes first.", ("descending=True", "descending=False"),
             (f"return {KEPT}", f"return sorted({KEPT})")),
        Slip("There can be more than one slow rank: return all of them.",
             (f"return {KEPT}", "return order[:1] if slowness.max() > threshold else []")),
        Slip("`threshold` is an argument.", ("> threshold", "> 1.2")),
        Slip("`recent` is an argument.", ("[-recent:]", "[-32:]")),
        Slip("Return a list of ints, not a tensor: .tolist() converts it.",
             ("return [rank", "return [torch.tensor(rank)"),
             (f"return {KEPT}", "return slowness.gt(threshold).nonzero().flatten()"), torch=torch),
        Slip("Return [] if no rank is slow, not None.",
             (f"return {KEPT}", f"return {KEPT} or None")),
        Slip("This changes `seconds`: write into a new tensor.",
             ("    usual = ", "    seconds /= seconds.median()\n    usual = ")),
        Slip("Among eight ranks, none can be 3 standard deviations from the mean, however slow it "
             "is: compare with the median rank.",
             (KEPT, "[rank for rank in order if seconds.mean(dim=0)[rank] > seconds.mean() + 3 * "
              "seconds.mean(dim=0).std(correction=0)]")),
        Slip("Raise a ValueError if `seconds` does not have two dimensions, or has no steps or no "
             "ranks.",
             (REFUSED, "False"), (REFUSED, "not seconds.numel()"), (REFUSED, "seconds.dim() != 2"),
             (REFUSED, "seconds.dim() < 2 or not seconds.numel()"),
             (REFUSED, "seconds.dim() != 2 or not len(seconds)")),
    ), hints=(
        "All ranks can be slow in the same step, and any rank can pause in some steps. How is a "
        "slow rank different?",
        "In each step, divide each rank's time by that of the median rank. Then take the median of "
        "this ratio over the steps.",
        "seconds[-recent:]; usual = seconds.median(dim=1, keepdim=True).values; slowness = "
        "(seconds / usual).median(dim=0).values; sort the ranks above the threshold",
    ))
