"""Hybrid sharding: rows are sharded inside a node, and every node has a copy of all rows."""

import torch
import torch.distributed as dist


def hybrid_shard_groups(shard_ranks):
    """Create (shards, replicas): the group of the ranks that, with this one, share one copy of the
    model, and the group of the ranks that hold the same rows as this one.

    Ranks 0 .. shard_ranks-1 share the first copy: a node, where links are fast. Between copies only
    1/shard_ranks of the gradients is sent. Collective: call it on every rank.
    Raises: ValueError if shard_ranks does not divide the number of ranks.
    Lab: 07
    """
    R = dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError(f"shard_ranks={shard_ranks} must divide the {R} ranks")
    copies = torch.arange(R).view(-1, shard_ranks)  # a row is a copy of the model
    shards, _ = dist.new_subgroups_by_enumeration(copies.tolist())
    replicas, _ = dist.new_subgroups_by_enumeration(copies.T.tolist())
    return shards, replicas
