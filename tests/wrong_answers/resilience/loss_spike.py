"""Lab 14: spikes that are missed, and alarms for nothing."""

import math

from mutants import mutant

from ranklab.resilience import loss_spike

USUAL = "losses[-window - patience:-patience]"
MIDDLE = "middle = statistics.median(usual)"
SPREAD = "1.4826 * statistics.median(abs(x - middle) for x in usual)"
MOST = "middle + max(limit * spread, 0.01 * abs(middle))"
BAD = "not math.isfinite(x) or x > bound"

WRONG = [mutant(loss_spike, *edits, says=says, called=called) for *edits, says, called in (
    (SPREAD, "statistics.pstdev(usual)", "four great spikes", "standard_deviation"),
    (USUAL, "losses[:-patience]", "8 was usual long ago", "all_losses"),
    (USUAL, "losses[-patience - 1:-patience]", "step|says", "the_loss_before"),
    (MOST, "1.5 * middle", "it says", "half_more"),
    (SPREAD, "(lambda q: q[2] - q[0])(statistics.quantiles([*usual, usual[0]], n=4))",
     "7 standard deviations", "distance_of_quartiles"),
    (MOST, "middle + limit * max(spread, 0.01 * abs(middle))", "3, then 3.1", "floor_of_spread"),
    (MOST, "middle + max(limit * spread, 0.01 * middle)", "then -2.98", "no_abs"),
    ("len(losses) > 20", "len(losses) > 16", "the 20th", "too_few_to_know"),
    ("len(losses) > 20", "len(losses) > window", "the 21st", "waits_for_a_window"),
    (MOST, "middle + 0.5", "no fixed number", "a_fixed_step"),
    (MOST, "middle + limit * spread", "a spread of 0|Up to", "no_floor"),
    (MOST, "middle + max(limit * spread, 1.0)", "0.004", "a_fixed_floor"),
    (MOST, "middle + max(2.0 * spread, 0.01 * abs(middle))", "step", "own_limit"),
    (BAD, "x > bound", "a loss of nan|NaN", "nan_is_good"),
    (BAD, "not math.isfinite(x) or abs(x - middle) > bound - middle", "Low is good|Error",
     "low_is_bad"),
    ("[x for x in losses[-window - patience:-patience] if math.isfinite(x)]",
     "losses[-window - patience:-patience]", "NaN (some|in)", "nan_in_the_median"),
    ("if all(is_bad) and len(is_bad) == patience", "if all(is_bad)", "the very first is",
     "too_early"),
    ("if all(is_bad) and len(is_bad) == patience", "if sum(is_bad) > 1", "4 and 4", "two_of_three"),
    ("    if not is_bad[-1]:\n", "    if not any(is_bad):\n", "recovered", "not_over"),
    ('return "roll back" if', 'return "skip" if', "4, 4 and 4", "never_back"),
    ("    if len(losses) > 20 and usual:\n", "    if usual:\n", "first steps|step",
     "from_the_first"),
)]


def loss_spike__counts_all(losses, window=64, limit=6.0, patience=3):
    """Only those one after the other"""
    import statistics

    usual = [x for x in losses[-window - patience:-patience] if math.isfinite(x)]
    most = math.inf
    if len(losses) > 20 and usual:
        middle = statistics.median(usual)
        spread = 1.4826 * statistics.median(abs(x - middle) for x in usual)
        most = middle + max(limit * spread, 0.01 * abs(middle))
    bad = [not math.isfinite(x) or x > most for x in losses[-2 * patience:]]
    if not bad[-1]:
        return "go on"
    return "roll back" if sum(bad) >= patience else "skip"
