"""An elastic batch: each rank's share, so that a step is the same on any number of ranks.

The shares come from lab 00's shard_range (ranks.py).
"""

from ranklab.ranks import shard_range


def elastic_batch(batch, ranks, micro_batch):
    """Return the micro-batches of one step: [[(positions, weight), ...] of rank 0, of rank 1, ...].

    Each position 0 .. batch-1 of the global batch appears once. The gradients of the micro-batches'
    mean losses, each multiplied by its weight, add up over all ranks to the gradient of the mean
    loss over the whole batch.
    positions: a range of at most `micro_batch` positions.
    weight: a float.
    All ranks have the same number of micro-batches, because sharded models communicate in each one,
    and that number is as small as possible. The ranks' shares differ by at most one position. If
    nothing is left for a rank, its micro-batch is empty and has weight 0.
    Raises: ValueError if an argument is below 1.
    Lab: 14
    """
    if min(batch, ranks, micro_batch) < 1:
        raise ValueError(f"batch={batch}, ranks={ranks} and micro_batch={micro_batch} must each be "
                         "1 or more")
    largest = -(-batch // ranks)  # rounded up: what the fullest rank takes
    times = -(-largest // micro_batch)
    plan = []
    for rank in range(ranks):
        positions = shard_range(batch, rank, ranks)
        parts = [shard_range(len(positions), i, times) for i in range(times)]
        plan.append([(positions[part.start:part.stop], len(part) / batch) for part in parts])
    return plan
