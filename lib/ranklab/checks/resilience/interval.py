"""The checks of optimal_interval and goodput: beside exact formulas, and beside a simulation."""

import math
from functools import partial

from ranklab.checks.beside import expect, refused
from ranklab.checks.trial import explain
from ranklab.resilience.interval import random_gaps, simulate
from ranklab.resilience.traces import GPU_HOURS, HOUR, OPT_HOURS

LLAMA, OPT = GPU_HOURS / 16384 * HOUR, OPT_HOURS / 124 * HOUR  # seconds between failures
APART = 0.02


def best_interval(C, M):
    """The very best one: where the derivative of the time for a round of work is 0."""
    low, high = 0.0, 1.0
    for _ in range(80):
        t = (low + high) / 2
        low, high = (t, high) if math.log1p(-t) + t + C / M > 0 else (low, t)
    return low * M


def check_optimal_interval(optimal_interval):
    for C, M in ((60, LLAMA), (300, OPT), (30, 900), (300, 900), (50, 100), (90, 100), (100, 100),
                 (300, 100), (1000, 50), (0.01, 1)):  # the last: not a whole number of seconds
        where = f"checkpoints of {C} s, a failure each {M:.0f} s: the interval"
        got = optimal_interval(C, M)
        best, young = best_interval(C, M), math.sqrt(2 * C * M)
        x = math.sqrt(C / (2 * M))
        if isinstance(got, (int, float)) and abs(got / best - 1) <= APART:
            continue
        explain(where, got, best, {
            "Young's": (young, "His formula is only the first term. It is too long if a "
                        "checkpoint takes more than a little of the time between failures."),
            "Young's, less a checkpoint": (young - C, "Daly's formula has two more terms."),
            "Daly's with one term more than Young's": (young * (1 + x / 3) - C, "One term is "
                                                       "missing: C / 2 M, divided by 9."),
            "from the beginning of one checkpoint to the next": (
                young * (1 + x / 3 + x**2 / 9), "Count the work only, without the checkpoint."),
            "the time between failures": (M, "This holds only if a checkpoint takes twice as "
                                          "long as that, or more."),
            "sqrt(C M)": (math.sqrt(C * M), "A failure loses half an interval on average: the 2 "
                          "belongs under the root."),
            "what Daly's series gives where it does not hold": (
                young * (1 + x / 3 + x**2 / 9) - C, "If C is 2 M or more, the interval is M."),
        }, f"More than {APART:.0%} off. Take sqrt(2 C M) (1 + x / 3 + x^2 / 9) - C, where x^2 "
           "is C / 2 M; and M from C = 2 M on.")
    yield f"within {APART:.0%} of the best, for short checkpoints and for very long ones"
    for C, M in ((60, LLAMA), (300, OPT)):
        gaps = random_gaps(M, 20_000)
        lost = [1 - simulate(best_interval(C, M) * k / 20, C, gaps, 600) for k in range(8, 50)]
        mine = 1 - simulate(optimal_interval(C, M), C, gaps, 600)
        expect(mine <= 1.01 * min(lost), f"simulated, {mine:.2%} of the time is lost; with "
               f"another interval {min(lost):.2%}", "Compare intervals with simulate().")
        name = "Llama 3" if M == LLAMA else "OPT-175B"
        yield (f"{name}'s rate, a failure each {M / HOUR:.1f} h: save {C} s each "
               f"{optimal_interval(C, M) / 60:.0f} min; simulated, {mine:.1%} is lost, and "
               f"{min(lost):.1%} with the best of 42 intervals")
    for C, M in ((0, 100), (-1, 100), (10, 0), (10, -1)):
        refused(f"checkpoints of {C} s, a failure each {M} s", partial(optimal_interval, C, M))()
    yield "seconds that are not above 0 are a ValueError"


# --- goodput --------------------------------------------------------------------------------------

def check_goodput(goodput):
    for T, C, M, R in ((1100, 60, LLAMA, 600), (3600, 300, 3600, 600), (50, 20, 40, 30),
                       (2000, 0, 5000, 100), (100, 10, 400, 0), (10, 5, 1e4, 3e4)):
        where = f"{T} s of work, {C} s to save, {M:.0f} s between failures, {R} s to restart"
        whole, alone = math.expm1((T + C) / M), math.expm1(T / M)
        right = T / (M * math.exp(R / M) * whole)
        got = goodput(T, C, M, R)
        explain(f"{where}: goodput", got, right, {
            "that without failures": (T / (T + C), "Each failure costs a restart and the work that "
                                      "was not saved."),
            "that where no failure comes during a restart": (
                T / ((M + R) * whole), "A failure may cut a restart short, and then it begins "
                "again: it takes M (e^(R/M) - 1) on average."),
            "that where no failure comes during a checkpoint": (
                T / (M * math.exp(R / M) * alone + C), "A checkpoint that is cut short saves "
                "nothing: work and checkpoint must both fit."),
            "that without restarts": (T / (M * whole), "Each failure costs a restart, too."),
            "that without checkpoints": (T / (M * math.exp(R / M) * alone), "A round is work and "
                                         "a checkpoint."),
            "with checkpoints counted as work": ((T + C) / T * right, "Only the work is useful."),
            "the share that is lost": (1 - right, "Return the share that is useful."),
            "seconds for each second of work": (1 / right, "Turn the fraction over."),
            **{"a first-order estimate": (estimate, "Half an interval for each failure is right "
                                          "only if failures are rare. It is exact with e^(T/M).")
               for estimate in [T / (T + C) * (1 - (R + T / 2) / M)]},
            "an estimate of first order": (max(0.0, T / (T + C) * (1 - (R + (T + C) / 2) / M)),
                                           "It is exact with e^((T + C) / M)."),
        }, "A round of work and checkpoint takes M e^(R/M) (e^((T + C)/M) - 1) on average.")
    yield "exact for random failures, also during a checkpoint or a restart"
    for T, R in ((1e6, 60), (50, 1e6)):
        where = f"{T:.0f} s of work, {R:.0f} s to restart, a failure each 100 s"
        got = goodput(T, 60, 100, R)
        explain(f"{where}: goodput", got, 0.0, hint="Return 0.0, without an OverflowError: divide "
                "numerator and denominator by e^(...).")
    yield "0.0 where nothing ever gets done"
    for T, C, M, R in ((1100, 60, LLAMA, 600), (3600, 300, 7200, 1200)):
        seen, said = simulate(T, C, random_gaps(M, 100_000), R), goodput(T, C, M, R)
        expect(abs(said / seen - 1) < 0.01, f"{said:.4f}, and {seen:.4f} simulated", "Look at one "
               "case with simulate().")
    yield f"within 1% of 100,000 simulated failures: {said:.4f} and {seen:.4f}"
    few, many = (goodput(best_interval(C, LLAMA), C, LLAMA, 600) for C in (5, 60))
    yield (f"Llama 3's rate, restarts of 10 min: {few:.0%} with checkpoints of 5 s, {many:.0%} "
           "with 60 s; it had more than 90%")
    for T, M in ((0, 100), (10, 0), (-5, 100)):
        refused(f"{T} s of work, a failure each {M} s", partial(goodput, T, 1, M, 1))()
    yield "an interval or a mean that is not above 0 is a ValueError"
