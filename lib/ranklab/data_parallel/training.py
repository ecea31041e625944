"""DataParallel: data parallelism as the training loop sees it."""

import contextlib

import torch
import torch.distributed as dist

from ranklab.data_parallel.overlapped import OverlappedDataParallel
from ranklab.data_parallel.replica import no_sync
from ranklab.parallel import Parallel


class DataParallel(Parallel):
    """Each rank holds the whole model and takes every R-th row of the batch.

    wrap   (model, group=group) -> what averages gradients in backward: ours, or torch's DDP
    cost   8 bytes more than the gradients in a step: the number of targets
    error  a batch of fewer rows than ranks
    lab    03
    """

    def __init__(self, group=None, wrap=OverlappedDataParallel):
        self.group, self.wrap = group, wrap
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.gradient_scale = self.ranks

    def apply(self, model):
        self.replica = self.wrap(model, group=self.group)
        return self.replica

    def batch(self, inputs, targets):
        if len(inputs) < self.ranks:
            raise ValueError(f"batch={len(inputs)} rows are too few for {self.ranks} ranks")
        return inputs[self.rank :: self.ranks], targets[self.rank :: self.ranks]

    def token_count(self, targets):
        return self.total(super().token_count(targets))

    def communication(self, is_last):
        if is_last:
            return contextlib.nullcontext()
        ours = isinstance(self.replica, OverlappedDataParallel)
        return no_sync(self.replica) if ours else self.replica.no_sync()

    def total(self, value):
        value = torch.as_tensor(value).clone()
        dist.all_reduce(value, group=self.group)
        return value
