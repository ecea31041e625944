"""The optimizer's state lives where memory is cheap: in the CPU's, or in a file."""

import tempfile
from pathlib import Path

import torch


class CpuMemory:
    """The CPU's memory, pinned if a GPU reads and writes it."""

    def copy(self, tensor):
        """The numbers of `tensor` there, in float32 or better."""
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        there = tensor.detach().to("cpu", dtype, copy=True)
        return there if tensor.device.type == "cpu" else there.pin_memory()

    def take_state(self, optimizer):
        """Nothing to do: torch makes the state where the parameters are."""


class Files:
    """Files in `folder`, mapped into memory: the system reads and writes what a step touches, and
    drops it when memory runs short. Put the folder on a local NVMe disk. A file loses its name as
    soon as it is open, so the files vanish with the process.
    """

    def __init__(self, folder):
        self.folder, self.moved = Path(folder), set()
        self.folder.mkdir(parents=True, exist_ok=True)

    def copy(self, tensor):
        """The numbers of `tensor` there, in float32 or better."""
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        if not tensor.numel():
            return tensor.detach().to("cpu", dtype)
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            there = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=dtype)
        return there.view(tensor.shape).copy_(tensor)

    def take_state(self, optimizer):
        """The state that the optimizer made in its first step is in files, too."""
        for parameter, state in optimizer.state.items():
            if parameter not in self.moved:
                self.moved.add(parameter)
                state.update({kind: self.copy(value) for kind, value in state.items()
                              if torch.is_tensor(value) and value.shape == parameter.shape})


def offload_optimizer(model, new_optimizer, groups=None, place=None):
    """model.make_optimizer(...), with master weights, their gradients and the optimizer's state at
    `place`: in the CPU's memory (CpuMemory(), the default), or in Files(folder). It copies each
    bucket's shard, and takes the state after every step.

    The step is the CPU's work: this rank's gradients go there once, and the stepped shard comes
    back once. Neither copy holds a GPU up: backward ends when the gradients are there, and what the
    GPU does after the step waits for the shard. The model is a ZeroStage1, 2 or 3, and has made no
    optimizer before.
    cost   sends what `model` sends; between GPU and CPU, 1/R of gradients and parameters a step
    paper  Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity
    lab    06
    """
    place = place or CpuMemory()
    for bucket in model.buckets:
        bucket.set_master(place.copy(bucket.shard))
    optimizer = model.make_optimizer(new_optimizer, groups)
    optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer))
    return optimizer
