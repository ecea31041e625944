"""Errors for what a Replica can't do: at once, on every rank, with the parameters' names."""

import hashlib

import torch
import torch.distributed as dist

from ranklab.data_parallel.batch_norm import sync_batch_norm_groups


def refuse_mixed_messages(module, group=None):
    """Raise ValueError, on every rank, if a SyncBatchNorm uses the group of the buckets."""
    if any((norm_group or dist.group.WORLD) == (group or dist.group.WORLD)
           for norm_group in sync_batch_norm_groups(module)):
        raise ValueError("find_unused_parameters=True with a SyncBatchNorm in the same group: "
                         "ranks that use different parameters would send in different orders. "
                         "Give it its own: convert_sync_batch_norm(model, dist.new_group())")


def refuse_other_shapes(module, group=None):
    """Raise ValueError, on every rank, unless parameters have the same names and shapes on all.

    Their types and requires_grad must be the same as well.
    Cost: one all-reduce of 16 bytes.
    """
    if dist.get_backend(group) == "fake":  # a dry run: no other rank exists
        return
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad)
              for name, p in module.named_parameters()]
    digest = int.from_bytes(hashlib.blake2b(repr(shapes).encode(), digest_size=7).digest(), "big")
    device = next((p.device for p in module.parameters()), "cpu")
    extremes = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        raise ValueError(f"the {len(shapes)} parameters of rank {dist.get_rank(group)} differ from "
                         "those of another rank in name, shape, type or requires_grad")


def refuse_while_joining(replica):
    """Raise ValueError if a forward inside join_uneven would wait for a rank without batches."""
    if not replica.sync:
        raise ValueError("no_sync inside join_uneven: a rank that has no batch left would wait "
                         "for the gradients of this one")
    if sync_batch_norm_groups(replica.module):
        raise ValueError("a SyncBatchNorm inside join_uneven: it would wait for the statistics of "
                         "ranks that have no batch left")


def no_gradient(replica, missing):
    """Return the error for parameters that got no gradient in this backward."""
    names = _names(replica, missing)
    trained = sum(len(bucket.parameters) for bucket in replica.buckets)
    return ValueError(f"{len(names)} of {trained} parameters got no gradient on rank "
                      f"{dist.get_rank(replica.group)}: {', '.join(names)}. Use them in the loss, "
                      "freeze them, or say find_unused_parameters=True")


def second_gradient(replica, parameter):
    """Return the error for a gradient that comes when its bucket may have been sent already."""
    return ValueError(f"{_names(replica, [parameter])[0]} got two gradients in one backward. Does "
                      "checkpointing run it twice? use_reentrant=False adds them up first")


def _names(replica, parameters):
    ids = {id(parameter) for parameter in parameters}
    return [name for name, p in replica.module.named_parameters() if id(p) in ids]
