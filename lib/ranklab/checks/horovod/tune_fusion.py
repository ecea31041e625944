"""The check of tune_fusion: in 30 workloads of the model, with noise; it prints the score."""

from collections import Counter
from numbers import Integral
from statistics import mean

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.horovod import tune_fusion
from ranklab.horovod.cost import CALLS, NoisySteps, Workload

WORKLOADS = [Workload(seed) for seed in range(30)]  # each knows its best after one check
RIGHT, SLOWER, WORST = 27, 1.05, 1.5
EDGES = (1, 2**20, 2**26), (3, 2**20, 2**26), (7, 1, 2**30), (50, 4096, 4096), (30, 1000, 1003)


class Measured(NoisySteps):
    """seconds_of, as the check gives it: what may not be asked is a Mistake."""

    def __call__(self, threshold):
        low, high = self.workload.low, self.workload.high
        expect(low <= threshold <= high, f"it measures at {threshold:,.0f} bytes, and not from "
               f"{low:,} to {high:,}", "Both ends belong to the range, and nothing beyond them.")
        expect(len(self.asked) < self.calls, f"it measures more than calls={self.calls} times",
               "Share the calls out before you begin; what rounding leaves over need not be used.")
        return super().__call__(threshold)


def check_tune_fusion(tune):
    for calls, low, high in EDGES:
        workload = Workload(0)
        workload.low, workload.high = low, high
        _tuned(tune, Measured(workload, calls))
    yield "a whole number in the range, with any number of calls, never more of them"
    scores = _scores(tune)
    right = sum(score <= SLOWER for score, *_ in scores)
    worst = max(scores, key=lambda each: each[0])
    if right < RIGHT or worst[0] > WORST:
        raise _mistake(*worst, right)
    yield f"at most 5% slower than the best in {right} of {len(WORKLOADS)} workloads"
    yours, library = (mean(score for score, *_ in each) for each in (scores, _scores(tune_fusion)))
    yield f"{yours:.3f} times the best (the library's {library:.3f})"


def _scores(tune):
    """[(times the best, what it chooses, its Measured)] of all workloads."""
    all_of = [Measured(workload) for workload in WORKLOADS]
    chosen = [_tuned(tune, each) for each in all_of]
    return [(each.workload.score(one), one, each) for one, each in zip(chosen, all_of)]


def _tuned(tune, measured):
    low, high, calls = measured.workload.low, measured.workload.high, measured.calls
    chosen = measured.tuned(tune)
    where = f"from {low:,} to {high:,} with {calls} call{'s' * (calls > 1)}"
    expect(isinstance(chosen, Integral), f"{where} it returns a {type(chosen).__name__}", "Bytes "
           "are whole numbers: round(), and return the threshold, not its seconds.")
    expect(low <= chosen <= high, f"{where} it returns {chosen:,}", "It must be in the range.")
    expect(measured.asked or low == high or calls < CALLS, f"{where} it measures nothing, and "
           f"returns {chosen:,}", "No threshold suits all models and networks: call seconds_of.")
    return chosen


def _mistake(score, chosen, measured, right):
    """What is said of the worst workload, and why it may be: the first reason that holds."""
    workload, asked = measured.workload, Counter(measured.asked)
    steps = sorted(asked)
    low, high = max(zip(steps, steps[1:]), key=lambda two: two[1] / two[0], default=(1, 1))
    reasons = (
        (chosen == steps[0] > workload.low or chosen == steps[-1] < workload.high,
         "low and high belong to the range: measure both."),
        (high / low > 64, f"Nothing from {low:,} to {high:,} bytes: take equal ratios."),
        (max(asked.values()) == 1, "Each threshold is measured once: take medians of several."),
        (len(measured.asked) < CALLS / 3, f"You used {len(measured.asked)} of {CALLS} calls. More "
         "calls, less noise."),
        (True, "One step in ten takes three times as long: the median of several calls does not "
         "mind, a mean does. Measure the best ones again."),
    )
    return Mistake(f"at most 5% slower than the best in {right} of {len(WORKLOADS)} workloads, "
                   f"and in one {score - 1:.0%} slower; asked are {RIGHT}, and nowhere over 50%. "
                   f"There it chooses {chosen:,} bytes, and the best lies {workload.kind}",
                   next(hint for holds, hint in reasons if holds))
