"""online_softmax_merge: two results merged into one; no exp may overflow."""

from typing import NamedTuple

import torch

from ranklab.checks.context_parallel.calls import changes_of, named
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.context_parallel import online_softmax_merge

KEYS = 12
# A score near 500 is rounded by 128 eps of float32, and so is each lse on the way: in a weight,
# exp(lse - the new lse), that is as large an error.
OF_SCORES = 4 * 500
HIDDEN = float("-inf")
ARGUMENTS = "out", "lse", "other", "other_lse"


class Case(NamedTuple):
    """Scores of some queries over 12 keys, and how they are split.

    scale, more  factor of normally distributed numbers, and what is added to them
    cuts         the first keys of all parts but the first; parts are merged one after another
    apart        added to the scores from the first cut on
    hidden       some rows see no key on one side, or on both
    turned       the last part comes first
    """

    name: str
    scale: float = 1
    more: float = 0
    cuts: tuple = (5,)
    apart: float = 0
    hidden: bool = False
    turned: bool = False
    shape: tuple = (2, 3, 5)

    def __str__(self):
        return self.name

    def parts(self):
        """Return [(out, lse) of each part]; 0 and -inf where a row sees no key."""
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(*self.shape, KEYS, generator=generator) * self.scale + self.more
        v = torch.randn(*self.shape[:-1], KEYS, 4, generator=generator)
        scores[..., self.cuts[0]:] += self.apart
        if self.hidden:
            scores[..., :2, :5] = HIDDEN  # rows 0 and 1 see nothing in the first part
            scores[..., 1:3, 5:] = HIDDEN  # 1 and 2 nothing in the second
        parts = [(part.softmax(-1).nan_to_num(0.0) @ values, part.logsumexp(-1))
                 for part, values in zip(scores.tensor_split(self.cuts, dim=-1),
                                         v.tensor_split(self.cuts, dim=-2))]
        return parts[::-1] if self.turned else parts


SMALL = (Case("scores about 1"), Case("one key and eleven", cuts=(1,)),
         Case("out of shape (5, 4)", shape=(5,)),
         Case("out of shape (2, 3, 2, 5, 4)", shape=(2, 3, 2, 5)))
LARGE = (Case("scores up to 300", 100), Case("scores near -500", 1, -500),
         # So far apart that float32 has the lse of one part alone.
         Case("scores near -3000, then -4000", 1, -3000, apart=-1000),
         Case("scores near -4000, then -3000", 1, -3000, apart=-1000, turned=True))


def _see(fn, case):
    merged, *parts = case.parts()
    for part in parts:
        arguments = [*merged, *part]
        merged = fn(*arguments)
        results = named(merged, "out", "lse")
        yield results | changes_of(ARGUMENTS, arguments)
        if "out" not in results:
            return


def by_softmax(out, lse, other, other_lse):
    """Weigh both by a softmax over the two lse, in float64."""
    both = torch.stack([lse, other_lse]).double()
    weights = both.softmax(0).nan_to_num(0.0).unsqueeze(-1)
    merged = (weights * torch.stack([out, other]).double()).sum(0)
    return merged.float(), both.logsumexp(0).float()


def exp_first(out, lse, other, other_lse):
    a, b = lse.exp().unsqueeze(-1), other_lse.exp().unsqueeze(-1)
    return (a * out + b * other) / (a + b), torch.logaddexp(lse, other_lse)


def by_sigmoid(out, lse, other, other_lse):
    weight = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    return weight * out + (1 - weight) * other, torch.logaddexp(lse, other_lse)


FINITE = ("In float32, exp of a score is infinite from 89 on. Take exp of differences instead: lse "
          "- the new lse is never above 0.")
NEW_LSE = "torch.logaddexp(lse, other_lse)"
LARGER = "torch.maximum(lse, other_lse)"
WEIGHT, SUM = "(part - total).exp()", "weight * out + other_weight * other"
MERGE = Proof(
    online_softmax_merge,
    Stage("out and lse over both sets of keys; the arguments stay unchanged", _see, SMALL,
          oracle=by_softmax,
          note=("The weights are exp(lse - the new lse), one per row; the new lse is over both "
                "sets of keys; and nothing is written into the arguments.")),
    Stage("whatever the scores: no exp overflows", _see, LARGE, oracle=by_softmax,
          roundings=OF_SCORES,
          note="exp of a score can be infinite or 0 in float32. Only -inf means no key."),
    Stage("a row that has seen no key on one side, or on both", _see,
          (Case("some rows see no key", hidden=True),), oracle=by_softmax,
          note="Here a row may have seen no keys: then its lse is -inf and its out is 0."),
    Stage("twelve keys, one after the other", _see,
          (Case("twelve parts of one key", 3, cuts=tuple(range(1, KEYS))),), oracle=by_softmax),
    mistakes=(
        Slip("Add the sums of exp, not their logarithms: use logaddexp.",
             (NEW_LSE, "lse + other_lse"), (f"{SUM}, total", f"{SUM}, lse + other_lse")),
        Slip("The new lse is just the larger of the two here. Both sums of exp count: use "
             "logaddexp.",
             (NEW_LSE, LARGER), (f"{SUM}, total", f"{SUM}, {LARGER}")),
        Slip("The old lse is returned: the new one must cover both sets of keys.",
             (f"{SUM}, total", f"{SUM}, lse")),
        Slip("other_lse is returned: the new lse must cover both sets of keys.",
             (f"{SUM}, total", f"{SUM}, other_lse")),
        Slip("Each out is a mean under its own softmax: combine them with weights that add up to "
             "1.",
             (SUM, "out + other")),
        Slip("The plain mean of the two is returned. The part with the larger sum of exp counts "
             "more: its weight is exp(its lse - the new lse).", (SUM, "(out + other) / 2")),
        Slip("The weights are swapped: weight each out by its own lse.",
             (SUM, "other_weight * out + weight * other")),
        Slip("Only one of the two is weighted: the other also covers only some of the keys, so it "
             "needs its weight as well.",
             (SUM, "weight * out + other"), (SUM, "out + other_weight * other")),
        Slip("The weights do not add up to 1: take exp(lse - the new lse), not exp(lse - the "
             "larger lse).", (WEIGHT, f"(part - {LARGER}).exp()")),
        Slip("The sign is wrong: a weight is exp(lse - the new lse), at most 1.",
             (WEIGHT, "(total - part).exp()")),
        Slip("lse is a logarithm: a weight is exp(lse - the new lse).",
             (WEIGHT, "(part / total)"), (WEIGHT, "(part - total)")),
        Slip("Return out first, then lse.", (f"{SUM}, total", f"total, {SUM}")),
        Slip("Return both out and the new lse.", (f"{SUM}, total", SUM)),
        Slip("The results are float32, like the arguments.",
             (NEW_LSE, "torch.logaddexp(lse.double(), other_lse.double())")),
        Slip("lse has one number per row, and out has D: unsqueeze(-1) lets them broadcast.",
             (".unsqueeze(-1)", "")),
        Slip("An argument is changed. Make new tensors: no += and no exp_().",
             ("return weight * out", "return out.mul_(weight)"),
             ("other_weight * other", "other.mul_(other_weight)"),
             (NEW_LSE, "torch.logaddexp(lse, other_lse, out=lse)"), ("(part -", "part.sub_("),
             (f"return {SUM}, total",
              "return out.mul_(weight).add_(other_weight * other), lse.copy_(total)"),
             (f"return {SUM}", "return out.mul_(weight).add_(other_weight * other)"),
             (f"return {SUM}", f"other_lse.sub_(lse)\n    return {SUM}")),
        Slip(FINITE, (NEW_LSE, "torch.log(lse.exp() + other_lse.exp())"),
             (WEIGHT, "(part.exp() / total.exp())"), exp_first),
        Slip("A valid lse can lie below any bound that you clamp it to: only -inf means that there "
             "is no key.",
             (f"total = {NEW_LSE}", "lse, other_lse = (x.clamp(min=-1000) for x in (lse, other_lse)"
              f")\n    total = {NEW_LSE}\n    total = total.where(total > -999, float('-inf'))")),
        Slip("A row may have seen no key: its lse is -inf and its out 0. Since -inf - -inf is nan, "
             "replace the weight with 0.", (".nan_to_num(0.0)", ""), by_sigmoid),
        Slip("Where both lse are -inf, lse minus the larger one is nan. The new lse stays -inf "
             "there: logaddexp does that.",
             (NEW_LSE, f"{LARGER} + "
              f"((lse - {LARGER}).exp() + (other_lse - {LARGER}).exp()).log()")),
        Slip("If a row has seen no key in either set, its lse stays -inf.",
             ("other, total", "other, total.nan_to_num(neginf=0.0)"),
             ("other, total", "other, total.nan_to_num(0.0)")),
    ), hints=(
        "Each out is a sum of exp(score) v, divided by its own sum of exp(score). What factor "
        "turns that into a division by the total of both sums?",
        "lse is the logarithm of a sum of exp. torch.logaddexp adds two such sums without "
        "overflow. The weight of each out is exp(its lse - the new lse).",
        "total = torch.logaddexp(lse, other_lse); weights (lse - total).exp().nan_to_num(0.0), "
        "with unsqueeze(-1); return the weighted sum and total",
    ))
