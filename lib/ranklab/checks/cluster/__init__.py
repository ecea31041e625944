"""The exercises and predictions of lab 15, in the order of the lab.

    torchrun.py   two jobs, and the options and variables that torchrun and its ranks would get
    batch_run.py  a batch script, run by a shell with stand-ins for Slurm's commands
    findings.py   a value that is compared, with details to report

Then the exercise's own file. sick_rank_alarm is open and has a score, so it has its own check.
"""

from ranklab.checks.cluster.acceptance import PAIR_ROUNDS, SUSPECT_PARTS
from ranklab.checks.cluster.alarm import ALARM
from ranklab.checks.cluster.manifest import MANIFEST
from ranklab.checks.cluster.nccl import NCCL_ENVIRONMENT
from ranklab.checks.cluster.nccl_text import READ_LOG
from ranklab.checks.cluster.predictions import PREDICTIONS
from ranklab.checks.cluster.rules import MFU, STRAGGLER
from ranklab.checks.cluster.sbatch import SBATCH
from ranklab.checks.cluster.storage import STORAGE

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    SBATCH,
    NCCL_ENVIRONMENT, READ_LOG,
    MFU, STRAGGLER,
    MANIFEST,
    STORAGE,
    PAIR_ROUNDS, SUSPECT_PARTS,
    ALARM,
)
