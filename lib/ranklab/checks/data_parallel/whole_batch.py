"""What sync_batch_norm should give: torch's batch norm of the whole batch, in one process."""

import torch
from torch.nn.functional import batch_norm

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain, is_near, rank_name

C, EPS = 3, 1e-3  # not the default of eps


def whole_batch(rows, shape, dtype=torch.float64, mean=0.0):
    random = torch.Generator().manual_seed(rows)
    x, upstream = torch.randn(2, rows, *shape, generator=random, dtype=torch.float64)
    x = x * torch.arange(1, rows + 1).view(-1, *[1] * len(shape)) + mean  # rows differ in size
    weight, bias = torch.rand(2, C, generator=random, dtype=torch.float64)
    return [each.to(dtype) for each in (x, upstream, weight, bias)]


def right_answer(cut, shape):
    """(y, gradients, running) of the whole batch; gradients of weight and bias rank by rank."""
    x, upstream, weight, bias = whole_batch(sum(cut), shape)
    running = [torch.zeros(C).to(x), torch.ones(C).to(x)]
    x.requires_grad_()
    y = batch_norm(x, *running, weight, bias, True, 0.1, EPS)
    y.backward(upstream)
    normal = (y.detach() - _wide(bias, x)) / _wide(weight, x)
    own = [((g * n).sum(_over(x)), g.sum(_over(x)))
           for g, n in zip(upstream.split(cut), normal.split(cut))]
    return y.detach().split(cut), x.grad.split(cut), own, running


def _over(x):
    """All dimensions but the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(of_channels, x):
    """(C,) in a shape that goes with x's: (C, 1, ...)."""
    return of_channels.view(-1, *[1] * (x.dim() - 2))


def _moments(x):
    return x.mean(_over(x)), x.var(_over(x), unbiased=False)


def compare_values(seen, cut, shape):
    x, _, weight, bias = whole_batch(sum(cut), shape)
    for rank, (got, right, part) in enumerate(zip(seen, right_answer(cut, shape)[0], x.split(cut))):
        if is_near(got["y"], right):
            continue
        slips = {f"normalised {by}": (batch_norm(part, mean, variance, weight, bias, eps=eps), hint)
                 for by, mean, variance, eps, hint in _slips(x, cut, part)}
        hint = ("(x - mean) / sqrt(variance + eps) * weight + bias, in each channel; means are "
                "over the sum of all ranks' counts, x.numel() // C each.")
        if (got["y"].shape, got["y"].dtype) != (right.shape, right.dtype):
            hint = "Return what x is: the same shape, the same type."
        explain(f"{rank_name(rank, len(cut))}, x {tuple(part.shape)}: what it returned", got["y"],
                right, slips, hint)


def _slips(x, cut, part):
    """What usual mistakes normalise by: (name, mean, variance, eps, hint)."""
    parts = [each for each in x.split(cut) if len(each)]
    means, variances = map(torch.stack, zip(*map(_moments, parts)))
    shares = torch.tensor([[len(each) / len(x)] for each in parts], dtype=x.dtype)
    mean, variance = _moments(x)
    return (
        ("by this rank's own mean and variance", *_moments(part), EPS,
         "Nothing was summed over ranks."),
        ("by the mean of the ranks' variances", mean, (variances * shares).sum(0), EPS,
         "Variances do not average: the ranks' means differ too. Sum x and x * x over ranks."),
        ("by the mean of the ranks' means and of their variances", means.mean(0),
         variances.mean(0), EPS, "Ranks have different numbers of rows, and variances do not "
         "average. Sum x, x * x and the count over ranks, in one tensor, and divide at the end."),
        ("by a mean in which each rank counts the same", means.mean(0), variance, EPS,
         "Ranks have different numbers of rows: send the count along, and divide by its sum."),
        ("by a variance that is divided by n - 1", mean, x.var(_over(x)), EPS,
         "For normalising, batch norm divides by n. (The running variance has n - 1.)"),
        (f"with an eps of 1e-5; here it is {EPS}", mean, variance, 1e-5, "eps is an argument."),
    )


def compare_gradients(seen, cut, shape):
    _, of_x, own, _ = right_answer(cut, shape)
    of_all = [sum(parts) for parts in zip(*own)]
    for rank, got in enumerate(seen):
        where = rank_name(rank, len(cut))
        if any(grad is None for grad in got["grads"]):
            raise Mistake(f"{where}: x, weight or bias gets no gradient",
                          "backward returns a gradient for each of the inputs of forward.")
        grad, *of_others = got["grads"]
        if not is_near(grad, of_x[rank]):
            explain(f"{where}: the values were right; the gradient of x", grad, of_x[rank],
                    _gradient_slips(cut, rank, shape),
                    "(grad - mean(grad) - normal * mean(grad * normal)) * weight / sqrt(variance + "
                    "eps): both means over the batch of all ranks, so divide by the count of all.")
        for name, mine, right, gathered in zip(("weight", "bias"), of_others, own[rank], of_all):
            explain(f"{where}: the gradient of {name}", mine, right,
                    {"the sum over all ranks": (gathered, "Data parallelism averages this "
                     "gradient later, as that of any layer: return this rank's own part.")},
                    "weight: sum of grad * normalised x; bias: sum of grad; over all dimensions "
                    "but the channels, of this rank's rows.")


def _gradient_slips(cut, rank, shape):
    x, upstream, weight, _ = whole_batch(sum(cut), shape)
    mean, variance = _moments(x)
    part, grad = x.split(cut)[rank], upstream.split(cut)[rank]
    scale = _wide((variance + EPS).rsqrt(), x)
    normal = (part - _wide(mean, x)) * scale
    by_mean, by_variance = (_wide(each.mean(_over(x)), x) for each in (grad, grad * normal))
    scale = scale * _wide(weight, x)
    return {
        "right for a mean and a variance that are constants": (
            grad * scale, "Mean and variance depend on x as well: two more terms, the mean of grad "
            "and the mean of grad * normalised x, over all ranks."),
        "that of this rank's own sums": (
            (grad - by_mean - normal * by_variance) * scale, "Its x moved the mean of all ranks, "
            "so their gradients count too: all-reduce both sums, in one tensor."),
    }
