"""The check of sync_batch_norm: against torch's batch norm of the whole batch, in one process."""

from functools import partial

import torch
from torch.nn.functional import batch_norm

from ranklab.checks.beside import beside, expect, on_groups, refused
from ranklab.engine import device

C, EPS = 3, 1e-3  # not the default of eps
CUTS = {4: (2, 5, 1, 3), 3: (3, 0, 2), 2: (1, 3), 1: (6,)}  # rows of each rank of a group
CASES = {"x of 2 dimensions": ((C,), torch.float64, 0), "of 4": ((C, 4, 2), torch.float64, 0),
         "float32, mean 3000": ((C,), torch.float32, 3000)}
FAILURES = {"ValueError: .*must be at least 2.*": "All ranks together have more: the count must be "
            "summed over ranks, too."}
ADVICE = {
    "y": "(x - mean) / sqrt(variance + eps) * weight + bias, in each channel; sum x, x * x and the "
    "count over ranks. In float32 mean(x * x) - mean(x) ** 2 is a small difference of two large "
    "numbers: square and sum in float64, and return x's type.",
    "the running mean": "mean moves by momentum * (batch's mean - mean), in place.",
    "the running variance": "It moves towards the batch's variance with n - 1, not n: variance * n "
    "/ (n - 1), n being the count on all ranks.",
    "the gradient of x": "(grad - mean(grad) - normal * mean(grad * normal)) * weight / "
    "sqrt(variance + eps), with what this forward has put into ctx: both means over the batch of "
    "all ranks, so divide by the count of all.",
    "the gradient of weight": "sum of grad * normalised x, over all dimensions but the channels.",
    "the gradient of bias": "sum of grad, over all dimensions but the channels.",
    "x": "Make a new tensor.", "the gradient given": "backward changes the gradient that it was "
    "given. It may be another layer's as well: grad - ..., not grad -= ...",
}


def _batch(rows, shape, dtype, mean, turn):
    """(x, the gradient given, weight, bias), in one process."""
    random = torch.Generator().manual_seed(10 * rows + turn)
    x, upstream = torch.randn(2, rows, *shape, generator=random, dtype=torch.float64)
    x = x * torch.arange(1, rows + 1).view(-1, *[1] * len(shape)) + mean  # rows differ in size
    weight, bias = torch.rand(2, C, generator=random, dtype=torch.float64)
    return [each.to(dtype) for each in (x, upstream, weight, bias)]


def _over(x):
    """All dimensions but the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(of_channels, x):
    """(C,) in a shape that goes with x's: (C, 1, ...)."""
    return of_channels.view(-1, *[1] * (x.dim() - 2))


def _moments(x):
    return x.mean(_over(x)), x.var(_over(x), unbiased=False)


def _right(cut, *case):
    """{name: what each rank must have}"""
    given = _batch(sum(cut), *case)
    x, upstream, weight, bias = (each.double() for each in given)
    running = torch.zeros(C, dtype=x.dtype), torch.ones(C, dtype=x.dtype)
    y = batch_norm(x.requires_grad_(), *running, weight, bias, True, 0.1, EPS)
    y.backward(upstream)
    normal = (y.detach() - _wide(bias, x)) / _wide(weight, x)
    parts = [(g * n, g) for g, n in zip(upstream.split(cut), normal.split(cut))]
    found = {"y": y.detach().split(cut), "the gradient of x": x.grad.split(cut),
             "the gradient of weight": [both[0].sum(_over(x)) for both in parts],
             "the gradient of bias": [both[1].sum(_over(x)) for both in parts],
             "the running mean": [running[0]] * len(cut),
             "the running variance": [running[1]] * len(cut), "x": x.detach().split(cut),
             "the gradient given": upstream.split(cut)}
    return {name: [each.to(given[0].dtype) for each in of_ranks]
            for name, of_ranks in found.items()}


def _slips(cut, index, case, name, turn):
    """What usual mistakes get: {what it is: (the value, a hint)}"""
    x, upstream, weight, bias = (each.double() for each in _batch(sum(cut), *case, turn))
    part, grad, (mean, variance) = x.split(cut)[index], upstream.split(cut)[index], _moments(x)
    parts = [each for each in x.split(cut) if len(each)]
    means, variances = map(torch.stack, zip(*map(_moments, parts)))
    shares = torch.tensor([[len(each) / len(x)] for each in parts], dtype=x.dtype)
    if name == "y":
        return {f"normalised {by}": (batch_norm(part, *of, weight, bias, eps=eps).to(case[1]), hint)
                for by, *of, eps, hint in (
            ("by this rank's own mean and variance", *_moments(part if len(part) else x), EPS,
             "Nothing was summed over ranks."),
            ("by the mean of the ranks' variances", mean, (variances * shares).sum(0), EPS,
             "Variances do not average: the ranks' means differ too. Sum x and x * x."),
            ("by the mean of the ranks' means and of their variances", means.mean(0),
             variances.mean(0), EPS, "Ranks have different numbers of rows, and variances do not "
             "average. Sum x, x * x and the count, in one tensor, and divide at the end."),
            ("by a mean in which each rank counts the same", means.mean(0), variance, EPS,
             "Ranks have different numbers of rows: divide by the sum of the counts."),
            ("by a variance that is divided by n - 1", mean, x.var(_over(x)), EPS,
             "For normalising, batch norm divides by n. (The running variance has n - 1.)"),
            (f"with an eps of 1e-5; here it is {EPS}", mean, variance, 1e-5, "It is an argument."))}
    if name == "the gradient of x":
        scale = _wide((variance + EPS).rsqrt(), x)
        normal, factor = (part - _wide(mean, x)) * scale, scale * _wide(weight, x)
        by_mean, by_variance = (_wide(each.mean(_over(x)), x) for each in (grad, grad * normal))
        return {"right for a mean and a variance that are constants": (
                    grad * factor, "Mean and variance depend on x as well: two more terms, the "
                    "mean of grad and the mean of grad * normalised x, over all ranks."),
                "that of this rank's own sums": (
                    (grad - by_mean - normal * by_variance) * factor, "Its x moved the mean of all "
                    "ranks, so their gradients count too: all-reduce both sums, in one tensor.")}
    if name in ("the gradient of weight", "the gradient of bias"):
        return {"the sum over all ranks": (sum(_right(cut, *case, turn)[name]), "Data parallelism "
                "averages this gradient later, as any: return this rank's own part.")}
    return {}


def _trial(sync_batch_norm, ranks):
    cut = CUTS[ranks.size]

    def call(case, turn):
        x, upstream, weight, bias = (each.to(device()) for each in _batch(sum(cut), *case, turn))
        x, upstream = (each.split(cut)[ranks.index].clone() for each in (x, upstream))
        if x.dim() == 4:  # in memory by rows, columns and then channels, as images often lie
            x = x.contiguous(memory_format=torch.channels_last)
        for leaf in (x, weight, bias):
            leaf.requires_grad_()
        mean, variance = torch.zeros(C).to(x), torch.ones(C).to(x)
        y = sync_batch_norm(x, weight, bias, EPS, running=(mean, variance, 0.1), **ranks.keywords)
        # Another layer's forward comes before the backward of this one.
        sync_batch_norm(3 * x.detach() + 1, weight.detach(), bias.detach(), EPS, **ranks.keywords)
        y.backward(upstream)
        return {"y": y, "x": x, "the gradient given": upstream, "the running mean": mean,
                "the running variance": variance, "the gradient of x": x.grad,
                "the gradient of weight": weight.grad, "the gradient of bias": bias.grad}

    for name, case in CASES.items():
        yield from beside(f"{ranks}, {name}", ranks, partial(call, case),
                          partial(_right, cut, *case), advice=ADVICE.get,
                          slips=partial(_slips, cut, ranks.index, case),
                          sends=(3, 3 * 16 * C + 2 * 8))
    x = (torch.linspace(1e7, 1e8, 64, dtype=torch.float64) / 3).expand(3, 64).to(device())
    y = sync_batch_norm(x, torch.ones(64).to(x), torch.zeros(64).to(x), EPS, **ranks.keywords)
    yield partial(expect, not y.isnan().any(), f"{ranks}: of 64 channels, each of one number from "
                  f"3e6 to 3e7, {int(y.isnan().any(0).sum())} are NaN", "mean(x * x) - mean(x) ** "
                  "2 comes out a bit below 0 by rounding, and has no root then: clamp(min=0).")
    yield refused("x (3, 64), weight (1,) and bias (1,)", lambda: sync_batch_norm(
        x, torch.ones(1).to(x), torch.zeros(1).to(x), EPS, **ranks.keywords))


def check_sync_batch_norm(sync_batch_norm):
    on_groups(_trial, sync_batch_norm, failures=FAILURES, at_once=True)
    yield "values of the whole batch's batch norm, on 4 ranks with 2, 5, 1 and 3 rows"
    yield "on 1 to 3 ranks too, one of them without a row; with 2 and 4 dimensions"
    yield "the gradient of x too; of weight and bias each rank has its own part"
    yield "mean and variance for evaluation are updated as torch does"
    yield "one all-reduce in forward, one in backward, of a few bytes; x and grad are unchanged"
    yield "inside a group it meets nobody else"
    yield "in float32 its digits stay, also where the mean is far from zero"
    yield "large numbers that are all equal give no NaN; a weight that is not (C,) is refused"
