"""The exercises and predictions of lab 03, in the order of the lab.

Read toys.py first, the small models, and sent.py, a rank's messages; then the exercise's own file.
plan_buckets is open and has a score, so it has its own check.
"""

from ranklab.checks.clinic import bugs
from ranklab.checks.data_parallel.assign_buckets import BUCKETS
from ranklab.checks.data_parallel.average_gradients import AVERAGE
from ranklab.checks.data_parallel.broadcast_parameters import BROADCAST
from ranklab.checks.data_parallel.join_uneven import JOIN
from ranklab.checks.data_parallel.no_sync import NO_SYNC
from ranklab.checks.data_parallel.overlapped_data_parallel import OVERLAPPED
from ranklab.checks.data_parallel.plan_buckets import PLAN
from ranklab.checks.data_parallel.predictions import PREDICTIONS as NUMBERS
from ranklab.checks.data_parallel.replicas_agree import AGREE
from ranklab.checks.data_parallel.sharding import LEARNING_RATE, SHARD
from ranklab.checks.data_parallel.sync_batch_norm import BATCH_NORM

__all__ = ["EXERCISES", "PREDICTIONS"]

BUGS = "no_faster", "train_large_batch", "saved_model", "two_scores", "worse_together"
EXERCISES = (
    BROADCAST,
    SHARD,
    AVERAGE,
    BUCKETS,
    OVERLAPPED,
    PLAN,
    NO_SYNC,
    BATCH_NORM,
    LEARNING_RATE,
    JOIN,
    AGREE,
    *bugs.exercises(*BUGS),
)
PREDICTIONS = (*NUMBERS, *bugs.predictions(*BUGS))
