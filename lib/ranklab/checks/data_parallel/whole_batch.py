"""What sync_batch_norm should give: torch's batch norm of the whole batch, in one process."""

import torch
from torch.nn.functional import batch_norm

from ranklab.checks.exercise import Mistake

C, EPS = 3, 1e-3  # not the default of eps


def whole_batch(rows, shape, dtype=torch.float64, mean=0.0):
    random = torch.Generator().manual_seed(rows)
    x, upstream = torch.randn(2, rows, *shape, generator=random, dtype=torch.float64)
    x = x * torch.arange(1, rows + 1).view(-1, *[1] * len(shape)) + mean  # rows differ in size
    weight, bias = torch.rand(2, C, generator=random, dtype=torch.float64)
    return [each.to(dtype) for each in (x, upstream, weight, bias)]


def right_answer(cut, shape, dtype=torch.float64, mean=0.0):
    """(y, gradients, running) of the whole batch; gradients of weight and bias rank by rank."""
    x, upstream, weight, bias = whole_batch(sum(cut), shape, dtype, mean)
    running = [torch.zeros(C, dtype=dtype), torch.ones(C, dtype=dtype)]
    x.requires_grad_()
    y = batch_norm(x, *running, weight, bias, True, 0.1, EPS)
    y.backward(upstream)
    normal = (y.detach() - bias.view(_wide(x))) / weight.view(_wide(x))
    over = [dim for dim in range(x.dim()) if dim != 1]
    own = [((g * n).sum(over), g.sum(over)) for g, n in zip(upstream.split(cut), normal.split(cut))]
    return y.detach(), x.grad, own, running


def _normalised(x, mean, weight, bias, eps):
    over = [dim for dim in range(x.dim()) if dim != 1]
    return batch_norm(x, mean, x.var(over, unbiased=False), weight, bias, False, 0.1, eps)


def _wide(x):
    return [-1 if dim == 1 else 1 for dim in range(x.dim())]


def far(got, right, tolerance=1e-9):
    if got.shape != right.shape:
        return True
    return bool(got.numel()) and bool(((got - right).abs() > tolerance).any())


def compare_values(seen, cut, shape):
    x, _, weight, bias = whole_batch(sum(cut), shape)
    right = right_answer(cut, shape)[0].split(cut)
    over = [dim for dim in range(x.dim()) if dim != 1]
    parts = [part for part in x.split(cut) if len(part)]
    counts = torch.tensor([len(part) for part in parts], dtype=x.dtype)
    means = torch.stack([part.mean(over) for part in parts])
    variances = torch.stack([part.var(over, unbiased=False) for part in parts])
    share = (counts / counts.sum()).view(-1, 1)
    whole = x.mean(over)
    slips = (
        ("these are this rank's own mean and variance", None, "Nothing was summed over ranks."),
        ("the variance is the mean of the ranks' variances", (whole, (variances * share).sum(0)),
         "Variances do not average: the ranks' means differ too. Sum x and x * x over ranks."),
        ("the mean of the ranks' means and variances was taken", (means.mean(0), variances.mean(0)),
         "Ranks have different numbers of rows, and variances do not average. Sum x, x * x and "
         "the count over ranks, in one tensor, and divide at the end."),
        ("each rank counts the same in the mean", (means.mean(0), x.var(over, unbiased=False)),
         "Ranks have different numbers of rows: send the count along, and divide by its sum."),
        ("the variance is divided by n - 1", (whole, x.var(over)),
         "For normalising, batch norm divides by n. (The running variance has n - 1.)"),
    )
    for rank, got in enumerate(seen):
        y, part = got["y"], x.split(cut)[rank]
        if not far(y, right[rank]):
            continue
        where = f"rank {rank} of {len(cut)}, x {tuple(part.shape)}"
        if y.shape != right[rank].shape or y.dtype != right[rank].dtype:
            raise Mistake(f"{where}: it returned {tuple(y.shape)} in {y.dtype}; x's are wanted",
                          "Return what x is: the same shape, the same type.")
        for what, statistics, hint in slips:
            mean, variance = statistics or (part.mean(over), part.var(over, unbiased=False))
            slip = batch_norm(part, mean, variance, weight, bias, False, 0.1, EPS)
            if len(part) and not far(y, slip):
                raise Mistake(f"{where}: {what}", hint)
        if not far(y, _normalised(x, whole, weight, bias, eps=1e-5).split(cut)[rank]):
            raise Mistake(f"{where}: eps is {EPS} here, not 1e-5", "eps is an argument.")
        raise Mistake(f"{where}: the values are off by up to {(y - right[rank]).abs().max():.3g}",
                      "(x - mean) / sqrt(variance + eps) * weight + bias, in each channel; "
                      "means are over the sum of all ranks' counts, x.numel() // C each.")


def compare_gradients(seen, cut, shape):
    x, upstream, weight, _ = whole_batch(sum(cut), shape)
    _, of_x, own, _ = right_answer(cut, shape)
    for rank, got in enumerate(seen):
        where = f"rank {rank} of {len(cut)}"
        of, of_weight, of_bias = got["grads"]
        if of is None or of_weight is None or of_bias is None:
            raise Mistake(f"{where}: x, weight or bias gets no gradient",
                          "backward returns a gradient for each of the inputs of forward.")
        if far(of, of_x.split(cut)[rank]):
            raise Mistake(f"{where}: the gradient of x is off by up to "
                          f"{(of - of_x.split(cut)[rank]).abs().max():.3g}; the values were right",
                          _gradient_hint(of, cut, rank, x, upstream, weight))
        for name, mine, right in (("weight", of_weight, own[rank][0]), ("bias", of_bias,
                                                                        own[rank][1])):
            if not far(mine, right):
                continue
            of_all = sum(part[name == "bias"] for part in own)
            hint = ("It is the sum over all ranks. Data parallelism averages this gradient later, "
                    "as that of any layer: return this rank's own part."
                    if not far(mine, of_all) else "weight: sum of grad * normalised x; bias: sum "
                    "of grad; over all dimensions but the channels, of this rank's rows.")
            raise Mistake(f"{where}: the gradient of {name} is off", hint)


def _gradient_hint(got, cut, rank, x, upstream, weight):
    over = [dim for dim in range(x.dim()) if dim != 1]
    wide, part = _wide(x), [each.split(cut)[rank] for each in (x, upstream)]
    scale = (x.var(over, unbiased=False) + EPS).rsqrt().view(wide)
    normal = (part[0] - x.mean(over).view(wide)) * scale
    plain = part[1] * scale * weight.view(wide)
    if not far(got, plain):
        return ("Mean and variance depend on x as well: two more terms, the mean of grad and the "
                "mean of grad * normalised x, over all ranks.")
    n = max(1, part[0].numel() // C)
    own = [t.sum(over).view(wide) / n for t in (part[1], part[1] * normal)]
    if not far(got, (part[1] - own[0] - normal * own[1]) * scale * weight.view(wide)):
        return ("These are this rank's own sums. Its x moved the mean of all ranks, so their "
                "gradients count too: all-reduce both sums, in one tensor.")
    return ("(grad - mean(grad) - normal * mean(grad * normal)) * weight / sqrt(variance + eps): "
            "both means over the batch of all ranks, so divide by the count of all.")
