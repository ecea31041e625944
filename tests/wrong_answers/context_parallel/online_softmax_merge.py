"""Lab 10: two results of softmax become one, and the numbers overflow or are weighed wrongly."""

import torch
from mutants import mutant

from ranklab.context_parallel import online_softmax_merge

BOTH = "total = torch.logaddexp(lse, other_lse)"

WRONG = [mutant(online_softmax_merge, *edits, says=says, called=called)
         for *edits, says, called in (
    (BOTH, "total = torch.log(lse.exp() + other_lse.exp())", "exp of a score is infinite", "naive"),
    (BOTH, "total = lse + other_lse", "logarithms: logaddexp", "sum_of_logs"),
    (BOTH, "total = torch.maximum(lse, other_lse)", "Both sums of exp count", "the_larger"),
    (BOTH, "lse, other_lse = (x.clamp(min=-1000) for x in (lse, other_lse))\n    total = "
     "torch.logaddexp(lse, other_lse)\n    total = total.where(total > -999, float('-inf'))",
     "near -3000", "clamped"),
    (".nan_to_num(0.0)", "", "A row may have seen no key", "no_key"),
    ("weight * out + other_weight * other", "out + other", "weights that add up to 1", "added"),
    ("weight * out + other_weight * other", "(out + other) / 2", "its weight is", "the_mean"),
    ("weight * out + other_weight * other", "other_weight * out + weight * other",
     "goes with its own lse", "swapped"),
    ("weight * out + other_weight * other, total", "weight * out + other_weight * other, lse",
     "lse is", "old_lse"),
    ("other_weight * other, total", "other_weight * other, total.nan_to_num(neginf=0.0)",
     "lse is not -inf where", "zero_for_no_key"),
    ("return weight * out", "return out.mul_(weight)", "what it was given is changed", "in_place"),
    ("weight * out + other_weight * other, total", "weight * out + other_weight * other",
     r"does not return \(out, lse\)", "out_alone"),
)]  # fmt: skip


def online_softmax_merge__exp_first(out, lse, other, other_lse):
    """Take the exp of differences"""
    a, b = lse.exp().unsqueeze(-1), other_lse.exp().unsqueeze(-1)
    return (a * out + b * other) / (a + b), torch.logaddexp(lse, other_lse)
