"""FSDP: ZeRO's stage 3 as in PyTorch, with the rows of each parameter sharded.

Read three files, the first of which is ZeRO's:

    zero/units.py  the engine of lab 06: units, their order, gather, free, reduce, prefetch
    shards.py      shard_parameter; ShardedModule: a block's parameters in rows, on that engine
    block.py       FullyShardedBlock: how rows are sent, in one message a block

The rest:

    clip.py        clip_grad_norm_sharded
    wrapping.py    wrap_policy: which modules to shard as separate blocks
    hybrid.py      hybrid_shard_groups: shards inside a node, a copy on each node
    masked.py      masked_loss: instruction tuning
    state.py       full_state_dict, and the way back: fill_shards
    pretrained.py  weights from a Hugging Face folder, row by row
    memory.py      predicted_memory of a Llama, by a formula
    training.py    FullyShard: the training loop's view

It is built on zero, lab 06: ZeroStage3's methods decide when a block is gathered, freed and
reduced. The tests compare it with torch's FSDP (peers/fsdp2).
"""

from ranklab.formulas.overlap import hidden_shard_tokens
from ranklab.fsdp.block import FullyShardedBlock
from ranklab.fsdp.clip import clip_grad_norm_sharded
from ranklab.fsdp.hybrid import hybrid_shard_groups
from ranklab.fsdp.masked import masked_loss
from ranklab.fsdp.memory import predicted_memory
from ranklab.fsdp.shards import Precision, ShardedModule, shard_parameter, sharded_modules
from ranklab.fsdp.state import fill_shards, full_state_dict, gather_rows
from ranklab.fsdp.wrapping import (
    can_be_a_block, outermost, parameter_bytes, whole_bytes, without_needless, wrap_policy,
)

__all__ = [
    "FullyShardedBlock", "Precision", "ShardedModule", "can_be_a_block", "clip_grad_norm_sharded",
    "fill_shards", "full_state_dict", "gather_rows", "hidden_shard_tokens", "hybrid_shard_groups",
    "masked_loss", "outermost", "parameter_bytes", "predicted_memory", "shard_parameter",
    "sharded_modules", "whole_bytes", "without_needless", "wrap_policy",
]
