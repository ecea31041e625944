"""The exercises and predictions of lab 07, in the order of the lab.

Each exercise has a file of its own. wrap_policy is open and has a score, and so a check of its own.
"""

from ranklab import fsdp
from ranklab.checks.exercise import Exercise
from ranklab.checks.fsdp.clip_grad_norm_sharded import CLIP
from ranklab.checks.fsdp.full_state_dict import STATE
from ranklab.checks.fsdp.fully_sharded_block import BLOCK
from ranklab.checks.fsdp.hybrid_shard_groups import HYBRID
from ranklab.checks.fsdp.masked_loss import MASKED
from ranklab.checks.fsdp.predictions import PREDICTIONS
from ranklab.checks.fsdp.shard_parameter import SHARD_PARAMETER
from ranklab.checks.fsdp.wrap_policy import check_wrap_policy

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    SHARD_PARAMETER,
    BLOCK,
    CLIP,
    Exercise(fsdp.wrap_policy, check_wrap_policy, hints=(
        "What would be whole with no block at all? With each layer as a block? What is between?",
        "Let no block be larger than some size, and take the largest modules within it that can "
        "be blocks. Try all sizes, from the largest down, until whole_bytes() is small enough.",
        "For each size: modules with can_be_a_block() and parameter_bytes() <= size, without those "
        "that are inside another of them. The first size that fits wins. At last drop the blocks "
        "that fit in the root as well, the smallest first.",
    )),
    MASKED,
    HYBRID,
    STATE,
)
