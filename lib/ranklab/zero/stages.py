"""ZeRO's stages 1 and 2: every rank has all parameters, but steps only those that it owns.

Data parallelism keeps R equal copies of the optimizer's state. Nobody needs them: the rank that
owns a parameter's shard can step it for all. An all-reduce is a reduce-scatter and an all-gather;
the step now comes between the two, so nothing more is sent. Buckets, hooks and overlap are those of
data_parallel.
"""

import torch
import torch.distributed as dist

from ranklab.data_parallel.buckets import buckets_of
from ranklab.data_parallel.gradients import OverlappedDataParallel
from ranklab.zero.partition import ShardedBucket, ShardedOptimizerMixin


class ZeroStage1(ShardedOptimizerMixin, OverlappedDataParallel):
    """`module`, of which each rank keeps optimizer state for the R-th part that it owns.

        model = ZeroStage1(module)
        optimizer = model.make_optimizer(torch.optim.AdamW)
        model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()

    After backward() the optimizer's gradients are the mean over ranks, of the owned part; those of
    the module are gone. After step() all ranks have all parameters.
    cost   (R-1)/R of the gradients' bytes in backward, (R-1)/R of the parameters' in step(); bytes
           held: parameters and gradients whole, 1/R of the optimizer's state
    paper  Rajbhandari et al. 2020, ZeRO, P_os
    lab    06
    """

    def make_buckets(self, trained, bucket_cap_bytes):
        return buckets_of(trained, bucket_cap_bytes, self.group_of, ShardedBucket)

    def reduce(self, bucket):
        """This rank's shard of the bucket is on its way to become the mean; returns the handle.

        The buckets before it have arrived: one message at a time.
        """
        while self.works:  # its handle may hold a copy of the bucket
            self.works.pop().wait()
        bucket.flat /= dist.get_world_size(bucket.group)
        bucket.own = self.place_of(bucket)
        return dist.reduce_scatter_single(bucket.own, bucket.flat, group=bucket.group,
                                          async_op=True)

    def place_of(self, bucket):
        """Where the mean arrives: in its own place among the gradients."""
        return bucket.flat.view(-1, len(bucket.shard))[bucket.rank]

    def finish(self):
        """The optimizer has its gradients; called at the end of backward."""
        super().finish()
        for bucket in self.buckets:
            bucket.set_optimizer_gradients({p for p in bucket.parameters if p.grad is not None})

    def step_ends(self):
        """All ranks have all parameters, as their owners have stepped them."""
        for bucket in self.buckets:
            bucket.update_shard()
            dist.all_gather_single(bucket.weights, bucket.shard, group=bucket.group)


class ZeroStage2(ZeroStage1):
    """As ZeroStage1; and each bucket's gradients are freed as soon as they are reduced.

    So a rank never holds all gradients: two buckets, and its own part of the others. Several
    backwards add up in that part, each with its own messages (no_sync keeps whole gradients, as
    stage 1 does).
    cost   as stage 1; bytes held: parameters whole, 1/R of gradients and optimizer state
    paper  Rajbhandari et al. 2020, ZeRO, P_os+g
    lab    06
    """

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)
        self.free_gradients(self.buckets)

    def place_of(self, bucket):
        """A place of its own, because the whole is freed; those before are reduced by now."""
        self.free_gradients(self.buckets[: self.buckets.index(bucket)])
        return torch.empty_like(bucket.shard)

    def finish(self):
        super().finish()
        self.free_gradients(self.buckets)

    def free_gradients(self, buckets):
        for bucket in buckets:
            bucket.free_gradients()
