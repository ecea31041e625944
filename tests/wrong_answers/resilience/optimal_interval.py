"""Lab 14: intervals that lose more time than they must."""

import math

from mutants import mutant

from ranklab.resilience import optimal_interval

LAST = "young * (1 + x / 3 + x**2 / 9) - checkpoint_seconds"
YOUNG = "math.sqrt(2 * checkpoint_seconds * mean_seconds)"
CASE = "    if checkpoint_seconds >= 2 * mean_seconds:\n        return mean_seconds\n"
REFUSED = "min(checkpoint_seconds, mean_seconds) <= 0"

WRONG = [mutant(optimal_interval, *edits, says=says, called=called) for *edits, says, called in (
    (LAST, "young", "is Young's", "young"),
    (LAST, "young - checkpoint_seconds", "Young's, less a checkpoint", "young_less_a_checkpoint"),
    (LAST, "young * (1 + x / 3 + x**2 / 9)", "from the beginning of one checkpoint",
     "start_to_start"),
    (LAST, f"round({LAST})", "checkpoints of 0.01 s", "whole_seconds"),
    (YOUNG, "math.sqrt(checkpoint_seconds * mean_seconds)", "More than 2% off", "without_the_2"),
    ("young * (1 + x / 3 + x**2 / 9)", "young * (1 + x / 3)", "one term more than Young's",
     "two_terms"),
    (CASE, "", "where it does not hold", "series_everywhere"),
    ("x / 3 + x**2 / 9", "x**2 / 3 + x**4 / 9", "More than 2% off", "x_squared"),
    (REFUSED, "min(checkpoint_seconds, mean_seconds) < 0", "no ValueError|Error", "zero_accepted"),
    (CASE, "    if checkpoint_seconds >= mean_seconds:\n        return mean_seconds\n",
     "is the time between failures", "the_mean_too_early"),
    (REFUSED, "checkpoint_seconds <= 0 or mean_seconds == 0", "-1 s: no ValueError",
     "zero_only"),
    (REFUSED, "False", "no ValueError|Error", "nothing_refused"),
)]  # fmt: skip


def optimal_interval__half_the_mean(checkpoint_seconds, mean_seconds):
    """More than 2% off"""
    return mean_seconds / 2


def optimal_interval__geometric_mean(checkpoint_seconds, mean_seconds):
    """is sqrt\\(C M\\)"""
    return math.sqrt(checkpoint_seconds * mean_seconds)


def optimal_interval__prints(checkpoint_seconds, mean_seconds):
    """is None"""
    print(math.sqrt(2 * checkpoint_seconds * mean_seconds))
