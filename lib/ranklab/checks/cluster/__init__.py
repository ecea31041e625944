"""The exercises and predictions of lab 15, in the order of the lab."""

from ranklab.checks.cluster.alarm import ALARM
from ranklab.checks.cluster.manifest import MANIFEST
from ranklab.checks.cluster.nccl import NCCL_ENVIRONMENT
from ranklab.checks.cluster.nccl_text import READ_LOG
from ranklab.checks.cluster.predictions import PREDICTIONS
from ranklab.checks.cluster.rules import RULES
from ranklab.checks.cluster.sbatch import SBATCH
from ranklab.checks.cluster.storage import STORAGE

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (SBATCH, NCCL_ENVIRONMENT, READ_LOG, *RULES, MANIFEST, STORAGE, *ALARM)
