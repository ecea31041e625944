"""One device: what a training step computes and keeps, and what that costs.

Read in this order:

    flops.py          transformer_flops, mfu
    roofline.py       which operations wait for memory, which for arithmetic
    memory.py         model_state_bytes, activation_bytes
    accumulate.py     accumulate_gradients: a large batch in small pieces
    checkpointing.py  checkpointed: recompute activations instead of keeping them
    frugal.py         frugal_gradients: both, with the loss in pieces, for the smallest peak
    precision.py      scale_loss: fp16 without losing small gradients
    fragmentation.py  why an allocation can fail while enough bytes are free
    streams.py        work in a queue: why launches return at once
"""

from ranklab.baseline.accumulate import accumulate_gradients
from ranklab.baseline.checkpointing import (
    checkpoint_blocks, checkpointed, random_replayed, random_state, set_random_state,
)
from ranklab.baseline.flops import mfu, transformer_flops
from ranklab.baseline.fragmentation import Arena
from ranklab.baseline.frugal import frugal_gradients
from ranklab.baseline.memory import (
    activation_bytes, ends_bytes, live_activations, model_state_bytes,
)
from ranklab.baseline.precision import LossScale, scale_loss
from ranklab.baseline.roofline import block_operations, decode_operation
from ranklab.baseline.streams import Stream

__all__ = [
    "Arena", "LossScale", "Stream", "accumulate_gradients", "activation_bytes", "block_operations",
    "checkpoint_blocks", "checkpointed", "decode_operation", "ends_bytes", "frugal_gradients",
    "live_activations", "mfu", "model_state_bytes", "random_replayed", "random_state", "scale_loss",
    "set_random_state", "transformer_flops",
]
