"""The exercises and predictions of lab 03, in the order of the lab.

Read toys.py first, the small models, and sent.py, what a rank sends; then the exercise's own file.
plan_buckets is open and has a score, and so a check of its own.
"""

from ranklab import data_parallel
from ranklab.checks.data_parallel.assign_buckets import BUCKETS
from ranklab.checks.data_parallel.average_gradients import AVERAGE
from ranklab.checks.data_parallel.broadcast_parameters import BROADCAST
from ranklab.checks.data_parallel.join_uneven import JOIN
from ranklab.checks.data_parallel.no_sync import NO_SYNC
from ranklab.checks.data_parallel.overlapped_data_parallel import OVERLAPPED
from ranklab.checks.data_parallel.plan_buckets import check_plan_buckets
from ranklab.checks.data_parallel.predictions import PREDICTIONS
from ranklab.checks.data_parallel.replicas_agree import AGREE
from ranklab.checks.data_parallel.sharding import LEARNING_RATE, SHARD
from ranklab.checks.data_parallel.sync_batch_norm import BATCH_NORM
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    BROADCAST,
    SHARD,
    AVERAGE,
    BUCKETS,
    OVERLAPPED,
    Exercise(data_parallel.plan_buckets, check_plan_buckets, hints=(
        "Fix the last bucket. What do you have to know about all buckets before it?",
        "Only when they have arrived, and earlier is better. So keep the earliest end for the "
        "first j gradients. Try every start i of the last bucket: it begins after the end that "
        "you kept for the first i.",
        "ends = [0.0]; for j in 1 .. n: end of (i) = max(ends[i], ready[j - 1]) + alpha + "
        "sum(nbytes[i:j]) * beta; keep the smallest, and its i. Then walk back from n: the last "
        "bucket is i .. n - 1, and the one before it ends at i.",
    )),
    NO_SYNC,
    BATCH_NORM,
    LEARNING_RATE,
    JOIN,
    AGREE,
)
