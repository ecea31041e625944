"""hybrid_shard_groups: their ranks, and that they can be used; compared with torch's mesh."""

import torch
import torch.distributed as dist

from ranklab.checks.prover import Must, Proof, Slip, Stage, must_refuse
from ranklab.engine import device
from ranklab.fsdp import hybrid_shard_groups

SIZES, BAD = (2, 3, 1, 6, 2), (4, 0, 12)
RANKS = "the pair of shards and replicas"
KINDS, REACHED = "what is returned", "ranks that an all-reduce over each reaches"
ERROR = "what it raises"


def _see(fn, case, ranks):
    """case: 'shard_ranks=2'"""
    shard_ranks = int(case.removeprefix("shard_ranks="))
    if shard_ranks in BAD:
        yield {ERROR: must_refuse(fn, shard_ranks)}
        return
    groups = fn(shard_ranks)
    groups = list(groups) if isinstance(groups, tuple | list) else [groups]
    yield {KINDS: Must([*map(_kind, groups)], ["a group", "a group"])}
    groups = [group for group in groups if _kind(group) == "a group"]
    members, numbers = [dist.get_process_group_ranks(group) for group in groups], []
    for group in groups:
        number = torch.ones(1, device=device())
        dist.all_reduce(number, group=group)
        numbers.append(int(number))
    yield {RANKS: [*map(sorted, members)], REACHED: Must(numbers, [*map(len, members)])}


def _kind(value):
    if isinstance(value, dist.ProcessGroup):
        return "a group"
    return "a group without this rank" if value == dist.GroupMember.NON_GROUP_MEMBER else (
        type(value).__name__)


def by_mesh(shard_ranks):
    R = dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError(f"{shard_ranks} of {R} ranks")
    mesh = dist.init_device_mesh(device().type, (R // shard_ranks, shard_ranks))
    return mesh.get_group(1), mesh.get_group(0)


CHECK, TABLE = "shard_ranks < 1 or R % shard_ranks", "torch.arange(R).view(-1, shard_ranks)"
MAKE = "dist.new_subgroups_by_enumeration(copies.tolist())"
MAKE_SHARDS, MAKE_REPLICAS = f"shards, _ = {MAKE}", f"replicas, _ = {MAKE.replace('.to', '.T.to')}"
BOTH = "return shards, replicas"
HYBRID = Proof(
    hybrid_shard_groups,
    Stage({"6 ranks: copies on 1, 2, 3 and 6 of them; all groups work, even when made twice": (),
           "neighbours divide one copy; the ranks with the same rows are replicas":
           (RANKS,),
           "a size that does not divide the number of ranks is a ValueError on each rank":
           (ERROR,)},
          _see, tuple(f"shard_ranks={n}" for n in (*SIZES, *BAD)), (6,), oracle=by_mesh),
    mistakes=(
        Slip("The two are swapped: the group that shares one copy comes first.",
             (BOTH, "return replicas, shards")),
        Slip("shard_ranks is the number of ranks that share one copy, not the number of copies.",
             (TABLE, "torch.arange(R).view(shard_ranks, -1)")),
        Slip("Ranks 0 .. shard_ranks-1 share the first copy, as on a node: the copies are the rows "
             "of torch.arange(R).view(-1, shard_ranks).",
             (TABLE, "torch.arange(R).view(shard_ranks, -1).T")),
        Slip("The second group is the first one again. It must hold the ranks with the same rows: "
             "a column of torch.arange(R).view(-1, shard_ranks).",
             ("copies.T.tolist()", "copies.tolist()"), (BOTH, "return shards, shards")),
        Slip("The replicas group holds all ranks: take only those with the same rows, a column.",
             (BOTH, "return shards, dist.group.WORLD")),
        Slip("The replicas are the ranks r, r + shard_ranks, r + 2 * shard_ranks, ...: a column of "
             "the table of copies.",
             ("copies.T.tolist()", "torch.arange(R).view(shard_ranks, -1).tolist()")),
        Slip("Each copy must be whole: raise a ValueError unless shard_ranks divides the number of "
             "ranks.",
             (f"if {CHECK}", "if False", TABLE, "torch.arange(R // max(1, shard_ranks) * "
              "shard_ranks).view(-1, max(1, shard_ranks))"),
             (f"if {CHECK}", "if shard_ranks < 1 or shard_ranks > R"),
             (f"if {CHECK}", "if not 0 < shard_ranks <= R", TABLE, "torch.arange(R // shard_ranks "
              "* shard_ranks).view(-1, shard_ranks)")),
        Slip("Raise a ValueError for a size of 0 as well: no copy would be whole.",
             (f"if {CHECK}", "if R % max(1, shard_ranks)", TABLE,
              "torch.arange(R).view(-1, max(1, shard_ranks))")),
        Slip("Raise a ValueError for more shards than ranks as well: no copy would be whole.",
             (f"if {CHECK}", "if shard_ranks < 1 or shard_ranks <= R and R % shard_ranks",
              TABLE, "torch.arange(R).view(-1, min(R, shard_ranks))")),
        Slip("This keeps the last group that it makes. Keep the one that this rank is in.",
             (MAKE_SHARDS, "shards = [dist.new_group(row) for row in copies.tolist()][-1]",
              MAKE_REPLICAS, "replicas = [dist.new_group(row) for row in copies.T.tolist()][-1]")),
        Slip("dist.new_subgroups_by_enumeration(lists) returns this rank's group first, then a "
             "list of all groups. Return two groups.",
             (MAKE_SHARDS, MAKE_SHARDS.replace(", _", ""),
              MAKE_REPLICAS, MAKE_REPLICAS.replace(", _", "")),
             (MAKE_SHARDS, MAKE_SHARDS.replace("shards, _", "_, shards"),
              MAKE_REPLICAS, MAKE_REPLICAS.replace("replicas, _", "_, replicas")),
             (MAKE_SHARDS, "shards = copies[dist.get_rank() // shard_ranks].tolist()",
              MAKE_REPLICAS, "replicas = copies[:, dist.get_rank() % shard_ranks].tolist()")),
        Slip("Return both groups: (shards, replicas).", (BOTH, "return shards"),
             (BOTH, "return shards, replicas, dist.group.WORLD")),
    ), hints=(
        "Lay the ranks out as a table with one copy of the model in each row. What is a column?",
        "torch.arange(R).view(-1, shard_ranks): rows are shards, columns are replicas. Every rank "
        "makes every group.",
        "shards, _ = dist.new_subgroups_by_enumeration(copies.tolist()); the replicas from "
        "copies.T.tolist()",
    ))
