"""Make replicas equal at the start, and check with a few bytes whether they still are."""

import hashlib

import torch
import torch.distributed as dist

from ranklab.basics.flat import pack, unpack


def broadcast_parameters(model, src=0, group=None):
    """Copy rank src's parameters and buffers to every rank; send tied ones once.

    This includes frozen parameters and buffers: what differs at the start stays different.
    src: rank number within the group.
    Cost: one broadcast for each parameter and each buffer.
    Lab: 03
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=src)


def broadcast_together(tensors, src=0, group=None):
    """Copy rank src's `tensors` to every rank, packed together; `src` is a rank of the group.

    Cost: one broadcast for each type, however many tensors there are.
    """
    kinds = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in kinds.values():
        flat = pack(members)
        dist.broadcast(flat, group=group, group_src=src)
        unpack(flat, members)


def replicas_agree(model, group=None):
    """Return True on every rank if all hold the same parameters, bit for bit; else False on all.

    Compares only parameters, because the statistics of batch norm may differ between two forwards.
    Cost: one all-reduce of 16 bytes, regardless of the model's size.
    Raises: ValueError for a DTensor that is not replicated: no rank holds a copy of it.
    Lab: 03
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
    number = int.from_bytes(digest.digest(), "big")
    extremes = torch.tensor([number, -number], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[0].item(), -extremes[1].item()
    return largest == smallest
