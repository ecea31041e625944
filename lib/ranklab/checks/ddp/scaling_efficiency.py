"""scaling_efficiency, compared with the throughput of each rank."""

from typing import NamedTuple

from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.ddp import scaling_efficiency
from ranklab.engine.report import count_ranks

KINDS = "strong", "weak"
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


class Measured(NamedTuple):
    seconds: dict
    kind: str

    def __str__(self):
        return f"{self.kind} scaling, {self.seconds}"


def _see(fn, case):
    seconds = dict(case.seconds)
    shares = fn(seconds, case.kind)
    if not isinstance(shares, dict):
        yield {"what it returns": shares}
        return
    yield {"what it returns": "a dict", "the list of ranks in it": list(shares),
           **{f"the efficiency on {count_ranks(R)}": float(share) for R, share in shares.items()},
           "`seconds` afterwards": seconds}


def by_throughput(seconds, kind):
    if kind not in KINDS or not seconds or any(R < 1 or s <= 0 for R, s in seconds.items()):
        raise ValueError(f"{kind}, {seconds}")
    speed = {R: (1 if kind == "strong" else R) / seconds[R] / R for R in sorted(seconds)}
    fewest, *_ = speed
    return {R: each / speed[fewest] for R, each in speed.items()}


def _cases(*measurements):
    return tuple(Measured(seconds, kind) for kind in KINDS for seconds in measurements)


SHARE, BASE = 'base / ranks if kind == "strong" else 1', "base = min(seconds)"
EACH, RANKS = "perfect[ranks] * seconds[base] / seconds[ranks]", "for ranks in sorted(seconds)"
KNOWN, TIMES = 'kind not in ("strong", "weak")', " or min(seconds.values()) <= 0"
EFFICIENCY = Proof(
    scaling_efficiency,
    Stage("right for strong and weak scaling from one rank", _see, _cases(*FROM_ONE),
          oracle=by_throughput),
    Stage("right where one rank was not measured: compared with the fewest ranks that were", _see,
          _cases(*OTHERS), oracle=by_throughput),
    Stage("a ValueError for a kind that it does not know, and for what is not a measurement", _see,
          (Measured({1: 1.0, 2: 1.0}, "string"),
           *(Measured(seconds, "strong") for seconds in NO_MEASUREMENTS)), oracle=by_throughput),
    mistakes=(
        Slip("Return a fraction, not a percentage: 1 is perfect.", (EACH, f"100 * {EACH}")),
        Slip("That is the speed-up. In strong scaling, the efficiency is the speed-up divided by "
             "how many times more ranks there are.", (EACH, "seconds[base] / seconds[ranks]")),
        Slip("In weak scaling each rank keeps its batch size, so the perfect time is the same for "
             "any number of ranks.", (SHARE, "base / ranks")),
        Slip("The two kinds are swapped: in strong scaling R ranks should need base/R of the time, "
             "in weak scaling the same time.", (SHARE, '1 if kind == "strong" else base / ranks')),
        Slip("Slower steps must give a lower efficiency: your fraction is upside down.",
             (EACH, "seconds[ranks] / (perfect[ranks] * seconds[base])")),
        Slip("In strong scaling, more ranks should take less time: base/R of it, not R/base times "
             "as long.",
             (SHARE, 'ranks / base if kind == "strong" else 1')),
        Slip("An efficiency above 1 can be right: each rank's part is smaller and may now fit into "
             "a cache. Do not clip it.", (EACH, f"min(1.0, {EACH})")),
        Slip("Do not round: leave that to the code that prints it.",
             (EACH, f"round({EACH}, 2)"), (EACH, f"round({EACH}, 3)")),
        Slip("The base belongs in the result as well, with an efficiency of 1.",
             (RANKS, f"{RANKS}[1:]")),
        Slip("Return a dict, {ranks: efficiency}, with all the ranks that were given.",
             ("return {ranks: ", "return {"), (f"return {{ranks: {EACH}", f"return [{EACH}",
                                               "sorted(seconds)}", "sorted(seconds)]")),
        Slip("There is no measurement on one rank here: use the fewest ranks there are, "
             "min(seconds), as the base.", (BASE, "base = 1")),
        Slip("The base is the fewest ranks, min(seconds), whatever the order of the keys.",
             (BASE, "base = next(iter(seconds))")),
        Slip("The first key need not be the base: use min(seconds), and go through "
             "sorted(seconds).",
             (BASE, "base = next(iter(seconds))", RANKS, "for ranks in seconds")),
        Slip("The base is the fewest ranks, min(seconds), not the most.",
             (BASE, "base = max(seconds)")),
        Slip("A perfect time is base/R of the time on the fewest ranks, not 1/R of it.",
             ("base / ranks if", "1 / ranks if")),
        Slip("R need not be a multiple of the base: use base / R, not integer division.",
             ("base / ranks if", "1 / (ranks // base) if"), ("base / ranks if",
                                                             "1 / round(ranks / base) if")),
        Slip("Return the entries in order of ranks, for tables and curves: go through "
             "sorted(seconds).",
             ("in sorted(seconds)", "in seconds"),
             ("in sorted(seconds)", "in sorted(seconds, key=seconds.get)")),
        Slip("`seconds` belongs to the caller: make a new dict.",
             ("    perfect =", "    start = seconds[base]\n    perfect =",
              f"return {{ranks: {EACH} {RANKS}}}",
              "for ranks in seconds:\n        seconds[ranks] = perfect[ranks] * start / "
              "seconds[ranks]\n    return dict(sorted(seconds.items()))"),
             ("    perfect =", "    start = seconds.pop(base)\n    seconds = seconds | {base: "
              "start}\n    perfect =")),
        Slip("Keep the first lines of the stub: a call that makes no sense must raise a "
             "ValueError. It must not return a number, or fail with a ZeroDivisionError.",
             (KNOWN, "kind is None"), (TIMES, ""), ("min(seconds) < 1 or ", ""),
             ("<= 0", "< 0")),
    ), hints=(
        "Efficiency is what you got divided by what would be perfect. What would be perfect?",
        "Strong: base/R of the base's time. Weak: the base's time. The base is min(seconds), the "
        "fewest ranks that were measured.",
        "base = min(seconds); perfect = base / ranks if kind == 'strong' else 1; the efficiency is "
        "perfect * seconds[base] / seconds[ranks]. First raise a ValueError for any other kind.",
    ))
