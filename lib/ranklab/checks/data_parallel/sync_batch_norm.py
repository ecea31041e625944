"""The check of sync_batch_norm: compared with torch's batch norm of the whole batch."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import batch_norm, pad

from ranklab.checks.data_parallel.sent import OUTSIDE, Sent
from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage, must_refuse
from ranklab.data_parallel import sync_batch_norm
from ranklab.engine import device

C, EPS = 3, 0.25  # not the default of eps, and large: it shows
CUTS = {4: (2, 5, 1, 3), 3: (3, 0, 2), 2: (1, 3), 1: (6,)}  # rows of each rank of a group
FAR = 4096  # from zero; the numbers are whole, so that sums of squares are exact in float32 too
BYTES, CALLS, NAN = ("bytes in collectives", "calls of collectives in two forwards and a backward",
                     "NaN where all numbers of a channel are equal")


class Case(NamedTuple):
    name: str
    shape: tuple = (C,)
    dtype: torch.dtype = torch.float64
    far: int = 0

    def __str__(self):
        return self.name

    def batch(self, rows, turn):
        """Return (x, the gradient of y, weight, bias) in one process."""
        random = torch.Generator().manual_seed(10 * rows + turn)
        x, upstream = torch.randn(2, rows, *self.shape, generator=random, dtype=torch.float64)
        x = x * torch.arange(1, rows + 1).view(-1, *[1] * len(self.shape))  # rows differ in size
        if self.far:
            x = self.far + 4 * x.round()
        else:
            x[:, 0] /= 64  # a variance below eps
        weight, bias = torch.rand(2, C, generator=random, dtype=torch.float64)
        return [each.to(device(), self.dtype) for each in (x, upstream, weight, bias)]


EQUAL, REFUSED = Case("numbers that are all equal"), Case("x (3, 64), weight (1,) and bias (1,)")
CASES = (Case("x of 2 dimensions"), Case("x of 4 dimensions", (C, 4, 2)),
         Case(f"float32, mean {FAR}", dtype=torch.float32, far=FAR), EQUAL, REFUSED)


def _see(fn, case, ranks):
    if case in (EQUAL, REFUSED):
        x = (torch.linspace(1e7, 1e8, 64, dtype=torch.float64) / 3).expand(3, 64).to(device())
        n = 64 if case == EQUAL else 1
        arguments = x, torch.ones(n).to(x), torch.zeros(n).to(x), 1e-3
        if case == EQUAL:
            yield {NAN: Must(bool(fn(*arguments, **ranks.keywords).isnan().any()), False)}
        else:
            yield {"what it raises": must_refuse(fn, *arguments, **ranks.keywords)}
        return
    yield from [_call(fn, case, ranks, turn) for turn in (0, 1)]  # what is kept would be seen


def _call(fn, case, ranks, turn):
    cut = CUTS[ranks.size]
    x, upstream, weight, bias = case.batch(sum(cut), turn)
    x, upstream = (each.split(cut)[ranks.index].clone() for each in (x, upstream))
    x, weight, bias = (leaf.requires_grad_() for leaf in (x, weight, bias))
    mean, variance = torch.zeros(C).to(x), torch.ones(C).to(x)
    with Sent() as sent:
        y = fn(x, weight, bias, EPS, running=(mean, variance, 0.1), **ranks.keywords)
        # Another layer's forward comes before the backward of this one.
        fn(3 * x.detach() + 1, weight.detach(), bias.detach(), EPS, **ranks.keywords)
        y.backward(upstream)
    ops = sent.traffic.ops
    return {"y": y, "the gradient of x": x.grad, "the gradient of weight": weight.grad,
            "the gradient of bias": bias.grad, "the running mean": mean,
            "the running variance": variance, "x afterwards": x,
            "the gradient of y afterwards": upstream, CALLS: AtMost(len(ops), 3),
            BYTES: AtMost(sum(op.payload_bytes for op in ops), 3 * 16 * C + 2 * 8),
            } | sent.ended(ranks)


class SumOverRanks(torch.autograd.Function):
    """A sum over ranks through which gradients flow: they are summed over ranks as well."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        dist.all_reduce(x, group=group)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def of_the_whole(x, weight, bias, eps=1e-5, group=None, running=None):
    """Put all ranks' rows together, and let torch normalise them."""
    if weight.shape != x.shape[1:2]:
        raise ValueError(f"weight {tuple(weight.shape)}")
    rows = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, len(x), group=group)
    above = sum(rows[:dist.get_rank(group)])
    place = [0] * (2 * x.dim() - 2) + [above, sum(rows) - above - len(x)]  # last dimension first
    whole = SumOverRanks.apply(pad(x.double(), place), group)
    mean, variance, momentum = running or (None, None, 0.1)
    wide = [each if each is None else each.to(whole, copy=True) for each in (mean, variance)]
    y = batch_norm(whole, *wide, weight.double(), bias.double(), True, momentum, eps)
    if running:
        mean.copy_(wide[0])
        variance.copy_(wide[1])
    return y[above:above + len(x)].to(x.dtype)


FORWARD = "dist.all_reduce(sums, group=group)\n            n"  # the other one is in backward
VARIANCE = "variance = (square - mean.square()).clamp(min=0)"
SAVED = "x, weight, mean, scale, n"
OF_X = "grad - by_mean - normal * by_variance"
SUMS_OF = "sums / n).chunk"
BATCH_NORM = Proof(
    sync_batch_norm,
    Stage({"values and running statistics of the whole batch, on 1 to 4 ranks, one without a row":
           (),
           "also the gradient of x; for weight and bias each rank keeps its own part":
           ("the gradient of x", "the gradient of weight", "the gradient of bias"),
           "one all-reduce in forward, one in backward, of a few bytes; x and grad are unchanged":
           ("x afterwards", "the gradient of y afterwards", CALLS, BYTES, OUTSIDE),
           "in float32 no digits are lost, even if the mean is far from zero": (),
           "large numbers that are all equal give no NaN; a weight that is not (C,) is refused":
           (NAN, "what it raises")},
          _see, CASES, (4,), (ALL, *GROUPS), oracle=of_the_whole),
    mistakes=(
        # forward
        Slip("x is normalised by this rank's own mean and variance: nothing was summed over ranks.",
             (FORWARD, "n", "n < 2", "n < 1")),
        Slip("n is this rank's own count here, and one rank has a single row: all-reduce both "
             "sums and the count, in one tensor.",
             (FORWARD, "n"), (FORWARD, "dist.all_reduce(sums[:-1], group=group)\n            n")),
        Slip("Variances cannot be averaged, because the ranks' means differ as well. Sum x and x * "
             "x.",
             (VARIANCE, "variance = wide.var(dims, unbiased=False) * count / n\n"
              "            dist.all_reduce(variance, group=group)")),
        Slip("Neither variances nor means of unequal parts can be averaged: sum x, x * x and the "
             "count in one tensor, and divide at the end.",
             (VARIANCE, "mean, variance = wide.mean(dims), wide.var(dims, unbiased=False)\n"
              "            for each in mean, variance:\n                dist.all_reduce("
              "each.div_(dist.get_world_size(group)), group=group)")),
        Slip("To normalise, batch norm uses the variance divided by n. (Only the running variance "
             "uses n - 1.)",
             (VARIANCE, f"{VARIANCE} * n / (n - 1)")),
        Slip("The variance is mean(x * x) - mean(x) ** 2: the mean must be squared.",
             ("square - mean.square()", "square - mean")),
        Slip("The variance is mean(x * x) here: subtract mean(x) ** 2.",
             ("square - mean.square()", "square")),
        Slip("eps is an argument: do not hard-code it.", ("variance + eps", "variance + 1e-5")),
        Slip("eps goes inside the root: rsqrt(variance + eps).",
             ("(variance + eps).rsqrt()", "1 / (variance.sqrt() + eps)")),
        Slip("Return weight * normal + bias.", (" + bias.view(shape)", ""),
             ("normal * weight.view(shape)", "normal")),
        Slip("Return y in x's dtype.", (").to(x.dtype)\n\n", ")\n\n")),
        Slip("Sum x, x * x and the count over ranks in float64: mean(x * x) - mean(x) ** 2 is a "
             "small difference of two large numbers, imprecise in float32.",
             ("x.shape[1], x.double()", "x.shape[1], x")),
        Slip("Rounding makes mean(x * x) - mean(x) ** 2 negative here: use clamp(min=0).",
             (".clamp(min=0)", "")),
        Slip("Use clamp(min=0): a variance can be smaller than eps, which is added afterwards.",
             ("clamp(min=0)", "clamp(min=eps)")),
        Slip("Take the mean over all dimensions except the channels.",
             ("if dim != 1]", "if dim == 0]", "x.numel() // C", "len(x)")),
        # the running statistics
        Slip("Update the running mean and variance in place.", ("if running:", "if False:"),
             ("running_mean += momentum * (mean - running_mean)",
              "running_mean = running_mean + momentum * (mean - running_mean)",
              "running_variance += momentum * (variance * n / (n - 1) - running_variance)",
              "running_variance = running_variance + momentum * (variance - running_variance)")),
        Slip("The running variance uses the batch's variance with n - 1, not n: variance * n / (n "
             "- 1), where n is the count over all ranks.",
             ("variance * n / (n - 1)", "variance")),
        Slip("In torch, momentum is the weight of the new batch: running += momentum * (mean - "
             "running).", ("momentum * (mean - running_mean)", "(1 - momentum) * (mean - "
                           "running_mean)", "momentum * (variance *",
                           "(1 - momentum) * (variance *")),
        # backward
        Slip("x also changes y through the mean and the variance: subtract both of these terms "
             "from grad.", (OF_X, "grad")),
        Slip("x also changes y through the variance: the gradient of x lacks that term.",
             (OF_X, "grad - by_mean")),
        Slip("x also changes y through the mean: the gradient of x lacks that term.",
             (OF_X, "grad - normal * by_variance")),
        Slip("The gradient of x has weight as a factor.",
             ("(scale * weight).view(shape)", "scale.view(shape)")),
        Slip("This rank's x affects the mean used on all ranks, so their gradients count as well: "
             "all-reduce both sums in one tensor.",
             (SUMS_OF, "local_sums * x.shape[1] / max(1, x.numel())).chunk"),
             ("            dist.all_reduce(sums, group=group)  # each value moved the mean, and so "
              "all ranks' y\n", "")),
        Slip("For the means in backward, divide by the count over all ranks.",
             (SUMS_OF, "sums * x.shape[1] / max(1, x.numel())).chunk")),
        Slip("Data parallelism later averages the gradients of weight and bias like any others: "
             "return this rank's own part.",
             ("local_sums.to(weight.dtype)", "sums.to(weight.dtype)")),
        Slip("The gradients of weight and bias are swapped.",
             ("bias_grad, weight_grad =", "weight_grad, bias_grad =")),
        Slip("Backward needs what its own forward saved in ctx: another layer's forward runs in "
             "between.", ("running=None)", "running=None, kept={})",
                          f"ctx.save_for_backward({SAVED})",
                          "ctx.save_for_backward(x, weight)\n            kept[C] = mean, scale, n",
                          f"{SAVED} = ctx.saved_tensors", "x, weight = ctx.saved_tensors\n"
                          "            mean, scale, n = kept[x.shape[1]]")),
        Slip("Your backward overwrites the gradient that it was given: compute grad - ..., do not "
             "use -=.",
             (OF_X, "grad.sub_(by_mean + normal * by_variance)")),
        # what is sent
        Slip("Every call pays its own latency: send both sums and the count in one tensor.",
             (FORWARD, "for part in sums[:-1], sums[-1:]:\n                "
              "dist.all_reduce(part, group=group)\n            n")),
        Slip("An all-gather sends every rank's sums; an all-reduce adds them up on the way.",
             (FORWARD, "every = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))"
              "]\n            dist.all_gather(every, sums, group=group)\n"
              "            sums = sum(every)\n            n")),
        Slip("Send only what is needed, and only once.",
             ("sums = local_sums.clone()", "sums = torch.cat([local_sums, local_sums])",
              "(sums / n)", "(sums[: len(local_sums)] / n)")),
        Slip("Pass `group` to both all-reduces.", (FORWARD, "dist.all_reduce(sums)\n"
                                                     "            n"),
             ("group=group)  #", "group=None)  #")),
        Slip("Keep the check of the shapes, which raises a ValueError.",
             (" or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]", "")),
    ), hints=(
        "Forward: which three sums over ranks give mean and variance? Backward: through which "
        "paths does x enter y?",
        "Forward: torch.cat([sum of x, sum of x * x, count]) in float64, one all-reduce. Backward: "
        "sums of grad and of grad * normal, one all-reduce of a copy; the gradients of weight and "
        "bias are this rank's own sums.",
        "mean, square = (sums[:-1] / n).split(C); variance = (square - mean ** 2).clamp(min=0); "
        "gradient of x: (grad - mean over ranks of grad - normal * mean over ranks of grad * "
        "normal) * scale * weight",
    ))
