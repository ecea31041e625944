"""Lab 02, hierarchical_all_reduce: mistakes that a good student would really make."""

import torch.distributed as dist
from mutants import mutant
from torch.nn.functional import pad

from ranklab.collectives import (
    hierarchical_all_reduce, parameter_server, ring_all_gather, ring_all_reduce,
    ring_reduce_scatter,
)

ACROSS = "ring_all_reduce(shard, across)"
GATHERED = "ring_all_gather(shard, inside, out=x.new_empty(x.shape))"

WRONG = [
    mutant(hierarchical_all_reduce, "(x, inside)", "(x, across)", "(shard, across)",
           "(shard, inside)", "(shard, inside, out", "(shard, across, out",
           says="The groups are swapped|big transfers"),
    mutant(hierarchical_all_reduce, ACROSS, "shard", says="The nodes never met"),
    mutant(hierarchical_all_reduce, GATHERED,
           "ring_all_gather(shard, inside)[: x.numel()].view(x.shape)", says="out=x.new_empty"),
    mutant(hierarchical_all_reduce, GATHERED, "shard",
           says="all-gather inside the node must follow"),
    mutant(hierarchical_all_reduce, ACROSS, "parameter_server(shard, 0, across)",
           says="One rank carries more", parameter_server=parameter_server),
]


def hierarchical_all_reduce__flat_ring(x, inside=None, across=None):
    """This is a flat ring"""
    return ring_all_reduce(x)


def hierarchical_all_reduce__whole_tensor_across(x, inside=None, across=None):
    """let only a shard of that sum cross"""
    return ring_all_reduce(ring_all_reduce(x, inside), across)


def hierarchical_all_reduce__padded(x, inside=None, across=None):
    """Nothing is padded"""
    flat = x.flatten()
    padded = pad(flat, (0, -len(flat) % dist.get_world_size(inside)))
    shard = ring_all_reduce(ring_reduce_scatter(padded, inside), across)
    return ring_all_gather(shard, inside)[:len(flat)].reshape(x.shape)
