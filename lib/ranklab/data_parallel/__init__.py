"""Data parallelism: every rank holds the whole model, and the ranks average their gradients.

    replicas.py        equal replicas at the start (broadcast_parameters) and later (replicas_agree)
    shards.py          which samples belong to which rank
    buckets.py         assign_buckets: few large messages; Bucket: the memory of one message
    gradients.py       average_gradients, one by one after backward; OverlappedDataParallel, in
                       buckets that are sent while backward still runs
    plan.py            plan_buckets: the buckets that leave the least communication exposed
    replica.py         the rest of a data-parallel wrapper: buckets, equal buffers
    refusals.py        unsupported cases, refused at once; recovery.py: after a backward that raised
    batch_norm.py      batch norm with statistics of the whole batch, not of this rank's part
    learning_rate.py   the learning rate for a larger batch
    join.py            ranks with fewer batches than others

Every function takes `group=None` (all ranks). Lab 03 builds all of this. torch's own version is
torch.nn.parallel.DistributedDataParallel, and the tests compare the two.
"""

from ranklab.basics.flat import pack, unpack
from ranklab.data_parallel.batch_norm import (
    SyncBatchNorm, batch_norm_bytes, convert_sync_batch_norm, sync_batch_norm,
)
from ranklab.data_parallel.buckets import Bucket, assign_buckets, buckets_of
from ranklab.data_parallel.gradients import OverlappedDataParallel, average_gradients
from ranklab.data_parallel.join import join_uneven
from ranklab.data_parallel.learning_rate import scale_learning_rate
from ranklab.data_parallel.plan import (
    block_timeline, bucket_times, capped_buckets, exposed_seconds, plan_buckets,
)
from ranklab.data_parallel.replica import Replica, no_sync
from ranklab.data_parallel.replicas import broadcast_parameters, replicas_agree
from ranklab.data_parallel.shards import shard_sampler
from ranklab.formulas.overlap import largest_data_parallel

__all__ = [
    "Bucket", "OverlappedDataParallel", "Replica", "SyncBatchNorm", "assign_buckets",
    "average_gradients", "batch_norm_bytes", "block_timeline", "broadcast_parameters",
    "bucket_times", "buckets_of", "capped_buckets", "convert_sync_batch_norm", "exposed_seconds",
    "join_uneven", "largest_data_parallel", "no_sync", "pack", "plan_buckets", "replicas_agree",
    "scale_learning_rate", "shard_sampler", "sync_batch_norm", "unpack",
]
