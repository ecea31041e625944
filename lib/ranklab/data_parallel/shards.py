"""Which samples of the data set belong to which rank."""

import torch


def shard_sampler(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """The indices of `rank`'s samples in this epoch, as a list; every rank has as many.

    All ranks shuffle range(n) alike, by seed + epoch, and take every ranks-th index. What does not
    divide is filled up from the beginning of the order; with drop_last its end is left out.
    The lists are those of torch.utils.data.DistributedSampler. Nothing is sent.
    error  a rank that is not one of `ranks`; no samples
    lab    03
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be between 0 and ranks - 1 = {ranks - 1}")
    if n < 1:
        raise ValueError(f"n={n} samples must be at least 1")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    each = n // ranks if drop_last else -(-n // ranks)  # rounded up
    while len(order) < each * ranks:  # more than once round if n < ranks
        order += order[: each * ranks - len(order)]
    return order[rank : each * ranks : ranks]
