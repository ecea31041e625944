"""The check of tune_fusion: in 30 landscapes of the model, with noise; it prints the score."""

import functools
import operator
from collections import Counter

from ranklab.checks.exercise import Mistake
from ranklab.horovod import tune_fusion
from ranklab.projects.horovod.landscapes import CALLS, Landscape, Steps

LANDSCAPES, RIGHT, SLOWER, WORST = 30, 27, 1.05, 1.5


class Measured(Steps):
    """seconds_of, as the check gives it: what may not be asked is a Mistake."""

    def __call__(self, threshold):
        low, high = self.landscape.low, self.landscape.high
        if not low <= threshold <= high:
            raise Mistake(f"it measures at {threshold:,.0f} bytes; the range is {low:,} to "
                          f"{high:,}", "Both ends belong to it, and nothing beyond them.")
        if len(self.asked) == self.calls:
            raise Mistake(f"it measures more than calls={self.calls} times", "Share the calls out "
                          "before you begin; what rounding leaves over need not be used.")
        return super().__call__(threshold)


def check_tune_fusion(tune):
    for calls, low, high in ((1, 2**20, 2**26), (3, 2**20, 2**26), (7, 1, 2**30), (50, 4096, 4096),
                             (30, 1000, 1003)):  # fmt: skip
        landscape = Landscape(0)
        landscape.low, landscape.high = low, high
        _tuned(tune, Measured(landscape, calls))
    yield "a whole number in the range, with any number of calls, never more of them"
    scores = []
    for landscape in _landscapes():
        measured = Measured(landscape)
        chosen = _tuned(tune, measured)
        scores.append((measured.landscape.score(chosen), chosen, measured))
    right = sum(score <= SLOWER for score, *_ in scores)
    worst = max(scores, key=lambda each: each[0])
    if right < RIGHT or worst[0] > WORST:
        raise _mistake(*worst, right)
    yield f"at most 5% slower than the best in {right} of {LANDSCAPES} landscapes"
    mean = sum(score for score, *_ in scores) / LANDSCAPES
    used = sum(len(measured.asked) for *_, measured in scores) / LANDSCAPES
    default = sum(each.landscape.score(min(2**26, each.landscape.high))
                  for *_, each in scores) / LANDSCAPES
    yield (f"{mean:.3f} times the best, {used:.0f} calls (the library's {{:.3f}}, {{:.0f}} calls; "
           f"always 64 MB {default:.3f})".format(*_librarys()))


@functools.cache
def _landscapes():
    return [Landscape(seed) for seed in range(LANDSCAPES)]  # each knows its best after one check


@functools.cache
def _librarys():
    """(times the best, calls) of the library's answer, in the mean."""
    steps = [Steps(landscape) for landscape in _landscapes()]
    scores = [each.landscape.score(each.tuned(tune_fusion)) for each in steps]
    return sum(scores) / LANDSCAPES, sum(len(each.asked) for each in steps) / LANDSCAPES


def _tuned(tune, measured):
    low, high, calls = measured.landscape.low, measured.landscape.high, measured.calls
    chosen = measured.tuned(tune)
    where = f"from {low:,} to {high:,} with {calls} call{'s' * (calls > 1)}"
    try:
        chosen = operator.index(chosen)  # NumPy's whole numbers as well
    except TypeError:
        raise Mistake(f"{where} it returns a {type(chosen).__name__}", "Bytes are whole numbers: "
                      "round(), and return the threshold, not its seconds.") from None
    if not low <= chosen <= high:
        raise Mistake(f"{where} it returns {chosen:,}", "It must be in the range.")
    if not measured.asked and low < high and calls == CALLS:
        raise Mistake(f"{where} it measures nothing, and returns {chosen:,}",
                      "No threshold suits all models and networks: call seconds_of.")
    return chosen


def _mistake(score, chosen, measured, right):
    """What is said of the worst landscape, and why it may be."""
    landscape, asked = measured.landscape, Counter(measured.asked)
    hint = ("One step in ten takes three times as long: the median of several calls does not mind, "
            "a mean does. And spend calls where it matters: measure the best ones again.")
    steps = sorted(asked)
    low, high = max(zip(steps, steps[1:]), key=lambda pair: pair[1] / pair[0])
    if chosen == steps[0] > landscape.low or chosen == steps[-1] < landscape.high:
        hint = "low and high belong to the range: measure both."
    elif high / low > 64:
        hint = (f"From {low:,} to {high:,} bytes you measure nothing. Take equal ratios, not equal "
                "distances: powers of two.")
    elif max(asked.values()) == 1:
        hint = "Each threshold is measured once, and noise decides. Take the median of several."
    elif len(measured.asked) < CALLS / 3:
        hint = f"You used {len(measured.asked)} of {CALLS} calls. More calls, less noise."
    return Mistake(f"at most 5% slower than the best in {right} of {LANDSCAPES} landscapes, and in "
                   f"one {score - 1:.0%} slower; asked are {RIGHT}, and nowhere over 50%. There "
                   f"it chooses {chosen:,} bytes, and the best lies {landscape.kind}", hint)
