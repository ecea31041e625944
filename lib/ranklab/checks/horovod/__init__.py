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
from ranklab.checks.horovod.compress_fp16 import check_compress_fp16
from ranklab.checks.horovod.distributed_optimizer import check_distributed_optimizer
from ranklab.checks.horovod.fuse_tensors import check_fuse_tensors
from ranklab.checks.horovod.negotiate import check_negotiate
from ranklab.checks.horovod.predictions import PREDICTIONS
from ranklab.checks.horovod.timeline import check_timeline
from ranklab.checks.horovod.tune_fusion import check_tune_fusion

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(horovod.negotiate, check_negotiate, hints=(
        "New names go to rank 0; rank 0 counts; what it finds goes to everybody.",
        "dist.gather_object(ready, lists, group=group, group_dst=0), where `lists` is [None] * R "
        "on rank 0 and None elsewhere. At R a name is complete, and leaves the table.",
        "answer = [complete]; dist.broadcast_object_list(answer, group=group, group_src=0); "
        "return answer[0]. All ranks call both, even with nothing to send.",
    )),
    Exercise(horovod.fuse_tensors, check_fuse_tensors, hints=(
        "For each (dtype, device) keep the newest list, and how many bytes it holds.",
        "A tensor begins a new list when its kind has none yet, or when the bytes of the newest "
        "one and its own together are more than the threshold.",
        "if kind not in last or last[kind][1] + tensor.nbytes > threshold: last[kind] = [[], 0]; "
        "groups.append(last[kind][0]). Then, for every tensor: last[kind][0].append(i); "
        "last[kind][1] += tensor.nbytes.",
    )),
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
    Exercise(horovod.compress_fp16, check_compress_fp16, hints=(
        "What must restore know that the small tensor does not say? The type that it had before.",
        "An inner function remembers the names around it: dtype = tensor.dtype, and then "
        "lambda reduced: reduced.to(dtype).",
        "if not dtype.is_floating_point or dtype.itemsize <= 2: return tensor, lambda reduced: "
        "reduced. Otherwise: return tensor.to(torch.float16), lambda reduced: reduced.to(dtype).",
    )),
    Exercise(horovod.timeline, check_timeline, hints=(
        "A row is a number, the pid. Give each tensor the next one when you first meet it, and "
        "name the row once.",
        "rows.setdefault is not enough: a new row also needs the entry with its name.",
        'At the end json.dump({"traceEvents": trace}, file). ts = start * 1e6, dur = '
        '(end - start) * 1e6.',
    )),
    Exercise(horovod.adasum, check_adasum, hints=(
        "After the swap you hold one half of two vectors. On both ranks a is the left one's. What "
        "do you need to combine them, and which part of that do other ranks hold?",
        "dot_products counts your part only. With step = 1, 2, 4, ... distance: exchange dots with "
        "rank ^ step, and add what arrives.",
        "ab, aa, bb = dots; of_a = 1 - torch.where(aa > 0, ab / (2 * aa), 0), of_b likewise; "
        "part = (of_a[tensor_of] * a + of_b[tensor_of] * b).to(x.dtype)",
    )),
)
