"""The check of find_straggler: given seconds, with what happens in real runs."""

from functools import partial

import torch

from ranklab.checks.beside import expect, refused
from ranklab.checks.trial import called_with

ALL_STEPS = "A rank must be slow in more than half of the steps."
NOISE = "A slow rank takes 1.2 times as long as the others in most steps. Less than that is noise."


def _seconds(steps, ranks, seed=0):
    """A second each, with 3% of noise."""
    random = torch.Generator().manual_seed(seed)
    return 1 + 0.03 * torch.randn(steps, ranks, generator=random)


def _with(steps, ranks, *changes):
    """changes: (steps, ranks, factor), as indices"""
    seconds = _seconds(steps, ranks)
    for some_steps, some_ranks, factor in changes:
        seconds[some_steps, some_ranks] *= factor
    return seconds


def _turns(slow):
    """Two short steps, then three of four times their work; rank 2 is slow in `slow` of five."""
    return _with(40, 8, *((slice(i, None, 5), 2, 1.5) for i in range(slow)),
                 *((slice(i, None, 5), EVERY, 4.0) for i in (2, 3, 4)))


EVERY = slice(None)
PAUSES = [(slice(r, None, 8), r, 6.0) for r in range(8)]  # one step in eight, each rank another one
# name: (seconds, the ranks, what else it may say and why)
CASES = {
    "noise alone": (_seconds(40, 8), [], NOISE),
    "one of 8 slow by half": (_with(40, 8, (EVERY, 5, 1.5)), [5], "Compare each rank with the "
                              "median rank of its step. (Of 8 ranks none can be 3 standard "
                              "deviations away from their mean.)"),
    "two of 64 slow": (_with(40, 64, (EVERY, 9, 1.4), (EVERY, 40, 1.7)), [40, 9], "Return all slow "
                       "ranks, the slowest first."),
    "each rank pauses in one step of eight": (_with(40, 8, *PAUSES), [], ALL_STEPS),
    "one rank pauses for 100 s, once": (_with(40, 8, (11, 3, 100.0)), [], ALL_STEPS),
    "a slow rank among pauses": (_with(40, 8, *PAUSES, (EVERY, 2, 1.5)), [2], ALL_STEPS),
    "all ranks slow in half of the steps": (
        _with(40, 8, (slice(0, None, 2), EVERY, 3.0)), [], "If all are slow, none is a straggler: "
        "divide by the median of the same step."),
    "all ranks slow from step 20 on": (_with(40, 8, (slice(20, None), EVERY, 2.0)), [], "If "
                                       "all are slow, none is a straggler: compare with the "
                                       "others, not with the past."),
    "rank 1 slow in the last 40 of 200 steps": (
        _with(200, 8, (slice(160, None), 1, 1.5)), [1], "Look at the last `recent` steps."),
    "rank 1 slow in the first 160 of 200 steps": (
        _with(200, 8, (slice(160), 1, 1.5)), [], "Look at the last `recent` steps: the rank is "
        "fast again."),
    "a slow rank in 3 of 5 steps": (_turns(3), [2], "In each step divide by the median rank of "
                                    "this step; then it is slow in most of them."),
    "a slow rank in 2 of 5 steps": (_turns(2), [], ALL_STEPS),
    "a slow rank in half of the last 32 steps": (
        _with(32, 8, (slice(0, None, 2), 2, 1.5)), [], "Slow is more than half of the steps."),
    "one of 2 slow": (_with(40, 2, (EVERY, 1, 1.3)), [1], "Of two ranks the median is the faster "
                      "one: torch.median takes the lower of two."),
    "two of 4 slow": (_with(40, 4, (EVERY, 0, 1.7), (EVERY, 3, 1.9)), [3, 0], "Half of the ranks "
                      "may be slow: torch.median takes the lower of two."),
    "three of 8 fast": (_with(40, 8, *((EVERY, r, 0.5) for r in (0, 3, 6))), [], "A few fast "
                        "ranks don't make stragglers of the others: compare with the "
                        "median, not with the fastest."),
    "one rank alone": (_seconds(40, 1), [], "One rank waits for nobody."),
    "3 steps": (_with(3, 8, (EVERY, 4, 1.5)), [4], "There may be fewer than `recent` steps."),
    "milliseconds": (1000 * _with(40, 8, (EVERY, 5, 1.5)), [5], "Ratios have no unit."),
}


def check_find_straggler(find_straggler):
    for case, (seconds, right, hint) in CASES.items():
        given = seconds.clone()
        with called_with(case):
            found = find_straggler(given)
        _is(case, found, right, hint)
        expect(torch.equal(given, seconds), f"{case}: `seconds` is changed", "Divide into a new "
               "tensor.")
    yield "a slow rank, two of 64, half of the ranks; the slowest first"
    yield "no false alarm: noise, pauses, all slow together, one fast rank"
    yield "only the last steps count"
    hint = "`threshold` and `recent` are arguments."
    slow = _with(40, 8, (EVERY, 5, 1.5))
    _is("threshold=2", find_straggler(slow, threshold=2.0), [], hint)
    _is("threshold=1.1, slow by 15%", find_straggler(_with(40, 8, (EVERY, 5, 1.15)), threshold=1.1),
        [5], hint)
    _is("recent=8, slow in the last 8", find_straggler(_with(40, 8, (slice(32, None), 5, 1.5)),
                                                       recent=8), [5], hint)
    yield "threshold and recent are taken as given"
    for shape in ((0, 4), (4, 0), (4,)):
        with called_with(where := f"seconds of shape {shape}"):
            refused(where, partial(find_straggler, torch.ones(shape)))()
    yield "no steps, no ranks or another shape are a ValueError"


def _is(case, found, right, hint):
    expect(isinstance(found, list) and all(type(rank) is int for rank in found),
           f"{case}: it returns {found!r}", "A list of ints: .tolist() makes one.")
    if sorted(found) == sorted(right):
        expect(found == right, f"{case}: the order is {found}, not {right}", "The slowest first.")
    expect(found == right, f"{case}: it says {found}, not {right}", hint)
