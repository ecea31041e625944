"""ZeRO's stages 1 and 2: every rank has all parameters, but steps only those that it owns.

Data parallelism keeps R equal copies of the optimizer's state. One is enough: the rank that owns
a parameter's shard can step it for all ranks. An all-reduce is a reduce-scatter and an all-gather.
The step now comes between the two, so no additional bytes are sent. Buckets, hooks and overlap come
from data_parallel.
"""

import torch
import torch.distributed as dist

from ranklab.data_parallel.buckets import buckets_of
from ranklab.data_parallel.gradients import OverlappedDataParallel
from ranklab.zero.partition import ShardedBucket, ShardedOptimizerMixin


class ZeroStage1(ShardedOptimizerMixin, OverlappedDataParallel):
    """Wrap `module` so that each rank keeps optimizer state only for its 1/R of the parameters.

        model = ZeroStage1(module)
        optimizer = model.make_optimizer(torch.optim.AdamW)
        model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()

    backward() sets the optimizer's gradients: the mean over ranks for this rank's part. The
    module's own gradients are then None. step() updates all parameters on every rank.
    Cost: (R-1)/R of the gradients' bytes in backward, (R-1)/R of the parameters' in step(); bytes
        held: all parameters and gradients, 1/R of the optimizer's state.
    Paper: Rajbhandari et al. 2020, ZeRO, P_os
    Lab: 06
    """

    def make_buckets(self, trained, bucket_cap_bytes):
        return buckets_of(trained, bucket_cap_bytes, self.group_of, ShardedBucket)

    def reduce(self, bucket):
        """Start averaging this rank's shard of the bucket over ranks; return the work handle.

        First wait for the previous bucket: one message at a time.
        """
        while self.works:  # its handle may hold a copy of the bucket
            self.works.pop().wait()
        bucket.flat /= dist.get_world_size(bucket.group)
        bucket.shard_grad = self.place_of(bucket)
        return dist.reduce_scatter_single(bucket.shard_grad, bucket.flat, group=bucket.group,
                                          async_op=True)

    def place_of(self, bucket):
        """Return the memory for the mean: the shard's own slice of the bucket's gradients."""
        return bucket.flat.view(-1, len(bucket.shard))[bucket.rank]

    def finish(self):
        """Give the optimizer its gradients; called at the end of backward."""
        super().finish()
        for bucket in self.buckets:
            bucket.set_optimizer_gradients({p for p in bucket.parameters if p.grad is not None})

    def step_ends(self):
        """Gather the updated shards, so that every rank has all new parameters; called after the
        optimizer's own step.
        """
        for bucket in self.buckets:
            bucket.update_shard()
            dist.all_gather_single(bucket.weights, bucket.shard, group=bucket.group)


class ZeroStage2(ZeroStage1):
    """Free each bucket's gradients once they are reduced; otherwise the same as ZeroStage1.

    So a rank never holds all gradients, only two buckets and its own part of the others. Gradients
    of several backwards add up in that part; each backward sends its own messages (no_sync keeps
    all gradients, as in stage 1).
    Cost: as stage 1; bytes held: all parameters, 1/R of gradients and optimizer state.
    Paper: Rajbhandari et al. 2020, ZeRO, P_os+g
    Lab: 06
    """

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)
        self.free_gradients(self.buckets)

    def place_of(self, bucket):
        """Return new memory for the mean, because the bucket's gradients will be freed.

        Earlier buckets are already reduced: free them.
        """
        self.free_gradients(self.buckets[: self.buckets.index(bucket)])
        return torch.empty_like(bucket.shard)

    def finish(self):
        super().finish()
        self.free_gradients(self.buckets)

    def free_gradients(self, buckets):
        for bucket in buckets:
            bucket.free_gradients()
