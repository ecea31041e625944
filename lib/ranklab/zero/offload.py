"""Keep the optimizer's state where memory is cheap: in the CPU's memory, or in a file."""

import tempfile
from pathlib import Path

import torch


class CpuMemory:
    """Keep tensors in the CPU's memory, pinned if a GPU reads and writes them."""

    def copy(self, tensor):
        """Copy `tensor` to the CPU's memory, in float32 or better."""
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        clone = tensor.detach().to("cpu", dtype, copy=True)
        return clone if tensor.device.type == "cpu" else clone.pin_memory()

    def take_state(self, optimizer):
        """Do nothing: torch makes the state where the parameters are."""


class Files:
    """Keep tensors in files in `folder`, mapped into memory.

    The system reads and writes the pages that a step touches, and drops them when memory runs
    short. Put the folder on a local NVMe disk. A file is unlinked as soon as it is open, so the
    files vanish with the process.
    """

    def __init__(self, folder):
        self.folder, self.moved = Path(folder), set()
        self.folder.mkdir(parents=True, exist_ok=True)

    def copy(self, tensor):
        """Copy `tensor` to a file, in float32 or better."""
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        if not tensor.numel():
            return tensor.detach().to("cpu", dtype)
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            clone = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=dtype)
        return clone.view(tensor.shape).copy_(tensor)

    def take_state(self, optimizer):
        """Move the state that the optimizer made in its first step to files."""
        for parameter, state in optimizer.state.items():
            if parameter not in self.moved:
                self.moved.add(parameter)
                state.update({kind: self.copy(value) for kind, value in state.items()
                              if torch.is_tensor(value) and value.shape == parameter.shape})


def offload_optimizer(model, new_optimizer, groups=None, place=None):
    """Make model's optimizer, with master weights, their gradients and its state at `place`.

    The CPU does the step: this rank's gradients are copied there once, and the updated shard is
    copied back once. Neither copy blocks the GPU: backward ends when the gradients have arrived,
    and what the GPU does after the step waits for the shard.
    model: a ZeroStage1, 2 or 3, without an optimizer so far.
    place: CpuMemory(), the default, or Files(folder). It copies each bucket's shard, and takes over
        the state after every step.
    Cost: between ranks the same as `model`; between GPU and CPU 1/R of gradients and parameters a
        step.
    Paper: Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity
    Lab: 06
    """
    place = place or CpuMemory()
    for bucket in model.buckets:
        bucket.set_master(place.copy(bucket.shard))
    optimizer = model.make_optimizer(new_optimizer, groups)
    optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer))
    return optimizer
