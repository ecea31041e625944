"""Replicas start equal, and a few bytes tell whether they still are."""

import hashlib

import torch
import torch.distributed as dist

from ranklab.basics.flat import pack, unpack


def broadcast_parameters(model, src=0, group=None):
    """Every rank ends with rank src's parameters and buffers; tied ones travel once.

    Frozen parameters and buffers too: what differs at the start stays different. `src` counts
    inside the group.
    cost   one broadcast for each parameter and each buffer
    lab    03
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=src)


def broadcast_together(tensors, src=0, group=None):
    """Every rank ends with rank src's `tensors`, which travel together; `src` counts in the group.

    cost   one broadcast for each type, however many tensors
    """
    kinds = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in kinds.values():
        flat = pack(alike)
        dist.broadcast(flat, group=group, group_src=src)
        unpack(flat, alike)


def replicas_agree(model, group=None):
    """True on every rank when all ranks hold the same parameters, bit for bit; else False on all.

    Parameters only, because between two forwards ranks may differ in the statistics of batch norm.
    cost   one all-reduce of 16 bytes, whatever the model's size
    error  a parameter that is a DTensor and not replicated: no rank holds a copy of it
    lab    03
    """
    digest, device = hashlib.blake2b(digest_size=7), "cpu"  # 56 bits: an int64 and its negative
    for name, parameter in model.named_parameters():
        device = parameter.device
        if hasattr(parameter, "to_local"):  # a DTensor
            if not all(placement.is_replicate() for placement in parameter.placements):
                raise ValueError(f"replicas_agree: {name} is {parameter.placements}, so no rank "
                                 "holds a copy of it; compare its full_tensor()")
            parameter = parameter.to_local()
        content = parameter.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(content.cpu().numpy())
    mine = int.from_bytes(digest.digest(), "big")
    extremes = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[0].item(), -extremes[1].item()
    return largest == smallest
