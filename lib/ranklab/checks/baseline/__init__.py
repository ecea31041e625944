"""Lab 01's checks: counting FLOPs and bytes, accumulating, recomputing, scaling.

    counting.py              formulas beside what torch counts
    accumulate_gradients.py  a big batch in pieces against the batch in one piece
    checkpointed.py          checkpointed layers against plain ones
    frugal_gradients.py      the smallest peak for a given step
    scale_loss.py            loss scaling against torch.amp.GradScaler
    numbers.py               the predictions
"""

from ranklab import baseline
from ranklab.checks.baseline.accumulate_gradients import ACCUMULATE
from ranklab.checks.baseline.checkpointed import CHECKPOINTED
from ranklab.checks.baseline.counting import ACTIVATIONS, FLOPS, MFU, STATE
from ranklab.checks.baseline.frugal_gradients import check_frugal_gradients
from ranklab.checks.baseline.numbers import PREDICTIONS
from ranklab.checks.baseline.scale_loss import SCALE_LOSS
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    FLOPS,
    MFU,
    STATE,
    ACTIVATIONS,
    ACCUMULATE,
    CHECKPOINTED,
    Exercise(baseline.frugal_gradients, check_frugal_gradients, hints=(
        "Three things are large in a plain step: the activations of all rows, the activations of "
        "all blocks, and the logits. Each has a cure: one row at a time, blocks that run again, "
        "the loss in pieces.",
        "One row at a time, through accumulate_gradients or a loop of your own. Blocks: "
        "checkpoint_blocks, or call them without autograd and keep their inputs. The loss: model."
        "loss(model.head, hidden, targets, \"sum\") for some tokens at a time.",
        "For each row, under torch.no_grad(): hidden = [model.token(x)], and block(hidden[-1]) for "
        "each block. Then the loss of 16 tokens at a time, / count, backward() at once, on "
        "h.detach().requires_grad_(); h.grad is what goes on. Then from the last block to the "
        "first: h = hidden.pop().requires_grad_(); block(h).backward(gradient); gradient = h.grad. "
        "At the end model.token(x).backward(gradient), if model.token.weight.requires_grad.")),
    SCALE_LOSS,
)  # fmt: skip
