"""Fsdp2: torch's own FSDP, fully_shard, with the interface of the training loop."""

from types import SimpleNamespace

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard,
)
from torch.distributed.tensor import DTensor

from ranklab.engine import device
from ranklab.fsdp.shards import rows_of
from ranklab.fsdp.training import FullyShard


class Fsdp2(FullyShard):
    """FullyShard over all ranks, with DTensors as parameters and checkpoints in our format."""

    def apply(self, model):
        offload = self.options["offload"]
        policies = {"mp_policy": MixedPrecisionPolicy(*self.options["precision"]),
                    "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy()}
        for module in (*self.blocks(model), model):
            fully_shard(module, **policies)
        model.to_empty(device="cpu" if offload else device())
        self.rows = dict(model.named_parameters())
        return model

    def grad_norm(self, parameters):
        rows = [SimpleNamespace(grad=p.grad.to_local(), device=p.device) for p in parameters
                if p.grad is not None]
        return super().grad_norm(rows)  # DTensor's norm of offloaded rows needs a CPU backend

    def rows_in(self, piece):
        if isinstance(piece.tensor, DTensor):
            return piece.shape, *local_rows(piece.tensor)


def local_rows(tensor):
    """Return (the index of this rank's first row of a DTensor, this rank's rows)."""
    mesh = tensor.device_mesh
    return rows_of(len(tensor), mesh.size(), mesh.get_local_rank())[0], tensor.to_local()


@torch.no_grad()
def fill(model, rows):
    """Fill DTensors the way fill_shards fills shards: nothing is sent."""
    for name, parameter in model.named_parameters():
        first, local = local_rows(parameter)
        local.copy_(rows(name, parameter.shape, first, first + len(local)))


def full_state(model):
    """Gather the full state dict of DTensors with torch: rank 0 gets all of it, on the CPU."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True,
                                                                cpu_offload=True))
