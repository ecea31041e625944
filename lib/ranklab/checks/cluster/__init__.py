"""The exercises and predictions of lab 15, in the order of the lab."""

from ranklab.checks.cluster.alarm import ALARM
from ranklab.checks.cluster.jobs import JOBS, PREDICTIONS_OF_JOBS
from ranklab.checks.cluster.nccl import NCCL, PREDICTIONS_OF_NCCL
from ranklab.checks.cluster.rules import PREDICTIONS_OF_RULES, RULES

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (*JOBS[:1], *NCCL, *RULES, *JOBS[1:], *ALARM)
PREDICTIONS = (*PREDICTIONS_OF_JOBS, *PREDICTIONS_OF_NCCL, *PREDICTIONS_OF_RULES)
