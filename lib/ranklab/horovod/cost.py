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


def negotiation_bytes(tensors, ranks, request_bytes=None):
    """Bytes of one cycle in which `tensors` names become ready on all ranks.

    With `request_bytes` each: what reaches rank 0 by name. Without: the cache's bit vector, one
    bit for each name and one that says whether anybody has names to send; every rank has it.

    lab    05
    """
    if request_bytes is None:
        return math.ceil((1 + tensors) / 8)
    return (ranks - 1) * tensors * request_bytes
