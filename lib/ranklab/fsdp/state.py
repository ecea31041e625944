"""Whole tensors from shards, and shards from whole tensors, one parameter at a time."""

import torch
import torch.distributed as dist

from ranklab.fsdp.shards import sharded_modules, sharded_parameters


def full_state_dict(model):
    """Gather the plain model's {name: tensor} on the CPU of the group's rank 0; {} elsewhere.

    Weights are taken from the shards, in their dtype, not from what was gathered to compute. Only
    one parameter at a time is whole on a device, and only on rank 0.
    Cost: each rank sends its rows once, in one message per parameter.
    Lab: 07
    """
    tensors, state = {}, {}
    for block in sharded_modules(model):
        for parameter in block.parameters:
            tensors[parameter.shard] = gather_rows(parameter, block.group)
    for name, tensor in model.state_dict(keep_vars=True).items():
        state[name] = tensors[tensor] if tensor in tensors else tensor.detach().cpu().clone()
    return state if sharded_modules(model)[0].rank == 0 else {}


def gather_rows(parameter, group):
    """Gather a whole ShardedParameter on the CPU of the group's rank 0; return None elsewhere."""
    rows = parameter.padded_shard(parameter.shard.dtype)
    is_first = dist.get_rank(group) == 0
    parts = [torch.empty_like(rows) for _ in range(parameter.ranks)] if is_first else None
    dist.gather(rows, parts, group=group, group_dst=0)
    if is_first:
        return torch.cat(parts)[: parameter.shape.numel()].view(parameter.shape).cpu()


@torch.no_grad()
def fill_shards(model, rows):
    """Fill the shards with the numbers from `rows`; nothing is gathered or sent.

    This gives a model made on the meta device its weights, however large it is.
    rows: (name, shape, first, stop) -> the rows of that parameter from `first` to `stop`.
    """
    parameters = sharded_parameters(model)
    for name, shard in model.named_parameters():
        parameter = parameters[shard]
        stop = parameter.first + len(shard)
        shard.copy_(rows(name, parameter.shape, parameter.first, stop))
