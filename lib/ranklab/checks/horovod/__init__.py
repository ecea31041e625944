"""The exercises and predictions of lab 05, in the order of the lab.

    negotiate.py              rounds in which ranks become ready in different orders
    fuse_tensors.py           which tensors share a buffer
    tune_fusion.py            a threshold for noisy workloads
    distributed_optimizer.py  against one process that sees all batches
    compress_fp16.py          types and bytes
    timeline.py               what a viewer makes of the file
    adasum.py                 Adasum against its definition
"""

from ranklab import horovod
from ranklab.checks.exercise import Exercise
from ranklab.checks.horovod.adasum import check_adasum
from ranklab.checks.horovod.compress_fp16 import COMPRESS
from ranklab.checks.horovod.distributed_optimizer import check_distributed_optimizer
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
    Exercise(horovod.distributed_optimizer, check_distributed_optimizer, hints=(
        "Two moments: when backward has made a gradient (ask for its average, keep the handle), "
        "and just before the optimizer's own step (wait for all of them).",
        "In wait, first ask for what has not been asked for: with zeros where p.grad is None.",
        "ask: small, ctx = compression.compress(p.grad); handles[p] = allreduce_async_(small, "
        "name=names[p], op=Average), ctx. wait: p.grad = compression.decompress("
        "synchronize(handle), ctx) for all; handles.clear().",
    )),
    COMPRESS,
    TIMELINE,
    Exercise(horovod.adasum, check_adasum, hints=(
        "After the swap you hold one half of two vectors. On both ranks a is the left one's. What "
        "do you need to combine them, and which part of that do other ranks hold?",
        "dot_products counts your part only. With step = 1, 2, 4, ... distance: exchange dots with "
        "rank ^ step, and add what arrives.",
        "ab, aa, bb = dots; of_a = 1 - torch.where(aa > 0, ab / (2 * aa), 0), of_b likewise; "
        "part = (of_a[tensor_of] * a + of_b[tensor_of] * b).to(x.dtype)",
    )),
)
