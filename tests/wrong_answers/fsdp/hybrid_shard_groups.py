"""Lab 07: what goes wrong when ranks are split into shards and replicas."""

import torch.distributed as dist
from mutants import mutant

from ranklab.fsdp import hybrid_shard_groups

CHECK = "shard_ranks < 1 or R % shard_ranks"
TABLE = "torch.arange(R).view(-1, shard_ranks)"


def _wrong(*edits, says, **named):
    return mutant(hybrid_shard_groups, *edits, says=says, **named)


WRONG = [
    _wrong("return shards, replicas", "return replicas, shards", says="The two are swapped"),
    _wrong(TABLE, "torch.arange(R).view(shard_ranks, -1)", says="not how many copies"),
    _wrong(TABLE, "torch.arange(R).view(shard_ranks, -1).T", says="are the first copy"),
    _wrong(f"if {CHECK}", "if False", TABLE, "torch.arange(R // max(1, shard_ranks) * shard_ranks)"
           ".view(-1, max(1, shard_ranks))", says="is no error|belongs to no|roup"),
    _wrong("copies.T.tolist()", "copies.tolist()", says="the replicas its columns"),
]


def hybrid_shard_groups__only_its_own(shard_ranks):
    """Every rank must make every group"""
    rank, R = dist.get_rank(), dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError("does not divide")
    first = rank - rank % shard_ranks
    return (dist.new_group(range(first, first + shard_ranks)),
            dist.new_group(range(rank % shard_ranks, R, shard_ranks)))


def hybrid_shard_groups__the_last_one_made(shard_ranks):
    """it keeps the one that it is in"""
    R = dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError("does not divide")
    for first in range(0, R, shard_ranks):
        shards = dist.new_group(range(first, first + shard_ranks))
    for first in range(shard_ranks):
        replicas = dist.new_group(range(first, R, shard_ranks))
    return shards, replicas
