"""The optimizer's state lives where memory is cheap: in the CPU's, or in a file."""

import itertools
from pathlib import Path

import torch
import torch.distributed as dist


def offload_optimizer(model, new_optimizer, groups=None, folder=None):
    """model.make_optimizer(...), with master weights, their gradients and the optimizer's state in
    the CPU's memory; with `folder`, master weights and state in files there.

    The step is the CPU's work: each gradient goes there once (gradient_bytes / R over PCIe), and
    the stepped shard comes back once. From a GPU both are asynchronous, from and to pinned memory.
    Files are mapped into memory: the system reads and writes what a step touches, and drops it when
    memory runs short. Put `folder` on a local NVMe disk. The files are gone with the optimizer.
    model  a ZeroStage1, 2 or 3
    cost   sends what `model` sends
    paper  Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity
    lab    06
    """
    place = _Memory() if folder is None else _Files(folder, model.group)
    for bucket in model.buckets:
        bucket.set_master(place.copy(bucket.shard))
    optimizer = model.make_optimizer(new_optimizer, groups)
    if folder is not None:  # torch makes its state in the first step
        optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer))
    return optimizer


class _Memory:
    """The CPU's, pinned where a GPU reads and writes it."""

    def copy(self, tensor):
        there = torch.empty(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32),
                            device="cpu", pin_memory=tensor.device.type != "cpu")
        return there.copy_(tensor)


class _Files:
    """Tensors in files of one folder; the state of the optimizer moves there as it appears."""

    def __init__(self, folder, group):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.numbers, self.rank = itertools.count(), dist.get_rank(group)
        self.moved = set()

    def copy(self, tensor):
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        if not tensor.numel():
            return tensor.detach().to("cpu", dtype)
        path = self.folder / f"rank-{self.rank}-{next(self.numbers)}.bin"
        there = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=dtype)
        path.unlink()  # the mapping keeps it alive, and nobody has to clean up
        return there.view(tensor.shape).copy_(tensor)

    def take_state(self, optimizer):
        for parameter, state in optimizer.state.items():
            if parameter in self.moved:
                continue
            self.moved.add(parameter)
            for kind, value in state.items():
                if torch.is_tensor(value) and value.shape == parameter.shape:
                    state[kind] = self.copy(value)
