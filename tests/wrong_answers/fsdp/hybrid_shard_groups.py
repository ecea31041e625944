"""Lab 07: what goes wrong when ranks are split into shards and replicas."""

from mutants import mutant

from ranklab.fsdp import hybrid_shard_groups

CHECK = "shard_ranks < 1 or R % shard_ranks"
SHARDS = "shards, _ = dist.new_subgroups_by_enumeration(copies.tolist())"
REPLICAS = "replicas, _ = dist.new_subgroups_by_enumeration(copies.T.tolist())"
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
    _wrong(SHARDS, "shards = dist.new_group(copies[dist.get_rank() // shard_ranks].tolist())",
           REPLICAS, "replicas = dist.new_group(copies[:, dist.get_rank() % shard_ranks].tolist())",
           says="Every rank must make every group", called="only_its_own"),
    _wrong(SHARDS, "shards = [dist.new_group(row) for row in copies.tolist()][-1]",
           REPLICAS, "replicas = [dist.new_group(row) for row in copies.T.tolist()][-1]",
           says="it keeps the one that it is in", called="the_last_one_made"),
]
