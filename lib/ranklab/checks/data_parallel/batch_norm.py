"""The check of sync_batch_norm: against torch's batch norm of the whole batch, in one process."""

import torch
import torch.distributed as dist
from torch.nn.functional import batch_norm

from ranklab.checks.data_parallel.replicas import GROUP, two_groups
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

C, EPS = 3, 1e-5
CUTS = {1: (6,), 3: (2, 5, 1), 4: (3, 0, 2, 1)}  # rows of each rank; one has none
GROUP_CUTS = ((3, 4), (2, 1))  # of ranks 0 and 2, and of 1 and 3
SHAPES = ((C,), (C, 4, 2))


def _whole(rows, shape, dtype=torch.float64, mean=0.0):
    random = torch.Generator().manual_seed(rows)
    x, upstream = torch.randn(2, rows, *shape, generator=random, dtype=torch.float64)
    x = x * torch.arange(1, rows + 1).view(-1, *[1] * len(shape)) + mean  # rows differ in size
    weight, bias = torch.rand(2, C, generator=random, dtype=torch.float64)
    return [each.to(dtype) for each in (x, upstream, weight, bias)]


def _norm_trial(sync_batch_norm, cut, dtype=torch.float64, mean=0.0):
    rank = dist.get_rank()
    mine = slice(sum(cut[:rank]), sum(cut[: rank + 1]))
    seen = [_one(sync_batch_norm, mine, *_whole(sum(cut), shape, dtype, mean)) for shape in SHAPES]
    return seen + ([_in_group(sync_batch_norm)] if len(cut) == 4 else [])


def _in_group(sync_batch_norm):
    group, rank = two_groups(), dist.get_rank()
    first, second = GROUP_CUTS[rank % 2]
    mine = slice(0, first) if rank < 2 else slice(first, None)
    return _one(sync_batch_norm, mine, *_whole(first + second, (C,)), group=group)


def _one(sync_batch_norm, mine, x, upstream, weight, bias, **group):
    x, upstream, weight, bias = (t.to(device()) for t in (x[mine], upstream[mine], weight, bias))
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    before = x.detach().clone()
    running = torch.zeros(C).to(x), torch.ones(C).to(x), 0.1
    with Traffic() as forward:
        y = sync_batch_norm(x, weight, bias, EPS, running=running, **group)
    with Traffic() as backward:
        y.backward(upstream)
    grads = [None if leaf.grad is None else leaf.grad.cpu() for leaf in (x, weight, bias)]
    return {"y": y.detach().cpu(), "grads": grads, "same": torch.equal(x.detach(), before),
            "running": [part.cpu() for part in running[:2]],
            "calls": [len(forward.ops), len(backward.ops)],
            "bytes": sum(op.payload_bytes for op in forward.ops)}


def _right(cut, shape, dtype=torch.float64, mean=0.0):
    """(y, gradients, running) of the whole batch; gradients of weight and bias rank by rank."""
    x, upstream, weight, bias = _whole(sum(cut), shape, dtype, mean)
    running = [torch.zeros(C, dtype=dtype), torch.ones(C, dtype=dtype)]
    x.requires_grad_()
    y = batch_norm(x, *running, weight, bias, True, 0.1, EPS)
    y.backward(upstream)
    normal = (y.detach() - bias.view(_wide(x))) / weight.view(_wide(x))
    over = [dim for dim in range(x.dim()) if dim != 1]
    own = [((g * n).sum(over), g.sum(over)) for g, n in zip(upstream.split(cut), normal.split(cut))]
    return y.detach(), x.grad, own, running


def _wide(x):
    return [-1 if dim == 1 else 1 for dim in range(x.dim())]


def check_sync_batch_norm(sync_batch_norm):
    for ranks, cut in CUTS.items():
        seen = on_ranks(_norm_trial, sync_batch_norm, cut, ranks=ranks)
        for number, shape in enumerate(SHAPES):
            _compare_values([of_rank[number] for of_rank in seen], cut, shape)
        if ranks == 3:
            yield "values of the whole batch's batch norm, on 3 ranks with 2, 5 and 1 rows"
        for number, shape in enumerate(SHAPES):
            _compare_gradients([of_rank[number] for of_rank in seen], cut, shape)
    yield "on 1 and 4 ranks too, one of them without a row; with 2 and 4 dimensions"
    yield "the gradient of x too; of weight and bias each rank has its own part"
    for of_rank in seen:
        for got, shape in zip(of_rank, SHAPES):  # the group's come last, and are left out
            _compare_running(got["running"], _right(cut, shape)[3])
    yield "mean and variance for evaluation are updated as torch does"
    for rank, of_rank in enumerate(seen):
        for got in of_rank:
            _compare_calls(rank, got)
    yield "one all-reduce in forward, one in backward, of a few bytes; x is unchanged"
    for rank, of_rank in enumerate(seen):
        _compare_group(rank, of_rank[-1])
    yield "inside a group it meets nobody else"
    _far_from_zero(sync_batch_norm)
    yield "in float32 its digits stay, also where the mean is far from zero"
    yield "and large numbers that are all equal give no NaN"


def _far(got, right, tolerance=1e-9):
    if got.shape != right.shape:
        return True
    return bool(got.numel()) and bool(((got - right).abs() > tolerance).any())


def _compare_values(seen, cut, shape):
    x, _, weight, bias = _whole(sum(cut), shape)
    right = _right(cut, shape)[0].split(cut)
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
        if not _far(y, right[rank]):
            continue
        where = f"rank {rank} of {len(cut)}, x {tuple(part.shape)}"
        if y.shape != right[rank].shape or y.dtype != right[rank].dtype:
            raise Mistake(f"{where}: it returned {tuple(y.shape)} in {y.dtype}; x's are wanted",
                          "Return what x is: the same shape, the same type.")
        for what, statistics, hint in slips:
            mean, variance = statistics or (part.mean(over), part.var(over, unbiased=False))
            slip = batch_norm(part, mean, variance, weight, bias, False, 0.1, EPS)
            if len(part) and not _far(y, slip):
                raise Mistake(f"{where}: {what}", hint)
        raise Mistake(f"{where}: the values are off by up to {(y - right[rank]).abs().max():.3g}",
                      "(x - mean) / sqrt(variance + eps) * weight + bias, in each channel.")


def _compare_gradients(seen, cut, shape):
    x, upstream, weight, _ = _whole(sum(cut), shape)
    _, of_x, own, _ = _right(cut, shape)
    for rank, got in enumerate(seen):
        where = f"rank {rank} of {len(cut)}"
        of, of_weight, of_bias = got["grads"]
        if of is None or of_weight is None or of_bias is None:
            raise Mistake(f"{where}: x, weight or bias gets no gradient",
                          "backward returns a gradient for each of the inputs of forward.")
        if _far(of, of_x.split(cut)[rank]):
            raise Mistake(f"{where}: the gradient of x is off by up to "
                          f"{(of - of_x.split(cut)[rank]).abs().max():.3g}; the values were right",
                          _gradient_hint(of, cut, rank, x, upstream, weight))
        for name, mine, right in (("weight", of_weight, own[rank][0]), ("bias", of_bias,
                                                                        own[rank][1])):
            if not _far(mine, right):
                continue
            of_all = sum(part[name == "bias"] for part in own)
            hint = ("It is the sum over all ranks. Data parallelism averages this gradient later, "
                    "as that of any layer: return this rank's own part."
                    if not _far(mine, of_all) else "weight: sum of grad * normalised x; bias: sum "
                    "of grad; over all dimensions but the channels, of this rank's rows.")
            raise Mistake(f"{where}: the gradient of {name} is off", hint)


def _gradient_hint(got, cut, rank, x, upstream, weight):
    over = [dim for dim in range(x.dim()) if dim != 1]
    wide, part = _wide(x), [each.split(cut)[rank] for each in (x, upstream)]
    scale = (x.var(over, unbiased=False) + EPS).rsqrt().view(wide)
    normal = (part[0] - x.mean(over).view(wide)) * scale
    plain = part[1] * scale * weight.view(wide)
    if not _far(got, plain):
        return ("Mean and variance depend on x as well: two more terms, the mean of grad and the "
                "mean of grad * normalised x, over all ranks.")
    n = max(1, part[0].numel() // C)
    own = [t.sum(over).view(wide) / n for t in (part[1], part[1] * normal)]
    if not _far(got, (part[1] - own[0] - normal * own[1]) * scale * weight.view(wide)):
        return ("These are this rank's own sums. Its x moved the mean of all ranks, so their "
                "gradients count too: all-reduce both sums, in one tensor.")
    return ("(grad - mean(grad) - normal * mean(grad * normal)) * weight / sqrt(variance + eps): "
            "both means over the batch of all ranks, so divide by the count of all.")


def _compare_running(got, right):
    mean, variance = got
    if _far(mean, right[0]):
        raise Mistake("the running mean is off", "mean moves by momentum * (batch's mean - mean), "
                      "in place.")
    if _far(variance, right[1]):
        raise Mistake("the running variance is off", "It moves towards the batch's variance with "
                      "n - 1, not n: variance * n / (n - 1), n being the count on all ranks.")


def _compare_calls(rank, got):
    for calls, where in zip(got["calls"], ("forward", "backward")):
        if calls != 1:
            raise Mistake(f"rank {rank} of 4: {calls} collectives in {where}; one is enough",
                          "Put what is to be summed into one tensor with torch.cat: at this size "
                          "a message costs its latency.")
    if got["bytes"] > 16 * C + 8:
        raise Mistake(f"rank {rank} of 4: {got['bytes']} bytes in forward; {16 * C + 8} are enough",
                      "Two sums a channel and the count: no row of x has to travel.")
    if not got["same"]:
        raise Mistake("x itself was changed", "Make a new tensor.")


def _compare_group(rank, got):
    cut = GROUP_CUTS[rank % 2]
    y, of_x, _, _ = _right(cut, (C,))
    for what, mine, right in (("values are", got["y"], y), ("gradient of x is",
                                                            got["grads"][0], of_x)):
        if _far(mine, right.split(cut)[rank // 2]):
            raise Mistake(f"in the group of ranks {rank % 2} and {rank % 2 + 2} the {what} not "
                          "that of these two ranks' batch", GROUP)


def _far_trial(sync_batch_norm, cut, mean):
    """Values far from zero; then 64 channels, each of one large number."""
    x = (torch.linspace(1e7, 1e8, 64, dtype=torch.float64) / 3).expand(3, 64).to(device())
    constant = sync_batch_norm(x, torch.ones(64).to(x), torch.zeros(64).to(x), EPS)
    return (*_norm_trial(sync_batch_norm, cut, torch.float32, mean), constant.cpu())


def _far_from_zero(sync_batch_norm):
    cut, mean = (3, 4), 3000.0
    seen = on_ranks(_far_trial, sync_batch_norm, cut, mean, ranks=2)
    for number, shape in enumerate(SHAPES):
        x, _, weight, bias = _whole(7, shape, torch.float32, mean)
        right = batch_norm(x.double(), None, None, weight.double(), bias.double(), True, 0, EPS)
        for of_rank, wanted in zip(seen, right.split(cut)):
            if of_rank[number]["y"].dtype != torch.float32:
                raise Mistake("float32 came in, another type went out", "Return x's own type.")
            off = (of_rank[number]["y"] - wanted).abs().max().item()
            if not off < 1e-2:
                what = f"with a mean of {mean:g} and float32 the values are off by {off:.2g}"
                raise Mistake(what, "mean(x * x) - mean(x) ** 2 is a small difference of two large "
                              "numbers. Sum in float64: x.double().")
    for *_, constant in seen:
        nans = int(constant.isnan().any(0).sum())
        if nans:
            raise Mistake(f"of 64 channels, each of one number from 3e6 to 3e7, {nans} are NaN",
                          "mean(x * x) - mean(x) ** 2 comes out a bit below 0 by rounding, and has "
                          "no root then: clamp(min=0).")
