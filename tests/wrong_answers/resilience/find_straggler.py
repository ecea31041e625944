"""Lab 14: alarms that are false, or missing."""

import torch
from mutants import mutant

from ranklab.resilience import find_straggler

USUAL = "seconds.median(dim=1, keepdim=True).values"
OVER = "(seconds / usual).median(dim=0).values"

WRONG = [mutant(find_straggler, *edits, says=says, called=called, torch=torch)
         for *edits, says, called in (
    (OVER, "(seconds / usual).mean(dim=0)", "pauses", "mean_over_steps"),
    (OVER, "(seconds / usual).amax(dim=0)", "it says", "worst_step"),
    (OVER, "(seconds / usual)[-1]", "it says", "last_step"),
    (OVER, "seconds.mean(dim=0) / seconds.mean()", "it says", "total_time"),
    (USUAL, "seconds.amin(dim=1, keepdim=True)", "fast", "fastest"),
    (USUAL, "seconds.mean(dim=1, keepdim=True)", "it says", "mean_over_ranks"),
    (USUAL, 'seconds.quantile(0.25, dim=1, keepdim=True, interpolation="lower")', "three of 8 fast",
     "lower_quartile"),
    (USUAL, "seconds.quantile(0.5, dim=1, keepdim=True)", "one of 2 slow", "between_two"),
    (OVER, "(seconds / usual).quantile(0.7, dim=0)", "in 2 of 5 steps", "a_third_of_the_steps"),
    (OVER, "(seconds / usual).quantile(0.5, dim=0)", "in half of the last 32 steps",
     "half_of_the_steps"),
    (OVER, "seconds.median(dim=0).values / seconds.median(dim=0).values.median()",
     "in 3 of 5 steps", "medians_of_ranks"),
    (USUAL, "seconds[:8].median()", "all ranks slow", "the_past"),
    ("    seconds = seconds[-recent:]\n", "", "slow in the last 40", "all_steps"),
    ("seconds[-recent:]", "seconds[:recent]", "slow in the (last|first)", "first_steps"),
    ("descending=True", "descending=False", "the order is", "fastest_first"),
    ("return [rank for rank in order if slowness[rank] > threshold]", "return order[:1] if "
     "slowness.max() > threshold else []", "two of 64", "one_only"),
    ("slowness[rank] > threshold", "slowness[rank] > 1.2", "threshold", "own_threshold"),
    ("return [rank", "return [torch.tensor(rank)", "A list of ints", "tensors"),
    ("    if seconds.dim() != 2 or not seconds.numel():\n", "    if False:\n", "Error",
     "not_refused"),
    ("    usual = ", "    seconds /= seconds.median()\n    usual = ", "is changed", "in_place"),
)]


def find_straggler__three_sigma(seconds, threshold=1.2, recent=32):
    """one of 8 slow by half: it says \\[\\]"""
    if seconds.dim() != 2 or not seconds.numel():
        raise ValueError("seconds")
    mean = seconds[-recent:].mean(0)
    far = mean > mean.mean() + 3 * mean.std(correction=0)
    return sorted(far.nonzero().flatten().tolist(), key=lambda rank: -mean[rank])
