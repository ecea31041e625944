"""Import it in a rank's process, or preload it: torch then sees GPUs that are not there.

`GPUS=1 NCCL=2.30.7`: how many, and whose version NCCL says. The groups are gloo's, and tensors stay
on the CPU, so this shows what ranks are told, never what NCCL does.
"""

import ctypes
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.cuda import nccl

TOTAL = 80e9
limits = {}  # {GPU: the share of its memory}
group = dist.init_process_group


class WithoutNccl(ctypes.CDLL):
    def __init__(self, name, *args, **options):
        if name == "libnccl.so.2":  # a torch with CUDA has one
            raise OSError(name)
        super().__init__(name, *args, **options)


def on_the_cpu(backend=None, device_id=None, **options):
    os.environ["PRETENDED_BACKEND"] = f"{backend} {device_id}"
    group("gloo", **options)


torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: int(os.environ["GPUS"])
torch.cuda.set_device = lambda gpu: None
torch.cuda.get_device_properties = lambda gpu: SimpleNamespace(total_memory=TOTAL, name="pretended")
torch.cuda.set_per_process_memory_fraction = lambda share, gpu: limits.update({gpu: share})
dist.is_nccl_available = lambda: True
nccl.version = lambda: tuple(map(int, os.environ["NCCL"].split(".")))
dist.init_process_group = on_the_cpu
ctypes.CDLL = WithoutNccl
