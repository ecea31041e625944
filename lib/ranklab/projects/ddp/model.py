"""The model of the DDP project on one rank: made, wrapped, rehearsed, its statistics agreed on."""

import torch
from torch.nn.parallel import DistributedDataParallel

from ranklab.data_parallel.replicas import broadcast_together
from ranklab.ddp import compress_bf16_hook, compress_fp16_hook
from ranklab.engine import device
from ranklab.models.resnet import ResNet


def new_model(config, classes, where):
    """A fresh ResNet, the same on every rank."""
    # A GPU tries in the rehearsal which of its kernels suits each convolution: shapes stay.
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(config.seed)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return ResNet(config.shape(classes)).to(where, memory_format=layout)


def wrap(model, config, group=None, half=compress_fp16_hook):
    """`model` in DDP as production runs use it.

    gradient_as_bucket_view  gradients live in the buckets: no second copy of them in memory
    static_graph             every step uses the same parameters, so DDP looks for them once;
                             left off with torch.compile, which cuts the graph at buckets itself
    half                     the hook of --compress fp16; a learner's own will do
    """
    here = device()
    ddp = DistributedDataParallel(
        model, device_ids=[here.index] if here.type != "cpu" else None, process_group=group,
        gradient_as_bucket_view=True, static_graph=not config.compile,
        bucket_cap_mb=config.bucket_mb or None,
    )  # fmt: skip
    if config.compress != "none":
        ddp.register_comm_hook(group, half if config.compress == "fp16" else compress_bf16_hook)
    return ddp


def rehearse(model, forward, x):
    """Two forwards and backwards on `x`; weights, statistics and gradients are as they were.

    In its first backward DDP counts gradients, in the second it learns in which order they come,
    and before the third it sorts its buckets by it. A sum in another order has other last bits: on
    three ranks or more, the first steps after a restart would differ from the same steps of a run
    that was never stopped.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        forward(x).sum().backward()
        model.zero_grad(set_to_none=True)
    for buffer, old in zip(model.buffers(), before):
        buffer.copy_(old)


def same_buffers(model, group=None):
    """Every rank has rank 0's running statistics, which are those of the checkpoint.
    cost  one broadcast of the buffers that are floats
    """
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    broadcast_together(floats, group=group)
