"""The fusion threshold: what it does to a step, by the model and by trial, for projects.horovod."""

import dataclasses
import tempfile
from typing import NamedTuple

import torch

from ranklab.horovod.cost import fused_time
from ranklab.horovod.fusion import fuse_tensors
from ranklab.projects.horovod import bert
from ranklab.projects.horovod.timeline import all_reduces, read_timeline

THRESHOLDS = (0, 2**14, 2**16, 2**20, 2**27)  # the last is Horovod's default
RANGE = 2**10, 2**22  # for tune_fusion: from less than most gradients of our BERT to all of them


class Tuned(NamedTuple):
    """A few steps at one fusion threshold."""

    threshold: int  # bytes
    all_reduces: float  # in a step
    sent_bytes: float | None  # by each rank, in a step; None: the real Horovod does not count
    ms_per_step: float


def try_threshold(hvd, tokens, config, threshold, steps=4):
    """The Tuned of this threshold, on rank 0; the timeline counts the all-reduces."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/timeline.json"  # a string: the real start_timeline() takes no Path
        longer = dataclasses.replace(config, steps=steps + 1)  # no end, so nothing is evaluated
        _, seen = bert.fine_tune(hvd, tokens, longer, path, until=steps)
        phases = read_timeline(path) if hvd.rank() == 0 else []
    n = len(all_reduces(phases)) / steps
    return Tuned(threshold, n, seen["sent_bytes"], seen["ms_per_step"])


def tune_together(hvd, tune, try_one, calls):
    """What tune(seconds_of, *RANGE, calls) chooses on rank 0; all ranks try what it asks for.

    try_one  called with a threshold on every rank; a Tuned
    """
    def seconds_of(threshold):
        return try_one(hvd.broadcast_object(threshold, 0)).ms_per_step / 1e3

    if hvd.rank() == 0:
        chosen = tune(seconds_of, *RANGE, calls)
        return hvd.broadcast_object((chosen, "chosen"), 0)[0]
    while not isinstance(asked := hvd.broadcast_object(None, 0), tuple):
        try_one(asked)
    return asked[0]


def model(sizes, thresholds, ranks, alpha, beta, fuse=fuse_tensors):
    """([all-reduces], [seconds]) at each threshold, when all gradients are ready at once.

    `sizes` are the gradients' bytes, in the order of backward; alpha and beta those of the links;
    `fuse` may be a learner's own fuse_tensors.
    """
    tensors = [torch.empty(n, dtype=torch.uint8, device="meta") for n in sizes]
    return ([len(fuse(tensors, threshold)) for threshold in thresholds],
            [fused_time(sizes, threshold, ranks, alpha, beta) for threshold in thresholds])


def table(tuned):
    """The Tuned of each threshold, as text."""
    lines = [f"{'fusion threshold':>18}{'all-reduces/step':>18}{'sent/step':>12}{'ms/step':>10}"]
    lines += [f"{row.threshold:16,} B{row.all_reduces:18.1f}{megabytes(row.sent_bytes):>12}"
              f"{row.ms_per_step:10.1f}" for row in sorted(tuned)]
    return "\n".join(lines)


def megabytes(n):
    return "not counted" if n is None else f"{n / 1e6:.2f} MB"
