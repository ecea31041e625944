"""Batch norm over the batch of all ranks: forward and backward by hand.

It computes in float64, because mean(x^2) - mean(x)^2 loses all its digits in float32 if the mean
is far from zero. A simplification: whole activations are converted to float64, 8 bytes a number,
and most GPUs are slow at that. torch's kernels keep x in its own type, and merge the means and
variances of the ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def sync_batch_norm(x, weight, bias, eps=1e-5, group=None, running=None):
    """Normalise each channel of x by its mean and variance over the batches of all ranks.

    Batches may differ in size. Gradients of weight and bias are this rank's own part.
    running: (mean, variance, momentum), the statistics for evaluation, updated in place.
    Shape: x (B/R, C, ...), weight and bias (C,) -> x's.
    Cost: one all-reduce of 16 C + 8 bytes in forward, one of 16 C bytes in backward.
    Raises: ValueError for a weight or bias that is not (C,); on every rank if a channel has fewer
        than 2 values.
    Lab: 03
    """
    if x.dim() < 2 or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        raise ValueError(f"x {tuple(x.shape)} must be (B, C, ...), and weight and bias (C,), not "
                         f"{tuple(weight.shape)} and {tuple(bias.shape)}")
    dims = [dim for dim in range(x.dim()) if dim != 1]  # all but the channels
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]  # (C,) -> (1, C, 1, ...)

    class NormaliseOverRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            C, wide = x.shape[1], x.double()  # mean(x^2) - mean(x)^2 cancels in float32
            count = wide.new_tensor([x.numel() // C])
            sums = torch.cat([wide.sum(dims), wide.square().sum(dims), count])  # (2 C + 1,)
            dist.all_reduce(sums, group=group)
            n = sums[-1]  # values of a channel, on all ranks
            mean, square = (sums[:-1] / n).split(C)
            variance = (square - mean.square()).clamp(min=0)
            scale = (variance + eps).rsqrt()
            if x.numel() <= C and n < 2:  # in this order: reading n waits for the device
                raise ValueError(f"n={n:.0f} values in a channel of all ranks must be at least 2")
            if running:
                running_mean, running_variance, momentum = running
                running_mean += momentum * (mean - running_mean)
                running_variance += momentum * (variance * n / (n - 1) - running_variance)
            ctx.save_for_backward(x, weight, mean, scale, n)
            normal = (wide - mean.view(shape)) * scale.view(shape)
            return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, scale, n = ctx.saved_tensors
            normal = (x.double() - mean.view(shape)) * scale.view(shape)
            local_sums = torch.cat([grad.double().sum(dims), (grad * normal).sum(dims)])  # (2 C,)
            sums = local_sums.clone()
            dist.all_reduce(sums, group=group)  # each value moved the mean, and so all ranks' y
            by_mean, by_variance = (part.view(shape) for part in (sums / n).chunk(2))
            x_grad = (grad - by_mean - normal * by_variance) * (scale * weight).view(shape)
            bias_grad, weight_grad = local_sums.to(weight.dtype).chunk(2)
            return x_grad.to(x.dtype), weight_grad, bias_grad

    return NormaliseOverRanks.apply(x, weight, bias)


def batch_norm_bytes(channels):
    """Count the bytes all-reduced by sync_batch_norm in forward: two sums a channel, and a count.
    """
    return (2 * channels + 1) * torch.float64.itemsize


class SyncBatchNorm(_BatchNorm):
    """Train a batch norm (1d, 2d or 3d) with the statistics of all ranks' batches together.

    In evaluation it is an ordinary batch norm. torch.nn.SyncBatchNorm does the same on GPUs.
    """

    def __init__(self, num_features, *args, group=None, **kwargs):
        super().__init__(num_features, *args, **kwargs)
        self.group = group

    def _check_input_dim(self, x):
        """Check nothing: sync_batch_norm checks the shape itself."""

    def forward(self, x):
        if not self.training and self.track_running_stats:
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if not self.affine:
            weight, bias = x.new_ones(x.shape[1]), x.new_zeros(x.shape[1])
        running = None
        if self.track_running_stats:
            self.num_batches_tracked += 1
            momentum = self.momentum
            if momentum is None:  # the plain mean over all batches so far
                momentum = 1 / self.num_batches_tracked.item()
            running = self.running_mean, self.running_var, momentum
        return sync_batch_norm(x, weight, bias, self.eps, self.group, running)


def convert_sync_batch_norm(model, group=None):
    """Replace every batch norm of `model` by a SyncBatchNorm with the same parameters.

    All ranks must send its messages in the same order. In the group of a Replica these messages
    come between those of the buckets, and the order differs if ranks use different parameters:
    then pass a separate group, dist.new_group().
    Returns: the model itself, or its replacement if the model is a batch norm.
    """
    if isinstance(model, _BatchNorm) and not isinstance(model, SyncBatchNorm):
        norm = SyncBatchNorm(model.num_features, model.eps, model.momentum, model.affine,
                             model.track_running_stats, group=group)
        norm._parameters, norm._buffers = model._parameters, model._buffers
        return norm.train(model.training)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batch_norm(child, group))
    return model


def sync_batch_norm_groups(model):
    """List the group of each SyncBatchNorm in `model`, ours or torch's; None means all ranks."""
    return [norm.group if isinstance(norm, SyncBatchNorm) else norm.process_group
            for norm in model.modules() if isinstance(norm, (SyncBatchNorm, nn.SyncBatchNorm))]
