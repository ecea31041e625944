"""The check of partition_flat: one flat piece of memory, and who owns which part of it."""

import torch

from ranklab.checks.beside import expect
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
                      "number of ranks divides, before you cut. reshape() takes what is not "
                      "contiguous.") from None
    expect(all(map(torch.equal, tensors, given)), f"{where}: the tensors are changed", "Copy them.")
    is_pair = isinstance(flat, torch.Tensor) and flat.dim() == 1 and len(shards) == ranks
    expect(is_pair, f"{where}: it returned {getattr(flat, 'shape', flat)} and {len(shards)} shards",
           "Return (flat, shards): a tensor of one dim, and its R parts.")
    lengths = [len(shard) for shard in shards]
    what = f"{where}: {n} numbers make shards of {lengths}, and a flat of {len(flat)}"
    expect(sum(lengths) >= n, what, f"Numbers are lost: round n / R up, to {each} for each rank.")
    expect(len(set(lengths)) == 1, what, "All shards must be of one length, because a "
           f"reduce-scatter gives every rank the same number: {each}. Fill the end up with zeros.")
    expect(lengths[0] == each and len(flat) == each * ranks, what, f"{each} for each are enough. "
           "Pad flat once, at its end, not each tensor; and nothing where R divides.")
    _compare_shards(where, tensors, right, flat, shards)


def _compare_shards(where, tensors, right, flat, shards):
    n, each, ranks = len(right), len(shards[0]), len(shards)
    explain(f"{where}: flat", flat[:n], right, hint="The numbers of tensor 0, then of tensor 1, "
            "and so on: each row by row, in its own type, with no gap between.")
    explain(f"{where}: the end of flat", flat[n:], flat.new_zeros(len(flat) - n), hint="The end is "
            "filled up with zeros, not with what was in memory: new_zeros, or pad.")
    for r, shard in enumerate(shards):
        explain(f"{where}: shard {r}", shard, flat[r * each : (r + 1) * each], {
            "every R-th number": (flat[r::ranks], "A shard is one piece: flat.view(R, n / R), "
                                  "row by row, not column by column.")},
            "Rank r owns the numbers from r * each on.")
    for r, shard in enumerate(shards):
        shard.fill_(-1 - r)
    expect(torch.equal(flat, torch.cat(list(shards))), f"{where}: what is written into the shards "
           "is not in flat", "A shard is a view of flat, not a copy, so that flat sees each step.")
    expect(not any((tensor < 0).any() for tensor in tensors), f"{where}: what is written into a "
           "shard changes the tensors", "flat is new memory, also where there is one tensor.")
