"""One device, understood: what a training step computes, what it keeps, and what that costs.

Read in this order:

    flops.py          transformer_flops, mfu
    roofline.py       which operations wait for memory, which for arithmetic
    memory.py         model_state_bytes, activation_bytes
    accumulate.py     accumulate_gradients: a big batch in small pieces
    checkpointing.py  checkpointed: compute again instead of keeping
    frugal.py         frugal_gradients: both, and the loss in pieces, for the smallest peak
    precision.py      scale_loss: fp16 without losing small gradients
    fragmentation.py  why an allocation fails while enough bytes are free
    streams.py        work in a queue: why launches return at once
"""

from ranklab.baseline.accumulate import accumulate_gradients
from ranklab.baseline.checkpointing import checkpointed, checkpoint_blocks
from ranklab.baseline.flops import mfu, transformer_flops
from ranklab.baseline.frugal import frugal_gradients
from ranklab.baseline.memory import activation_bytes, ends_bytes, model_state_bytes
from ranklab.baseline.precision import LossScale, scale_loss

__all__ = [
    "LossScale",
    "accumulate_gradients",
    "activation_bytes",
    "checkpoint_blocks",
    "checkpointed",
    "ends_bytes",
    "frugal_gradients",
    "mfu",
    "model_state_bytes",
    "scale_loss",
    "transformer_flops",
]
