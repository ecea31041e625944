"""What a Replica can't do, said at once and on every rank, with the names of the parameters."""

import hashlib

import torch
import torch.distributed as dist

from ranklab.data_parallel.batch_norm import sync_batch_norm_groups


def refuse_mixed_messages(module, group=None):
    """Returns if no SyncBatchNorm of `module` sends in the group of the buckets.

    error  ValueError on every rank
    """
    if any((each or dist.group.WORLD) == (group or dist.group.WORLD)
           for each in sync_batch_norm_groups(module)):
        raise ValueError("find_unused_parameters=True with a SyncBatchNorm in the same group: "
                         "ranks that use "
                         "different parameters would send in different orders. Give it its own: "
                         "convert_sync_batch_norm(model, dist.new_group())")


def refuse_other_shapes(module, group=None):
    """Returns if all ranks have parameters of the same names, shapes and types.

    cost   one all-reduce of 16 bytes
    error  ValueError on every rank
    """
    if dist.get_backend(group) == "fake":  # a dry run: no other rank exists
        return
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad)
              for name, p in module.named_parameters()]
    mine = int.from_bytes(hashlib.blake2b(repr(shapes).encode(), digest_size=7).digest(), "big")
    device = next((p.device for p in module.parameters()), "cpu")
    extremes = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        raise ValueError(f"the {len(shapes)} parameters of rank {dist.get_rank(group)} differ from "
                         "those of another rank in name, shape, type or requires_grad")


def refuse_while_joining(replica):
    """Returns if a forward inside join_uneven leaves no rank waiting for a rank without batches.

    error  ValueError
    """
    if not replica.sync:
        raise ValueError("no_sync inside join_uneven: a rank that has no batch left would wait "
                         "for the gradients of this one")
    if sync_batch_norm_groups(replica.module):
        raise ValueError("a SyncBatchNorm inside join_uneven: it would wait for the statistics of "
                         "ranks that have no batch left")


def no_gradient(replica, missing):
    """The error for parameters that got no gradient in this backward."""
    names = _names(replica, missing)
    trained = sum(len(bucket.parameters) for bucket in replica.buckets)
    return ValueError(f"{len(names)} of {trained} parameters got no gradient on rank "
                      f"{dist.get_rank(replica.group)}: {', '.join(names)}. Use them in the loss, "
                      "freeze them, or say find_unused_parameters=True")


def second_gradient(replica, parameter):
    """The error for a gradient that comes when its bucket may be on its way already."""
    return ValueError(f"{_names(replica, [parameter])[0]} got two gradients in one backward. Does "
                      "checkpointing run it twice? use_reentrant=False adds them up first")


def _names(replica, parameters):
    wanted = {id(parameter) for parameter in parameters}
    return [name for name, p in replica.module.named_parameters() if id(p) in wanted]
