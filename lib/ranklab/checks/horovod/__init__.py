"""The exercises and predictions of lab 05, in the order of the lab.

    negotiate.py              rounds in which ranks become ready in different orders
    fuse_tensors.py           which tensors share a buffer
    tune_fusion.py            a threshold for noisy workloads: open, with a score and its own check
    distributed_optimizer.py  against gradients averaged by torch
    compress_fp16.py          types and bytes
    timeline.py               what a viewer makes of the file
    adasum.py                 Adasum against its definition
"""

from ranklab import horovod
from ranklab.checks.exercise import Exercise
from ranklab.checks.horovod.adasum import ADASUM
from ranklab.checks.horovod.compress_fp16 import COMPRESS
from ranklab.checks.horovod.distributed_optimizer import OPTIMIZER
from ranklab.checks.horovod.fuse_tensors import FUSE
from ranklab.checks.horovod.negotiate import NEGOTIATE
from ranklab.checks.horovod.predictions import PREDICTIONS
from ranklab.checks.horovod.timeline import TIMELINE
from ranklab.checks.horovod.tune_fusion import check_tune_fusion

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    NEGOTIATE,
    FUSE,
    Exercise(horovod.tune_fusion, check_tune_fusion, hints=(
        "Which thresholds do you try, how often do you try each, and which of its times counts?",
        "A grid of equal ratios, and at each the median of several calls, because a mean takes in "
        "the stragglers. Calls are worth more near the best than far away from it.",
        "grid = [round(low * (high / low) ** (i / (n - 1))) for i in range(n)]; seconds = {t: "
        "median(seconds_of(t) for _ in range(calls // 2 // n)) for t in grid}. With the other half "
        "of the calls the same once more, between the neighbours of the best.",
    )),
    OPTIMIZER,
    COMPRESS,
    TIMELINE,
    ADASUM,
)
