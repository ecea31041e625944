"""The exercises and predictions of lab 07, in the order of the lab.

Each exercise has its own file. wrap_policy is open and has a score, so it has its own check.
"""

from ranklab.checks.clinic import bugs
from ranklab.checks.fsdp.clip_grad_norm_sharded import CLIP
from ranklab.checks.fsdp.full_state_dict import STATE
from ranklab.checks.fsdp.fully_sharded_block import BLOCK
from ranklab.checks.fsdp.hybrid_shard_groups import HYBRID
from ranklab.checks.fsdp.masked_loss import MASKED
from ranklab.checks.fsdp.predictions import PREDICTIONS as NUMBERS
from ranklab.checks.fsdp.shard_parameter import SHARD_PARAMETER
from ranklab.checks.fsdp.wrap_policy import WRAP

__all__ = ["EXERCISES", "PREDICTIONS"]

BUGS = "moved_gpt",
EXERCISES = (
    SHARD_PARAMETER,
    BLOCK,
    CLIP,
    WRAP,
    MASKED,
    HYBRID,
    STATE,
    *bugs.exercises(*BUGS),
)
PREDICTIONS = (*NUMBERS, *bugs.predictions(*BUGS))
