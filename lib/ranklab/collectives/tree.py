"""Doubling: the algorithms with the fewest steps. Good for small messages."""

import torch
import torch.distributed as dist

from ranklab.collectives.wire import sendrecv


def tree_broadcast(x, src=0, group=None):
    """Copy rank src's `x` to every rank, in a new tensor; `x` itself is unchanged.

    On the other ranks `x` gives the shape, the dtype and the device; its values do not matter.
    Cost: R-1 messages of x's bytes in all, in ceil(log2 R) rounds; `src` sends in each of them;
        nothing is sent when x is empty.
    Lab: 02
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = x.clone(memory_format=torch.contiguous_format)
    place = (rank - src) % R  # counted from src: place 0 has the value at the start
    have = 1  # places 0 .. have-1 hold the value, and each of them sends it `have` places on
    while have < R and out.numel():
        if place < have and place + have < R:
            dist.send(out, group=group, group_dst=(rank + have) % R)
        elif have <= place < 2 * have:
            dist.recv(out, group=group, group_src=(rank - have) % R)
        have *= 2
    return out


def recursive_doubling(x, group=None):
    """Sum `x` over ranks by doubling, in a new tensor on every rank; `x` itself is unchanged.

    In round k each rank swaps its partial sum with the rank 2^k away, so both end with the same
    bits. If R is not a power of two, take the largest power of two below it: the ranks from there
    on first send their x to a partner, and at the end receive the sum.
    Cost: sends log2 R times x's bytes in log2 R messages (R = 2^k): few steps, more bytes.
    Paper: Thakur, Rabenseifner & Gropp 2005, "recursive doubling"
    Lab: 02
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    power = 2 ** (R.bit_length() - 1)  # the largest power of two that R holds
    total = x.clone(memory_format=torch.contiguous_format)
    buffer = torch.empty_like(total)
    empty = total.new_empty(0)
    if rank >= power:  # one of the extra ranks: hand over, wait, take the result
        sendrecv(total, rank - power, empty, rank - power, group)
        return sendrecv(empty, rank - power, total, rank - power, group)
    if rank + power < R:
        total += sendrecv(empty, rank + power, buffer, rank + power, group)
    step = 1
    while step < power:
        total += sendrecv(total, rank ^ step, buffer, rank ^ step, group)
        step *= 2
    if rank + power < R:
        sendrecv(total, rank + power, empty, rank + power, group)
    return total
