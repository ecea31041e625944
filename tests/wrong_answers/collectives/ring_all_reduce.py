"""Lab 02, ring_all_reduce: mistakes that a good student would really make."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, sendrecv

GATHERED = "ring_all_gather(shard, group, out)"

WRONG = [
    mutant(ring_all_reduce, f"return {GATHERED}", "return shard", says="an all-gather must follow"),
    mutant(ring_all_reduce, GATHERED, f"{GATHERED}.view(-1)", says="Give the result x's shape"),
    mutant(ring_all_reduce, GATHERED,
           f"({GATHERED} / dist.get_world_size(group)).to(x.dtype)", says="the mean, not the sum"),
    mutant(ring_all_reduce, GATHERED, "ring_all_gather(shard, group).view(x.shape)",
           says="hand `out` to both"),
    mutant(ring_all_reduce, "    if out is None:", "    if True:",
           says="`out` is as it was: nothing was written"),
    mutant(ring_all_reduce, "x.new_empty(x.shape)", "torch.empty_like(x)",
           says="keeps its strides"),
    mutant(ring_all_reduce, "ring_reduce_scatter(x, group, out)",
           "ring_reduce_scatter(x.float(), group, out.float()).to(x)",
           says="what is right, rounded to float32"),
    mutant(ring_all_reduce, "    if out is None:", "    group = group if out is None else None\n"
           "    if out is None:", says="with `out` as well"),
]


def ring_all_reduce__passes_the_whole_tensor(x, group=None, out=None):
    """You pass the whole tensor R-1 times"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    everyones = torch.stack([x.contiguous()] * R)
    for step in range(1, R):
        have, want = everyones[(rank - step + 1) % R], everyones[(rank - step) % R]
        sendrecv(have, (rank + 1) % R, want, (rank - 1) % R, group)
    return everyones.sum(dim=0, dtype=x.dtype)


def ring_all_reduce__each_adds_in_its_own_order(x, group=None, out=None):
    """differ in the last bits"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    passing, total = x.contiguous(), x.contiguous().clone()
    for _ in range(R - 1):
        arriving = torch.empty_like(passing)
        passing = sendrecv(passing, (rank + 1) % R, arriving, (rank - 1) % R, group)
        total += passing
    return total


def ring_all_reduce__pads(x, group=None, out=None):
    """Do you pad"""
    padded = torch.cat([x.flatten(), x.new_zeros(-x.numel() % dist.get_world_size(group))])
    shard = ring_reduce_scatter(padded, group)
    return ring_all_gather(shard, group)[: x.numel()].view(x.shape)
