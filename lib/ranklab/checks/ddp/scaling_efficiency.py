"""The check of scaling_efficiency, against throughput per rank."""

import torch

from ranklab.checks.beside import expect
from ranklab.checks.ddp.calls import called, refuses
from ranklab.checks.trial import explain

FROM_ONE = (  # {ranks: seconds per step}
    {1: 0.8, 2: 0.5, 4: 0.25},
    {1: 1.0, 2: 1.0, 8: 1.25},
    {1: 0.9, 2: 0.4, 3: 0.37},  # more than perfect on two ranks, and no round numbers
)
OTHERS = (
    {8: 0.3, 2: 0.9, 5: 0.45, 4: 0.5},  # in no order; 5 is no multiple of 2
    {3: 2.0},
)
NO_MEASUREMENTS = {}, {0: 1.0, 2: 1.0}, {1: 1.0, 2: 0.0}, {1: 1.0, 2: -0.5}
BASE = {"KeyError: 1": "Nobody measured on one rank here: take the fewest ranks there are, "
        "min(seconds), as the base."}
KINDS = {"strong": "Strong: the same batch for all together, so R ranks should need base/R of the "
         "base's time. Efficiency = that time / the measured one.",
         "weak": "Weak: the same batch on each rank, so the time should stay: base / measured."}


def check_scaling_efficiency(fn):
    for cases, sentence in (
            (FROM_ONE, "right for strong and weak scaling from one rank"),
            (OTHERS, "right where nobody measured on one rank: against the fewest there are")):
        for kind in KINDS:
            for seconds in cases:
                _compare(fn, seconds, kind)
        yield sentence
    refuses(fn, {"kind='string'": ({1: 1.0, 2: 1.0}, "string")}
            | {f"seconds={seconds}": (seconds, "strong") for seconds in NO_MEASUREMENTS})
    yield "a ValueError for a kind that it does not know, and for what is no measurement"


def _compare(fn, seconds, kind):
    where, ranks = f"{kind} scaling, {seconds}", sorted(seconds)
    got = called(where, BASE, fn, {"seconds": seconds, "kind": kind})
    expect(isinstance(got, dict) and set(got) == set(ranks), f"{where}: it returns {got!r}",
           "Return a dict: {ranks: efficiency}, with all the ranks that were given.")
    expect(list(got) == ranks, f"{where}: the ranks come out as {list(got)}",
           "In the order of ranks, for tables and curves: go through sorted(seconds).")
    R, times, values = torch.tensor([(each, seconds[each], got[each]) for each in ranks],
                                    dtype=torch.float64).T
    speed = (1 if kind == "strong" else R) / times / R  # of each rank
    right = speed / speed[0]
    explain(f"{where}: the efficiency on {ranks} ranks", values, right,
            _slips(right, R, times[0] / times), KINDS[kind])


def _slips(right, ranks, speed_up):
    base = int(ranks[0])
    return {
        "per cent": (100 * right, "Return the fraction: 1 is perfect."),
        "the speed-up": (speed_up, "Efficiency is the speed-up per rank that was added."),
        "that of strong scaling": (base * speed_up / ranks, "In weak scaling each rank keeps its "
                                   "batch, so perfect is the same time, whatever the ranks."),
        "the speed-up / R": (speed_up / ranks, f"Perfect would be {base}/R of the time on {base} "
                             "ranks, not 1/R of it."),
        "upside down": (1 / right, "Slower steps must give a smaller efficiency."),
        "1 at most": (right.clamp(max=1), "More than 1 can be right: each rank's part got smaller, "
                      "and may fit into a cache now. Do not cut it off."),
        "rounded": (right.round(decimals=2), "Do not round: leave that to the line that prints "
                                             "it."),
    } | {"measured against that on "
         f"{R:g}": (right / right[i], f"The base is {R:g} here, but it is the "
                                        f"fewest ranks: min(seconds), which is {base}.")
         for i, R in enumerate(ranks)}
