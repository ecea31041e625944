"""The exercises and predictions of lab 06, in the order of the lab.

Read toys.py first, the small models, and training.py, which compares their training with one
process; then the exercise's own file. sharded_muon_step and units_to_keep are open and have a
score, so they have their own checks.
"""

from ranklab.checks.clinic import bugs
from ranklab.checks.zero.deepspeed_config import CONFIG
from ranklab.checks.zero.formulas import MEMORY, TRAFFIC
from ranklab.checks.zero.inference import INFERENCE
from ranklab.checks.zero.offload_optimizer import OFFLOAD
from ranklab.checks.zero.partition_flat import PARTITION
from ranklab.checks.zero.predictions import PREDICTIONS as NUMBERS
from ranklab.checks.zero.sharded_muon_step import MUON
from ranklab.checks.zero.stage3 import STAGE_3
from ranklab.checks.zero.stages import STAGE_1, STAGE_2
from ranklab.checks.zero.units_to_keep import KEEP

__all__ = ["EXERCISES", "PREDICTIONS"]

BUGS = "flat_model", "gathered_model"
EXERCISES = (
    PARTITION,
    MEMORY,
    STAGE_1,
    STAGE_2,
    INFERENCE,
    STAGE_3,
    MUON,
    TRAFFIC,
    OFFLOAD,
    CONFIG,
    KEEP,
    *bugs.exercises(*BUGS),
)
PREDICTIONS = (*NUMBERS, *bugs.predictions(*BUGS))
