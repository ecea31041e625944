"""Torch's own FSDP, fully_shard, in the place of ours."""

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard,
)
from torch.distributed.tensor import DTensor

from ranklab.engine import device
from ranklab.fsdp.shards import rows_of
from ranklab.fsdp.training import FullyShard
from ranklab.parallel import Parallel, Piece


class Fsdp2(FullyShard):
    """FullyShard's options and checkpoints; parameters are DTensors.
    shard_ranks  that share one copy of the model; 0: all
    """

    def __init__(self, shard_ranks, blocks, precision, offload):
        super().__init__(blocks=blocks)
        S = shard_ranks or self.ranks
        self.mesh = init_device_mesh(device().type, (self.ranks // S, S),
                                     mesh_dim_names=("replicate", "shard"))
        self.mesh = self.mesh if S < self.ranks else self.mesh["shard"]
        self.policy, self.offload = MixedPrecisionPolicy(*precision), offload

    def apply(self, model):
        how = {"mesh": self.mesh, "mp_policy": self.policy,
               "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy()}
        for module in (*self.blocks(model), model):
            fully_shard(module, **how)
        model.to_empty(device="cpu" if self.offload else device())
        self.rows = dict(model.named_parameters())
        return model

    def grad_norm(self, parameters):
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).full_tensor()

    def state(self, model, optimizer):
        return [Piece(name, kind, shape, first_of(tensor), local(tensor))
                for name, kind, shape, _, tensor in Parallel.state(self, model, optimizer)
                if local(tensor).numel()]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_of(tensor):
    """Where the local rows of a DTensor begin."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    mesh = tensor.device_mesh
    first, _ = rows_of(len(tensor), mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1))
    return first, *(0,) * (tensor.dim() - 1)


@torch.no_grad()
def fill(model, rows):
    """fill_shards, for DTensors."""
    for name, parameter in model.named_parameters():
        mine, first = local(parameter), first_of(parameter)[0]
        mine.copy_(rows(name, parameter.shape, first, first + len(mine)))


def full_state(model):
    """full_state_dict, for DTensors."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True,
                                                                cpu_offload=True))
