"""Which samples of the data set belong to which rank."""

import torch


def shard_sampler(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """List the indices of `rank`'s samples in this epoch; all ranks' lists have the same length.

    All ranks shuffle range(n) in the same way, seeded with seed + epoch, and take every ranks-th
    index. If `ranks` does not divide n, the beginning of the order is repeated at its end; with
    drop_last the end is left out. torch.utils.data.DistributedSampler gives the same lists.
    Nothing is sent.
    Raises: ValueError if rank is not in range(ranks), or if there are no samples.
    Lab: 03
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be between 0 and ranks - 1 = {ranks - 1}")
    if n < 1:
        raise ValueError(f"n={n} samples must be at least 1")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    share = n // ranks if drop_last else -(-n // ranks)  # rounded up
    while len(order) < share * ranks:  # more than once round if n < ranks
        order += order[: share * ranks - len(order)]
    return order[rank : share * ranks : ranks]
