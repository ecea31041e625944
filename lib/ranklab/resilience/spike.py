"""A loss spike: skip the batch, or roll back?

PaLM's loss spiked about 20 times. What helped was to restart from a checkpoint about 100 steps
before the spike, and to skip 200 to 500 batches (arXiv 2204.02311, section 5.1). The batches were
not bad by themselves: from a different checkpoint they caused no spike.
"""

import math
import statistics


def loss_spike(losses, window=64, limit=6.0, patience=3):
    """Return what to do with the step whose loss is losses[-1], before its update.

    "go on"      if the loss is finite, and not far above the losses of the `window` steps before
    "skip"       otherwise: leave this batch out
    "roll back"  if it is such a loss and the `patience` - 1 before it are, too, so skipping did not
                 help: go back to a checkpoint before them, and leave their batches out
    "Far above" means above their middle by more than `limit` times their usual spread, which
    equals the standard deviation if there are no spikes.
    Falling losses and low ones are not spikes.
    Earlier spikes, and losses that are not finite, do not hide a new spike.
    The `window` steps end before the last `patience` losses, so that a row of spikes is not
    judged by itself.
    A rise by 1% of abs(middle) is not a spike, however steady the losses were.
    Among the first 20 losses every finite one is good, because they fall steeply.
    losses: a list of floats, not modified.
    Lab: 14
    """
    # The normal losses end before those being judged, so that a spike is not part of its own norm.
    usual = [x for x in losses[-window - patience:-patience] if math.isfinite(x)]
    bound = math.inf
    if len(losses) > 20 and usual:
        middle = statistics.median(usual)
        spread = 1.4826 * statistics.median(abs(x - middle) for x in usual)  # sigma, if normal
        bound = middle + max(limit * spread, 0.01 * abs(middle))
    is_bad = [not math.isfinite(x) or x > bound for x in losses[-patience:]]
    if not is_bad[-1]:
        return "go on"
    return "roll back" if all(is_bad) and len(is_bad) == patience else "skip"
