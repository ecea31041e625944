"""What Horovod's two savings are worth, before anything is run; by the model of collectives."""

import math

import torch

from ranklab.collectives import alpha_beta_time
from ranklab.horovod.fusion import fuse_tensors


def fused_time(sizes, threshold, ranks, alpha, beta):
    """Seconds of ring all-reduces for tensors of `sizes` bytes, fused up to `threshold` bytes.

    lab    05
    """
    tensors = [torch.empty(n, dtype=torch.uint8, device="meta") for n in sizes]
    groups = fuse_tensors(tensors, threshold)
    return sum(alpha_beta_time("ring", sum(sizes[i] for i in group), ranks, alpha, beta)
               for group in groups)


def overlapped_time(sizes, threshold, backward, ranks, alpha, beta):
    """Seconds from the start of backward until all tensors are reduced, one ring after the other.

    Tensor i of n is ready after (i + 1)/n of `backward` seconds. A buffer leaves when it is full,
    or when backward is over. (Simplified: Horovod also sends a buffer that is not full, at the end
    of a cycle. So its curve is flatter at high thresholds.)

    lab    05
    """
    tensors = [torch.empty(n, dtype=torch.uint8, device="meta") for n in sizes]
    now = 0.0
    for group in fuse_tensors(tensors, threshold):
        ready = backward * (group[-1] + 1) / len(sizes)
        nbytes = sum(sizes[i] for i in group)
        now = max(now, ready) + alpha_beta_time("ring", nbytes, ranks, alpha, beta)
    return now


def negotiation_bytes(tensors, ranks, request_bytes=None):
    """Bytes of one cycle in which `tensors` names become ready on all ranks.

    With `request_bytes` each: what reaches rank 0 by name. Without: the cache's bit vector, one
    bit for each name and one that says whether anybody has names to send; every rank has it.

    lab    05
    """
    if request_bytes is None:
        return math.ceil((1 + tensors) / 8)
    return (ranks - 1) * tensors * request_bytes
