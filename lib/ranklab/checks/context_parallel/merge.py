"""The check of online_softmax_merge: one result of two, where no exp may overflow."""


import torch

from ranklab.checks.beside import expect, located
from ranklab.checks.trial import explain

KEYS, SHAPE = 12, (2, 3, 5)
FINITE = ("exp of a score is infinite from 89 on, in float32. Take the exp of differences: "
          "lse - the new lse is never above 0.")
EMPTY = ("A row may have seen no key: lse is -inf there and out 0. -inf - -inf is no number: put 0 "
         "in its place.")
# {case: (what scores are multiplied with, added, how many keys the first part has, a hint)}
CASES = {"scores about 1": (1, 0, 5, ""), "scores up to 300": (100, 0, 5, FINITE),
         "scores near -500": (1, -500, 5, ""), "one key and eleven": (1, 0, 1, "")}


def _scores(scale, more, shape=SHAPE):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(*shape, KEYS, generator=generator) * scale + more
    return scores, torch.randn(*shape[:-1], KEYS, 4, generator=generator)


def _part(scores, v):
    """(out, lse); 0 and -inf where there is no key."""
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def _parts(scores, v, cut=5):
    return [_part(scores[..., at], v[..., at, :]) for at in (slice(cut), slice(cut, None))]


def check_online_softmax_merge(online_softmax_merge):
    for case, (scale, more, cut, hint) in CASES.items():
        scores, v = _scores(scale, more)
        located(case, _compare, online_softmax_merge, _parts(scores, v, cut), _part(scores, v),
                hint)
    scores, v = _scores(1, -3000)
    scores[..., 5:] -= 1000  # so far apart that float32 has the lse of one part alone
    parts = _parts(scores, v)
    for case, both in {"-3000, then -4000": parts, "-4000, then -3000": parts[::-1]}.items():
        located(f"scores near {case}", _compare, online_softmax_merge, both, _part(scores, v))
    for shape in ((5,), (2, 3, 2, 5)):
        scores, v = _scores(1, 0, shape)
        located(f"out of shape {(*shape, 4)}", _compare, online_softmax_merge, _parts(scores, v),
                _part(scores, v))
    yield "out and lse over both sets of keys, whatever the scores"
    scores, v = _scores(1, 0)
    scores[..., :2, :5] = float("-inf")  # rows 0 and 1 see nothing in the first part
    scores[..., 1:3, 5:] = float("-inf")  # 1 and 2 nothing in the second
    located("some rows see no key", _compare, online_softmax_merge, _parts(scores, v),
            _part(scores, v), EMPTY)
    yield "a row that has seen no key on one side, or on both"
    scores, v = _scores(3, 0)
    merged = _part(scores[..., :1], v[..., :1, :])
    for key in range(1, KEYS):
        at = slice(key, key + 1)
        merged = online_softmax_merge(*merged, *_part(scores[..., at], v[..., at, :]))
    for name, got, right in zip(("out", "lse"), merged, _part(scores, v)):
        explain(f"after {KEYS - 1} merges {name}", got, right)
    yield "twelve keys, one after the other"


def _compare(merge, parts, right, hint=""):
    (a, p), (b, q) = parts
    kept = [x.clone() for x in (a, p, b, q)]
    found = merge(a, p, b, q)
    expect(isinstance(found, tuple) and len(found) == 2, "it does not return (out, lse)",
           "return out, lse")
    out, lse = found
    for name, got in {"out": out, "lse": lse}.items():
        expect(not got.isnan().any(), f"{name} is nan somewhere", hint)
    weight = (q - p).sigmoid().nan_to_num(0.0).unsqueeze(-1)
    finite = right[1].masked_fill(right[1].isinf(), 0.0)
    explain("lse", lse.masked_fill(lse.isinf() & right[1].isinf(), 0.0), finite, {
        "the sum of both": (p + q, "The sums of exp add up, not their logarithms: logaddexp."),
        "the larger of both": (torch.maximum(p, q), "Both sums of exp count: logaddexp."),
    }, hint)
    expect(torch.equal(lse.isneginf(), right[1].isneginf()), "lse is not -inf where a row has seen "
           "no key on either side, and there alone", EMPTY)
    explain("out", out, right[0], {
        "the sum of both": (a + b, "Each is a mean by its own softmax: weigh them, with weights "
                            "that add up to 1."),
        "the mean of both": ((a + b) / 2, "The part with the larger sum of exp counts more: its "
                             "weight is exp(its lse - the new lse)."),
        "weighed the other way round": (weight * a + (1 - weight) * b, "Each out goes with its own "
                                        "lse."),
    }, hint or "Weights are exp(lse - the new lse), one for each row.")
    same = all(torch.equal(x, before) for x, before in zip((a, p, b, q), kept))
    expect(same, "what it was given is changed", "Make new tensors: no += and no exp_().")
