"""Lab 06: what goes wrong when the parameters are cut into shards."""

import torch
from mutants import mutant

from ranklab.zero import partition_flat

LENGTH = "length = -(-n // ranks)"
CUT = "flat.view(ranks, length).unbind()"
ZEROS = "tensors[0].new_zeros(length * ranks)"

WRONG = [
    mutant(partition_flat, LENGTH, "length = n // ranks", "out=flat[:n]", "out=flat[:n].resize_(n)",
           says="round n / R up"),
    mutant(partition_flat, LENGTH, "length = n // ranks + 1", says="nothing where R divides"),
    mutant(partition_flat, "length * ranks)", "n)", says="Fill up with zeros"),
    mutant(partition_flat, "length * ranks)", "n)", CUT, "flat.tensor_split(ranks)",
           says="All shards must be of one length"),
    mutant(partition_flat, ZEROS, "tensors[0].new_full((length * ranks,), 7)",
           says="The end is filled up with zeros"),
    mutant(partition_flat, CUT, "[x.clone() for x in flat.view(ranks, length)]",
           says="A shard is a view of flat, not a copy"),
    mutant(partition_flat, CUT, "[flat[r::ranks] for r in range(ranks)]",
           says="A shard is one piece"),
    mutant(partition_flat, ZEROS, "torch.zeros(length * ranks)", says="in its own type",
           torch=torch),
    mutant(partition_flat, "    return", "    if len(tensors) == 1 and length * ranks == n:\n"
           "        flat = tensors[0].view(-1)\n    return", says="flat is new memory"),
]


def partition_flat__pads_each_tensor(tensors, ranks):
    """with no gap between"""
    padded = [torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % ranks)) for x in tensors]
    flat = torch.cat(padded)
    return flat, flat.view(ranks, -1).unbind()
