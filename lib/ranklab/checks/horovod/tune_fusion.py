"""The check of tune_fusion: on 30 noisy workloads of the model; the score is printed."""

from collections import Counter
from numbers import Integral
from statistics import mean, median

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.horovod import tune_fusion
from ranklab.horovod.cost import CALLS, NoisySteps, Workload

WORKLOADS = [Workload(seed) for seed in range(30)]  # each knows its best after one check
RIGHT, SLOWER, WORST = 27, 1.05, 1.5
EDGES = (1, 2**20, 2**26), (3, 2**20, 2**26), (7, 1, 2**30), (50, 4096, 4096), (30, 1000, 1003)
# What is said.
BEYOND = "Stay in the range: it includes both ends, and nothing beyond them."
SHARE = "Divide up the calls before you begin; calls left over by rounding need not be used."
WHOLE = "Bytes are whole numbers: use round(), and return the threshold, not its seconds."
MEASURE = "No single threshold suits all models and networks: call seconds_of to measure."
BOTH_ENDS = "low and high belong to the range: measure both."
RATIOS = "bytes: take equal ratios."
ONCE = "Each threshold is measured only once: take the median of several calls."
MEDIANS = ("One step in ten takes three times as long: that spoils a mean, but not the median of "
           "several calls.")
MEASURED = "Return a threshold that you have measured, the one with the lowest median."
LOWEST = "Return the threshold whose steps are fastest: the one with the lowest median."
FINER = "Measure more thresholds, between the neighbours of the best."
AGAIN = "Measure the best ones again: with more calls, a median has less noise."


class Measured(NoisySteps):
    """seconds_of, as the check gives it: a forbidden call is a Mistake.

    times  {threshold: the seconds that it returned}
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.times = {}

    def __call__(self, threshold):
        low, high = self.workload.low, self.workload.high
        expect(low <= threshold <= high, f"it measures at {threshold:,.0f} bytes, and not from "
               f"{low:,} to {high:,}", BEYOND)
        expect(len(self.asked) < self.calls, f"it measures more than calls={self.calls} times",
               SHARE)
        seconds = super().__call__(threshold)
        self.times.setdefault(threshold, []).append(seconds)
        return seconds

    def lowest(self, average):
        """Return the threshold that is fastest by the averages of its measurements."""
        return min(self.times, key=lambda threshold: average(self.times[threshold]))


def check_tune_fusion(tune):
    for calls, low, high in EDGES:
        workload = Workload(0)
        workload.low, workload.high = low, high
        _tuned(tune, Measured(workload, calls))
    yield "a whole number in the range, with any number of calls, and never more than those"
    scores = _scores(tune)
    right = sum(score <= SLOWER for score, *_ in scores)
    worst = max(scores, key=lambda each: each[0])
    if right < RIGHT or worst[0] > WORST:
        slow = [each for each in scores if each[0] > SLOWER]
        by_means, by_medians = (all(one == steps.lowest(average) for _, one, steps in slow)
                                for average in (mean, median))
        raise _mistake(*worst, right, by_means and not by_medians)
    yield f"at most 5% slower than the best in {right} of {len(WORKLOADS)} workloads"
    own, library = (mean(score for score, *_ in each) for each in (scores, _scores(tune_fusion)))
    yield f"{own:.3f} times the best (the library's {library:.3f})"


def _scores(tune):
    """Return [(ratio to the best time, the choice, its Measured)] for all workloads."""
    all_of = [Measured(workload) for workload in WORKLOADS]
    chosen = [_tuned(tune, each) for each in all_of]
    return [(each.workload.score(one), one, each) for one, each in zip(chosen, all_of)]


def _tuned(tune, measured):
    low, high, calls = measured.workload.low, measured.workload.high, measured.calls
    chosen = measured.tuned(tune)
    where = f"from {low:,} to {high:,} with {calls} call{'s' * (calls > 1)}"
    expect(isinstance(chosen, Integral), f"{where} it returns a {type(chosen).__name__}",
           WHOLE)
    expect(low <= chosen <= high, f"{where} it returns {chosen:,}", "It must be in the range.")
    expect(measured.asked or low == high or calls < CALLS, f"{where} it measures nothing, and "
           f"returns {chosen:,}", MEASURE)
    return chosen


def _mistake(score, chosen, measured, right, by_means):
    """Return the sentence on the worst workload, with the first likely reason that holds."""
    workload, counts = measured.workload, Counter(measured.asked)
    steps = sorted(counts)
    best, lowest = min(workload.grid(), key=workload.seconds), measured.lowest(median)
    near = min(steps, key=workload.seconds)
    low, high = max(zip(steps, steps[1:]), key=lambda two: two[1] / two[0], default=(1, 1))
    reasons = (
        (not steps[0] <= best <= steps[-1], f"The best is {best:,}, and you measure from "
         f"{steps[0]:,} to {steps[-1]:,}: {BOTH_ENDS}"),
        (high / low > 64, f"Nothing is measured between {low:,} and {high:,} {RATIOS}"),
        (max(counts.values()) == 1, ONCE),
        (len(measured.asked) < CALLS / 3, f"You used {len(measured.asked)} of {CALLS} calls. More "
                                          "calls mean less noise."),
        (by_means, MEDIANS),
        (chosen not in counts, MEASURED),
        (chosen != lowest, f"By the medians of what you measured the best is {lowest:,}. "
         f"{LOWEST}"),
        (workload.score(near) > SLOWER, f"Of the {len(steps)} thresholds that you measured, even "
         f"the best is {workload.score(near) - 1:.0%} slower than it could be. {FINER}"),
        (True, (f"You measured {near:,}, which would be good enough, but it did not look best. "
                f"{AGAIN}")),
    )
    return Mistake(f"at most 5% slower than the best in {right} of {len(WORKLOADS)} workloads, and "
                   f"in one {score - 1:.0%} slower; {RIGHT} are required, and nowhere over 50%. "
                   f"There it chooses {chosen:,} bytes, and the best lies {workload.kind}",
                   next(hint for holds, hint in reasons if holds))


def each_once(seconds_of, low, high, calls):
    grid = [round(low * (high / low) ** (i / 16)) for i in range(17)][:calls]
    return min(grid, key=seconds_of)


GRID, SHARED, BEST = "low * (high / low) ** (i / last)", "half // len(new)", "measured.get, default"
TUNE = Exercise(
    tune_fusion, check_tune_fusion, mistakes=(
        Slip(BOTH_ENDS, (GRID, "low * (high / low) ** ((i + 1) / (last + 2))")),
        Slip(RATIOS, (GRID, "low + (high - low) * i / last")),
        Slip(ONCE, each_once),
        Slip(MEDIANS, ("median(times)", "sum(times) / len(times)")),
        Slip(FINER, ("range(2 if", "range(1 if", "min(8, half - 1)", "min(7, half - 1)")),
        Slip(LOWEST, (f"min(measured, key={BEST}", f"max(measured, key={BEST}"),
             (f"min(measured, key={BEST}=low)", "max(measured, default=low)")),
        Slip(MEASURED, (f"return min(measured, key={BEST}=low)",
                        "return round(median(measured)) if measured else low")),
        Slip(SHARE, (SHARED, f"{SHARED} + 3")),
        Slip(WHOLE, ("round(low", "(low"), (f"return min(measured, key={BEST}=low)",
                                            "return min(measured.values(), default=0.0)")),
        Slip(BEYOND, (GRID, f"2 * {GRID}")),
        Slip(MEASURE, lambda seconds_of, low, high, calls: max(low, min(high, 64 * 2**20))),
        Slip("calls=1)", (f"{BEST}=low", "measured.get")),
    ), hints=(
        "Which thresholds do you try, how many times do you try each, and how do you combine its "
        "times?",
        "Use a grid of equal ratios and, at each threshold, the median of several calls, because "
        "stragglers spoil a mean. Calls near the best threshold are worth more than calls far from "
        "it.",
        "grid = [round(low * (high / low) ** (i / (n - 1))) for i in range(n)]; seconds = "
        "{t: median(seconds_of(t) for _ in range(calls // 2 // n)) for t in grid}. With the other "
        "half of the calls, do the same between the neighbours of the best.",
    ))
