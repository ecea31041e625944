"""The check of hybrid_shard_groups: which ranks are in them, and that they can be used."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import expect, on_groups, refused
from ranklab.engine import device

RANKS, SIZES, BAD = 6, (2, 3, 1, 6, 2), (4, 0, 12)
ALL_CALL = ("Every rank must make every group, in the same order, also those that it is not in; "
            "it keeps the one that it is in.")
WHOLE = "Each copy must be whole: ValueError(...) unless shard_ranks divides the ranks."
FAILURES = {
    "TypeError: unhashable type: 'list'":
        "Return two groups, not lists: of each kind the one that this rank is in.",
    "RuntimeError: shape .* is invalid for input of size .*": WHOLE,
    "hang: .*new_group.*": ALL_CALL,
}


def _trial(hybrid_shard_groups, _):
    for size in SIZES:
        groups = []
        for group in hybrid_shard_groups(size):
            dist.all_reduce(torch.ones(1, device=device()), group=group)
            groups.append(sorted(dist.get_process_group_ranks(group)))
        yield partial(_compare, size, dist.get_rank(), groups)
    for size in BAD:
        yield refused(f"shard_ranks={size} on {RANKS} ranks", partial(hybrid_shard_groups, size))


def check_hybrid_shard_groups(hybrid_shard_groups):
    on_groups(_trial, hybrid_shard_groups, ranks=RANKS, failures=FAILURES)
    yield "neighbours share one copy out; the ranks with the same rows are replicas"
    yield "6 ranks: copies on 1, 2, 3 and 6 of them; all groups work, also made twice"
    yield "a size that does not divide the number of ranks is a ValueError on each rank"


def _compare(size, rank, groups):
    first = rank - rank % size
    right = [[*range(first, first + size)], [*range(rank % size, RANKS, size)]]
    hint = ("Ranks 0 .. shard_ranks-1 are the first copy, as on a node: the copies are the rows of "
            "torch.arange(R).view(-1, shard_ranks), the replicas its columns.")
    if groups == right[::-1]:
        hint = "The two are swapped: the group that shares one copy out comes first."
    elif any(rank not in ranks for ranks in groups):
        hint = ALL_CALL
    elif len(groups[0]) == RANKS // size:
        hint = "shard_ranks is how many ranks share one copy out, not how many copies there are."
    expect(groups == right, f"{RANKS} ranks, shard_ranks={size}: rank {rank}: shards and replicas "
           f"are {groups}, not {right}", hint)
