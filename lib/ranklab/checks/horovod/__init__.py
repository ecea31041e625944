"""The exercises and predictions of lab 05, in the order of the lab.

    negotiate.py              rounds in which ranks become ready in different orders
    fuse_tensors.py           which tensors share a buffer
    tune_fusion.py            a threshold for noisy workloads: open, with a score and its own check
    distributed_optimizer.py  against gradients averaged by torch
    compress_fp16.py          types and bytes
    timeline.py               the file, as a viewer reads it
    adasum.py                 Adasum against its definition
"""

from ranklab.checks.horovod.adasum import ADASUM
from ranklab.checks.horovod.compress_fp16 import COMPRESS
from ranklab.checks.horovod.distributed_optimizer import OPTIMIZER
from ranklab.checks.horovod.fuse_tensors import FUSE
from ranklab.checks.horovod.negotiate import NEGOTIATE
from ranklab.checks.horovod.predictions import PREDICTIONS
from ranklab.checks.horovod.timeline import TIMELINE
from ranklab.checks.horovod.tune_fusion import TUNE

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    NEGOTIATE,
    FUSE,
    TUNE,
    OPTIMIZER,
    COMPRESS,
    TIMELINE,
    ADASUM,
)
