"""The exercises and predictions of lab 04, in the order of the lab.

    calls.py                  how a function that needs no ranks is called
    scaling_efficiency.py     scaling_efficiency
    exposed_communication.py  exposed_communication
    jobs.py                   timelines whose causes are known
    diagnose.py               diagnose, on these
    hooks.py                  a hook in torch's DDP, and what it did
    compress_fp16_hook.py     compress_fp16_hook, registered there
    top_k_compress.py         top_k_compress
    compress_to_budget.py     compress_to_budget, registered there
    power_sgd.py              power_sgd
"""

from ranklab import ddp
from ranklab.checks.ddp.compress_fp16_hook import check_compress_fp16_hook
from ranklab.checks.ddp.compress_to_budget import check_compress_to_budget
from ranklab.checks.ddp.diagnose import check_diagnose
from ranklab.checks.ddp.exposed_communication import check_exposed_communication
from ranklab.checks.ddp.power_sgd import check_power_sgd
from ranklab.checks.ddp.predictions import PREDICTIONS
from ranklab.checks.ddp.scaling_efficiency import check_scaling_efficiency
from ranklab.checks.ddp.top_k_compress import check_top_k_compress
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(ddp.scaling_efficiency, check_scaling_efficiency, hints=(
        "Efficiency is what you got over what would be perfect. What would be perfect?",
        "Strong: base/R of the base's time. Weak: the base's time. The base is min(seconds), the "
        "fewest ranks that anybody measured.",
        "base = min(seconds); perfect = base / ranks if kind == 'strong' else 1; the efficiency is "
        "perfect * seconds[base] / seconds[ranks]. Raise a ValueError for another kind, first.",
    )),
    Exercise(ddp.exposed_communication, check_exposed_communication, hints=(
        "Walk along the time axis and keep count of what is running. Things change only where an "
        "event starts or ends.",
        "Sort all starts (+1) and ends (-1) by time. Between two of them: if transfers run, one or "
        "more, and computing none, add the time between the two.",
        "edges = sorted((time, change, event.kind) for event in events for time, change in "
        "((event.start, 1), (event.end, -1))); running = {kind: 0, 'compute': 0}; for each edge: "
        "first add time - last_time if running[kind] and not running['compute'], then count.",
    )),
    Exercise(ddp.diagnose, check_diagnose, hints=(
        "Cut each timeline with steps_of. Measure four things in every step of every rank: length, "
        "loading, exposed communication, computing. Take the median step of each rank.",
        "Loading: the mean over ranks. Exposed communication: the least, since the other ranks "
        "only wait for somebody. Straggler: the largest computing + loading, minus the mean of the "
        "others. Divide each by the length of a step.",
        "medians(measure) = [median(measure(step) for step in s) for s in steps]; "
        "loading = medians(lambda s: exposed_communication(s, kind='loader')); the verdict is "
        "max(shares, key=shares.get) if that share is 0.25 or more, else 'healthy'.",
    )),
    Exercise(ddp.compress_fp16_hook, check_compress_fp16_hook, hints=(
        "bucket.buffer() is the bucket's flat gradient: narrow it, all-reduce it, copy it back.",
        "Divide by the ranks before the cast, so that no sum overflows. "
        "dist.all_reduce(..., async_op=True).get_future() gives a future; .then(f) gives another "
        "one, which holds what f returns.",
        "R = dist.get_world_size(group); halves = buffer.div_(R).to(torch.float16); future = "
        "dist.all_reduce(halves, group=group, async_op=True).get_future(); return "
        "future.then(lambda done: buffer.copy_(done.value()[0]))",
    )),
    Exercise(ddp.top_k_compress, check_top_k_compress, hints=(
        "First add what was left before. Then choose, send, and keep the others.",
        "target = (gradient + error).flatten(); the places come from target.abs().topk(k).indices, "
        "the values from target. k may be more than there is.",
        "indices = target.abs().topk(min(k, target.numel())).indices; values = target[indices]; "
        "target[indices] = 0; return values, indices, target.view(gradient.shape)",
    )),
    Exercise(ddp.compress_to_budget, check_compress_to_budget, hints=(
        "An entry of top-k has 8 bytes: 4 for its value, 4 for its place. How few bytes can each "
        "do with?",
        "A value in bfloat16 has 2 bytes. A place needs 2 bytes if it counts inside a row of "
        "32,768 numbers, and 1 byte as the distance from the place before it. Take the largest of "
        "the whole bucket, not some of each parameter. What rounding loses belongs in the error, "
        "too.",
        "target = buffer + errors; places = target.abs().topk(k).indices, k = top_k_bytes("
        "bucket.parameters(), 0.001) // 4; values = target[places].bfloat16(); their bytes and "
        "those of places.short() in one uint8 tensor; all_gather_single; add up rank by rank, "
        "divide by R. The error is target, less values.float() at these places; cut it by "
        "parameter. A bucket of more than 32,768 numbers: rows of so many, topk in each.",
    )),
    Exercise(ddp.power_sgd, check_power_sgd, hints=(
        "Compress matrix + error. Two products, two all-reduces, and what is left is the new "
        "error.",
        "p = target @ q, all-reduced, then made orthonormal by torch.linalg.qr(p).Q. q = target.mT "
        "@ p, all-reduced and divided by the ranks. The gradient is p @ q.mT.",
        "After the second all-reduce: q /= dist.get_world_size(group); approximation = p @ q.mT; "
        "return approximation, q, target - approximation",
    )),
)
