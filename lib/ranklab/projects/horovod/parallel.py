"""HorovodParallel: Horovod as the training loop sees it, ours or the real one."""

import torch

from ranklab.engine import device
from ranklab.parallel import Parallel


class HorovodParallel(Parallel):
    """Each rank holds the whole model, and has as many rows in each step as any other.

    hvd          ranklab.horovod or horovod.torch, after init()
    compression  "none" or "fp16": of gradients on the wire
    compress     compress_fp16 for "fp16", or a learner's own; None: what hvd has
    error        a batch in several pieces: Horovod averages after one backward
    """

    def __init__(self, hvd, compression="none", compress=None):
        self.hvd, self.compression = hvd, getattr(hvd.Compression, compression)
        if compress and compression == "fp16":
            self.compression = Compressor(compress)
        self.rank, self.ranks = hvd.rank(), hvd.size()
        self.gradient_scale = self.ranks

    def apply(self, model):
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model

    def make_optimizer(self, new_optimizer, groups):
        named = [pair for group in groups for pair in group["params"]]
        optimizer = new_optimizer([{**group, "params": [p for _, p in group["params"]]}
                                   for group in groups])
        self.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.optimizer = self.hvd.DistributedOptimizer(optimizer, named_parameters=named,
                                                       compression=self.compression)
        return self.optimizer

    def token_count(self, targets):
        return super().token_count(targets) * self.ranks

    def forward_backward(self, *batch):
        share = super().forward_backward(*batch)  # as gradients are ready, their averages begin
        self.optimizer.synchronize()  # waits for those that are not done: now they can be clipped
        return share

    def total(self, value):
        return self.hvd.allreduce(value, op=self.hvd.Sum)

    def gather(self, values):
        return self.hvd.allgather(values[None])


class Compressor:
    """A function like compress_fp16, as DistributedOptimizer wants it."""

    def __init__(self, compress):
        self.compress = compress

    def decompress(self, tensor, restore):
        return restore(tensor)


def rank_device(hvd):
    """Where this rank computes; under horovodrun, launch has not chosen."""
    if hvd.__name__.startswith("ranklab") or not torch.cuda.is_available():
        return device()
    torch.cuda.set_device(hvd.local_rank())  # or Horovod's own buffers would all be on GPU 0
    return torch.device("cuda", hvd.local_rank())
