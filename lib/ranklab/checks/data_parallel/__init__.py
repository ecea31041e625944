"""The exercises and predictions of lab 03, in the order of the lab.

Read toys.py first, the small models, and sent.py, what a rank sends; then the exercise's own file.
"""

from ranklab import data_parallel
from ranklab.checks.data_parallel.assign_buckets import check_assign_buckets
from ranklab.checks.data_parallel.average_gradients import check_average_gradients
from ranklab.checks.data_parallel.broadcast_parameters import check_broadcast_parameters
from ranklab.checks.data_parallel.join_uneven import check_join_uneven
from ranklab.checks.data_parallel.no_sync import check_no_sync
from ranklab.checks.data_parallel.overlapped_data_parallel import check_OverlappedDataParallel
from ranklab.checks.data_parallel.plan_buckets import check_plan_buckets
from ranklab.checks.data_parallel.predictions import PREDICTIONS
from ranklab.checks.data_parallel.replicas_agree import check_replicas_agree
from ranklab.checks.data_parallel.sharding import check_scale_learning_rate, check_shard_sampler
from ranklab.checks.data_parallel.sync_batch_norm import check_sync_batch_norm
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(data_parallel.broadcast_parameters, check_broadcast_parameters, hints=(
        "What must be equal on all ranks before the first step? Not only what is trained.",
        "Every parameter and every buffer: [*model.parameters(), *model.buffers()].",
        "dist.broadcast(tensor.detach(), group=group, group_src=src) for each of them: in place, "
        "and src counts inside the group.",
    )),
    Exercise(data_parallel.shard_sampler, check_shard_sampler, hints=(
        "All ranks make the same order of all samples, and each takes its part.",
        "torch.randperm(n, generator=...) with seed + epoch. Fill up to a multiple of `ranks` from "
        "the beginning of the order itself (more than once if need be), or cut.",
        "share = n // ranks if drop_last else -(-n // ranks); while len(order) < share * ranks: "
        "order += order[: share * ranks - len(order)]; return order[rank : share * ranks : ranks]",
    )),
    Exercise(data_parallel.average_gradients, check_average_gradients, hints=(
        "For each parameter: one all-reduce of its gradient, in place.",
        "A rank whose gradient is None must send zeros, or the others wait for it. Frozen "
        "parameters have no gradient anywhere: skip them.",
        "for parameter in model.parameters(): if requires_grad: make zeros_like where grad is "
        "None; parameter.grad /= R; dist.all_reduce(parameter.grad, group=group)",
    )),
    Exercise(data_parallel.assign_buckets, check_assign_buckets, hints=(
        "Go once from the last parameter to the first. Which bucket does a parameter go into, and "
        "when do you close that bucket?",
        "A dict holds the bucket still open for each (dtype, device). Put the parameter in, and if "
        "the bucket's bytes have reached the cap, move it to the closed ones.",
        "bucket = still_open.setdefault(kind, []); bucket.append(parameter); if sum(p.nbytes "
        "for p in bucket) >= bucket_cap_bytes: closed.append(still_open.pop(kind)). At the end: "
        "closed + list(still_open.values())",
    )),
    Exercise(data_parallel.OverlappedDataParallel, check_OverlappedDataParallel, hints=(
        "The hook crosses its parameter off bucket.missing. When is a bucket allowed to leave?",
        "When nothing of it is missing, and all buckets before it have left: self.waiting holds "
        "those that have not, in order. finish(): clear bucket.missing of all in self.waiting and "
        "launch them; used = self.used_anywhere() with find_unused_parameters; wait for every "
        "handle; for each bucket fill_none(used) and missing = set(its parameters); waiting and "
        "works as in __init__.",
        "In the hook: bucket.missing.remove(parameter); self.launch_ready_buckets(). There: while "
        "self.waiting and not self.waiting[0].missing: bucket = self.waiting.pop(0); "
        "bucket.gather(); bucket.flat /= R; self.works.append(dist.all_reduce(bucket.flat, "
        "group=self.group, async_op=True))",
    )),
    Exercise(data_parallel.plan_buckets, check_plan_buckets, hints=(
        "Fix the last bucket. What do you have to know about all buckets before it?",
        "Only when they have arrived, and earlier is better. So keep the earliest end for the "
        "first j gradients. Try every start i of the last bucket: it begins after the end that "
        "you kept for the first i.",
        "ends = [0.0]; for j in 1 .. n: end of (i) = max(ends[i], ready[j - 1]) + alpha + "
        "sum(nbytes[i:j]) * beta; keep the smallest, and its i. Then walk back from n: the last "
        "bucket is i .. n - 1, and the one before it ends at i.",
    )),
    Exercise(data_parallel.no_sync, check_no_sync, hints=(
        "The hooks look at model.sync. What should it be inside, and what afterwards?",
        "A generator under @contextlib.contextmanager: what stands before the yield happens on "
        "entering, what stands after it on leaving, but after an error only in a `finally`.",
        "old_sync, model.sync = model.sync, False; try: yield; finally: model.sync = old_sync",
    )),
    Exercise(data_parallel.sync_batch_norm, check_sync_batch_norm, hints=(
        "Forward: which three sums over ranks give mean and variance? Backward: through which "
        "paths does x enter y?",
        "torch.cat([sum of x, sum of x * x, count]) in float64, one all-reduce. Backward: sums of "
        "grad and of grad * normal, one all-reduce of a copy; weight and bias get this rank's own.",
        "mean, square = (sums[:-1] / n).split(C); variance = (square - mean ** 2).clamp(min=0); of "
        "x: (grad - mean over ranks of grad - normal * mean over ranks of grad * normal) * scale * "
        "weight",
    )),
    Exercise(data_parallel.scale_learning_rate, check_scale_learning_rate, hints=(
        "k = batch / base_batch. How does the learning rate depend on k in each rule?",
        "linear: lr * k; sqrt: lr * k ** 0.5. Warm-up: the straight line from lr at step 0 to the "
        "scaled rate at step `warmup`.",
        "if step is None or step >= warmup: return scaled; return lr + (scaled - lr) * step / "
        "warmup",
    )),
    Exercise(data_parallel.join_uneven, check_join_uneven, hints=(
        "Before each step all ranks must find out whether any rank has a batch left. And what does "
        "a rank do that has none?",
        "One all-reduce with MAX: a rank with a batch gives its number, one without gives -1. "
        "Below 0: all are done. Else the result is a rank that goes on: its buffers count, and at "
        "the end its weights.",
        "batch = next(batches, None); dist.all_reduce(going_on, dist.ReduceOp.MAX, "
        "group=model.group); if going_on < 0: break; model.buffers_from = last = going_on.item(); "
        "then model.shadow() or yield batch. At the end broadcast_parameters(model.module, last, "
        "model.group)",
    )),
    Exercise(data_parallel.replicas_agree, check_replicas_agree, hints=(
        "Each rank makes a short number of all its weights. When are all numbers equal?",
        "hashlib.blake2b(digest_size=7) over the bytes of every parameter: 56 bits, an int64. All "
        "are equal when the largest is the smallest; the smallest is minus the largest of the "
        "negatives.",
        "extremes = torch.tensor([number, -number], device=device); dist.all_reduce(extremes, "
        "dist.ReduceOp.MAX, group=group); return extremes[0].item() == -extremes[1].item()",
    )),
)
