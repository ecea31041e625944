"""Lab 07: which rank waits where is chance here, so that no sentence can be proved."""

import torch.distributed as dist


def hybrid_shard_groups__only_its_own(shard_ranks):
    """wait for each other|does not end"""
    rank, R = dist.get_rank(), dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError("does not divide")
    first = rank - rank % shard_ranks
    return (dist.new_group(list(range(first, first + shard_ranks))),
            dist.new_group(list(range(rank % shard_ranks, R, shard_ranks))))
