"""Silent corruption: a rank computes or stores wrong numbers without any error.

6 of the 419 unexpected interruptions of Llama 3's training were of this kind (arXiv 2407.21783,
table 5). Meta found hundreds of such CPUs among hundreds of thousands of machines (arXiv
2102.11245), Google a few such cores per several thousand machines (Hochschild et al., Cores that
don't count, HotOS 2021). Replicas help: their bits must be equal, and the majority is right.
"""

import hashlib
from collections import Counter

import torch
import torch.distributed as dist

from ranklab.basics.flat import as_bytes
from ranklab.engine import device


def silent_corruption(parameters, group=None):
    """Return {name: [rank, ...]} of the parameters whose bits are not equal on all ranks.

    The list has the ranks, numbered in the group, that differ from the majority. If at most half
    of the ranks are equal, as when two ranks differ, it is []: nobody knows which one is right.
    The result is the same on every rank, and {} if all bits are equal.
    parameters: {name: tensor}, the same names in the same order on all ranks. Tensors may have any
        dtype, contain NaN, and be strided or empty.
    Cost: one all-gather in total, of 8 bytes for each parameter; the tensors are not sent.
    Lab: 14
    """
    marks = []
    for tensor in parameters.values():
        content = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        marks.append(int.from_bytes(digest, "big", signed=True))
    row = torch.tensor(marks, dtype=torch.int64, device=device())
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    corrupt = {}
    for name, column in zip(parameters, torch.stack(rows, dim=1).tolist()):
        usual, times = Counter(column).most_common(1)[0]
        if times < len(column):
            deviants = [rank for rank, mark in enumerate(column) if mark != usual]
            corrupt[name] = deviants if 2 * times > len(column) else []
    return corrupt


def recompute_step(gradients_of, batch, src=0, group=None):
    """Compute the gradients of rank src's `batch` on all ranks; return silent_corruption of them.

    This finds a rank that computes wrong numbers even if its weights are still right.
    batch: of the same shape on all ranks; it is not changed.
    gradients_of: batch -> {name: tensor}; without random numbers, on machines of one kind.
    Cost: one broadcast of the batch, one forward and backward.
    """
    batch = batch.clone(memory_format=torch.contiguous_format)
    dist.broadcast(as_bytes(batch), group=group, group_src=src)
    return silent_corruption(gradients_of(batch), group)
