"""Lab 01's checks: counting FLOPs and bytes, accumulating, recomputing, scaling.

    counting.py              formulas against torch's counts
    accumulate_gradients.py  a big batch in pieces against the batch in one piece
    checkpointed.py          checkpointed layers against plain ones
    frugal_gradients.py      the smallest peak for a given step
    scale_loss.py            loss scaling against torch.amp.GradScaler
    numbers.py               the predictions
"""

from ranklab.checks.baseline.accumulate_gradients import ACCUMULATE
from ranklab.checks.baseline.checkpointed import CHECKPOINTED
from ranklab.checks.baseline.counting import ACTIVATIONS, FLOPS, MFU, STATE
from ranklab.checks.baseline.frugal_gradients import FRUGAL
from ranklab.checks.baseline.numbers import PREDICTIONS
from ranklab.checks.baseline.scale_loss import SCALE_LOSS

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    FLOPS,
    MFU,
    STATE,
    ACTIVATIONS,
    ACCUMULATE,
    CHECKPOINTED,
    FRUGAL,
    SCALE_LOSS,
)
