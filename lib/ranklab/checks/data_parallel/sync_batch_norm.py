"""The check of sync_batch_norm: against torch's batch norm of the whole batch, in one process."""

from functools import partial

import torch
from torch.autograd import grad
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
    "y": "Sum x, x * x and the count over ranks, in float64: in float32 mean(x * x) - mean(x) ** 2 "
    "is a small difference of two large numbers. Return x's type.",
    "the running mean": "mean moves by momentum * (batch's mean - mean), in place.",
    "the running variance": "It moves towards the batch's variance with n - 1, not n: variance * n "
    "/ (n - 1), n being the count on all ranks.",
    "the gradient of x": "(grad - mean(grad) - normal * mean(grad * normal)) * weight * scale, "
    "with what this forward has put into ctx; for the means divide by the count of all ranks.",
    "x": "Make a new tensor.",
    "the gradient given": "backward changes the gradient that it was given: grad - ..., not -=.",
}


def _batch(rows, shape, dtype, mean, turn):
    """(x, the gradient given, weight, bias), in one process."""
    random = torch.Generator().manual_seed(10 * rows + turn)
    x, upstream = torch.randn(2, rows, *shape, generator=random, dtype=torch.float64)
    x = x * torch.arange(1, rows + 1).view(-1, *[1] * len(shape)) + mean  # rows differ in size
    weight, bias = torch.rand(2, C, generator=random, dtype=torch.float64)
    return [each.to(dtype) for each in (x, upstream, weight, bias)]


def _right(cut, *case):
    """{name: what each rank must have}"""
    given = _batch(sum(cut), *case)
    x, upstream, weight, bias = (each.double().requires_grad_() for each in given)
    running = torch.zeros_like(bias), torch.ones_like(bias)
    y = batch_norm(x, *running, weight, bias, True, 0.1, EPS)
    of_x, = grad(y, x, upstream, retain_graph=True)
    of_weights = [grad(part, (weight, bias), its, retain_graph=True)
                  for part, its in zip(y.split(cut), upstream.split(cut))]
    found = {"y": y.split(cut), "the gradient of x": of_x.split(cut), "x": x.split(cut),
             "the gradient of weight": [of_weight for of_weight, _ in of_weights],
             "the gradient of bias": [of_bias for _, of_bias in of_weights],
             "the running mean": [running[0]] * len(cut),
             "the running variance": [running[1]] * len(cut),
             "the gradient given": upstream.split(cut)}
    return {name: [each.detach().to(given[0].dtype) for each in of_ranks]
            for name, of_ranks in found.items()}


def _slips(cut, index, case, name, turn):
    """What usual mistakes get, where x has 2 dimensions: {what it is: (the value, a hint)}"""
    x, upstream, weight, bias = (each.double() for each in _batch(sum(cut), *case, turn))
    part, given = x.split(cut)[index], upstream.split(cut)[index]
    means, variances = map(torch.stack, zip(*map(_moments, filter(len, x.split(cut)))))
    shares = torch.tensor([[n / len(x)] for n in cut if n], dtype=x.dtype)
    mean, variance = _moments(x)
    if name == "y" and x.dim() == 2:
        return {f"normalised {by}": (batch_norm(part, *of, weight, bias, eps=eps).to(case[1]), hint)
                for by, *of, eps, hint in (
            ("by this rank's own mean and variance", *_moments(part if len(part) else x), EPS,
             "Nothing was summed over ranks."),
            ("by the mean of the ranks' variances", mean, (variances * shares).sum(0), EPS,
             "Variances do not average: the ranks' means differ too. Sum x and x * x."),
            ("by the mean of the ranks' means and of their variances", means.mean(0),
             variances.mean(0), EPS, "Variances do not average, nor do means of unequal parts: sum "
             "x, x * x and the count, in one tensor, and divide at the end."),
            ("by a variance that is divided by n - 1", mean, x.var(0), EPS,
             "For normalising, batch norm divides by n. (The running variance has n - 1.)"),
            (f"with an eps of 1e-5; here it is {EPS}", mean, variance, 1e-5, 
             "eps is an argument."))}
    if name == "the gradient of x" and x.dim() == 2:
        scale = (variance + EPS).rsqrt()
        normal = (part - mean) * scale
        right_by_own = given - given.mean(0) - normal * (given * normal).mean(0)
        return {"right for a mean and a variance that are constants": (
                    given * scale * weight, "Mean and variance depend on x as well."),
                "that of this rank's own sums": (
                    right_by_own * scale * weight, "Its x moved the mean of all ranks, so their "
                    "gradients count too: all-reduce both sums, in one tensor.")}
    if name in ("the gradient of weight", "the gradient of bias"):
        return {"the sum over all ranks": (sum(_right(cut, *case, turn)[name]), "Data parallelism "
                "averages this gradient later, as any: return this rank's own part.")}
    return {}


def _moments(x):
    return x.mean(0), x.var(0, unbiased=False)


def _trial(sync_batch_norm, ranks):
    cut = CUTS[ranks.size]

    def call(case, turn):
        x, upstream, weight, bias = (each.to(device()) for each in _batch(sum(cut), *case, turn))
        x, upstream = (each.split(cut)[ranks.index].clone() for each in (x, upstream))
        x, weight, bias = (leaf.requires_grad_() for leaf in (x, weight, bias))
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
                          partial(_right, cut, *case), advice=lambda name: ADVICE.get(name, ""),
                          slips=partial(_slips, cut, ranks.index, case),
                          sends=(3, 3 * 16 * C + 2 * 8))
    x = (torch.linspace(1e7, 1e8, 64, dtype=torch.float64) / 3).expand(3, 64).to(device())
    y = sync_batch_norm(x, torch.ones(64).to(x), torch.zeros(64).to(x), EPS, **ranks.keywords)
    yield partial(expect, not y.isnan().any(), f"{ranks}: NaN where all numbers of a channel are "
                  "equal", "mean(x * x) - mean(x) ** 2 is below 0 by rounding: clamp(min=0).")
    yield refused("x (3, 64), weight (1,) and bias (1,)", lambda: sync_batch_norm(
        x, torch.ones(1).to(x), torch.zeros(1).to(x), EPS, **ranks.keywords))


def check_sync_batch_norm(sync_batch_norm):
    on_groups(_trial, sync_batch_norm, failures=FAILURES, at_once=True)
    yield "values and running statistics of the whole batch, on 1 to 4 ranks, one without a row"
    yield "the gradient of x too; for weight and bias each rank keeps its own part"
    yield "one all-reduce in forward, one in backward, of a few bytes; x and grad are unchanged"
    yield "in float32 no digits are lost, even if the mean is far from zero"
    yield "large numbers that are all equal give no NaN; a weight that is not (C,) is refused"
