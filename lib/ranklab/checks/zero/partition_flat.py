"""The check of partition_flat: one flat piece of memory, and who owns which part of it."""

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain

# What each case is about, the tensors, and the numbers of ranks.
CASES = (
    ("sizes 10, 3, 4", ((10,), (3,), (4,)), torch.float32, (1, 4, 3)),
    ("a matrix, a scalar and an empty tensor", ((2, 3), (), (0, 5)), torch.float32, (2, 7, 9)),
    ("float64", ((3, 2), (5,)), torch.float64, (2, 11)),
    ("bfloat16", ((7,),), torch.bfloat16, (2, 7)),
    ("nothing but an empty tensor", ((0,),), torch.float32, (3,)),
)


def _tensors(shapes, dtype):
    sizes = [torch.Size(shape).numel() for shape in shapes]
    numbers = torch.arange(1, 1 + sum(sizes)).to(dtype).split(sizes)
    return [part.clone().view(shape) for part, shape in zip(numbers, shapes)]


def check_partition_flat(partition_flat):
    for case, shapes, dtype, all_ranks in CASES:
        for ranks in all_ranks:
            _compare(partition_flat, f"{case} on {ranks} rank{'s' * (ranks > 1)}",
                     _tensors(shapes, dtype), ranks)
    yield "all numbers one after the other, zeros at the end; R shards of ceil(n/R)"
    yield "any shape, also scalars and empty tensors; float32, float64, bfloat16"
    _compare(partition_flat, "a transposed matrix on 2 ranks", [
        torch.arange(6.0).view(2, 3).t(), torch.arange(3.0)], 2)
    yield "what is not contiguous too, row by row"
    yield "each shard is a view of flat; flat is a copy of the tensors"


def _compare(partition_flat, where, tensors, ranks):
    right = torch.cat([tensor.reshape(-1) for tensor in tensors])
    n, each, given = len(right), -(-len(right) // ranks), [tensor.clone() for tensor in tensors]
    try:
        flat, shards = partition_flat(tensors, ranks)
    except RuntimeError as error:
        raise Mistake(f"{where}: {n} numbers: it raised {error}", "Fill up with zeros, so that the "
                      "number of ranks divides, before you cut: view and reshape take what is "
                      "not contiguous only with a copy.") from None
    if not all(map(torch.equal, tensors, given)):
        raise Mistake(f"{where}: the tensors are changed", "Copy their numbers; write nothing "
                      "into them.")
    if not isinstance(flat, torch.Tensor) or flat.dim() != 1 or len(shards) != ranks:
        raise Mistake(f"{where}: it returned {getattr(flat, 'shape', flat)} and {len(shards)} "
                      "shards", "Return (flat, shards): a tensor of one dim, and its R parts.")
    _compare_lengths(where, [len(shard) for shard in shards], n, each, len(flat))
    explain(f"{where}: flat", flat[:n], right, hint="The numbers of tensor 0, then of tensor 1, "
            "and so on: each row by row, in its own type, with no gap between.")
    explain(f"{where}: the end of flat", flat[n:], flat.new_zeros(len(flat) - n), hint="The end is "
            "filled up with zeros, not with what was in memory: new_zeros, or pad.")
    for r, shard in enumerate(shards):
        explain(f"{where}: shard {r}", shard, flat[r * each : (r + 1) * each], {
            "every R-th number": (flat[r::ranks], "A shard is one piece: flat.view(R, n / R), "
                                  "row by row, not column by column.")},
            "Rank r owns the numbers from r * each on.")
    _compare_memory(where, tensors, flat, shards)


def _compare_lengths(where, got, n, each, flat):
    if (got, flat) == ([each] * len(got), each * len(got)):
        return
    if sum(got) < n:
        hint = f"Numbers are lost: round n / R up, not down: {each} for each rank."
    elif len(set(got)) > 1:
        hint = ("All shards must be of one length, because a reduce-scatter gives each rank as "
                f"much: {each}. Fill the end up with zeros.")
    else:
        hint = (f"{each} for each are enough, and flat is as long as all shards. Pad once, at the "
                "end of flat, not each tensor; and nothing where R divides: -n % R zeros.")
    raise Mistake(f"{where}: {n} numbers make shards of {got}, and a flat of {flat}", hint)


def _compare_memory(where, tensors, flat, shards):
    for r, shard in enumerate(shards):
        shard.fill_(-1 - r)
    if not torch.equal(flat, torch.cat(list(shards))):
        raise Mistake(f"{where}: what is written into the shards is not in flat", "A shard is a "
                      "view of flat, not a copy: the optimizer steps the shard, and flat must see "
                      "it.")
    if any((tensor < 0).any() for tensor in tensors):
        raise Mistake(f"{where}: what is written into a shard changes the tensors too", "flat is "
                      "new memory, a copy, also where there is one tensor.")
