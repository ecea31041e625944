"""Lab 06: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import functools
import math
import random
from fractions import Fraction
from itertools import combinations
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from ranklab.data_parallel import OverlappedDataParallel, buckets_of
from ranklab.zero import (
    CpuMemory, ShardedBucket, ShardedModel, ShardedOptimizerMixin, States, call_after_backward,
    fastest_way, in_backward,
)


def partition_flat__cat_and_pad(tensors, ranks):
    """torch.cat of the flattened tensors, F.pad, tensor_split."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    flat = F.pad(flat, (0, -len(flat) % ranks))
    return flat, flat.tensor_split(ranks)


def partition_flat__copy_into_zeros(tensors, ranks):
    """Allocates zeros first and copies tensor by tensor; narrow makes the shards, in a list."""
    tensors = list(tensors)
    n = sum(t.numel() for t in tensors)
    length = (n + ranks - 1) // ranks
    flat = torch.zeros(length * ranks, dtype=tensors[0].dtype, device=tensors[0].device)
    start = 0
    for t in tensors:
        flat[start:start + t.numel()].view(t.shape).copy_(t)
        start += t.numel()
    return flat, [flat.narrow(0, r * length, length) for r in range(ranks)]


def zero_memory__numbers_of_each(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2,
                                 optimizer_bytes=12):
    """The numbers held of each state, by comparing the stage; whole-number ceiling."""
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    shard = -(-parameters // ranks)
    return States((shard if stage >= 3 else parameters) * parameter_bytes,
                  (shard if stage >= 2 else parameters) * gradient_bytes,
                  (shard if stage >= 1 else parameters) * optimizer_bytes)


def zero_memory__list_sharded(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2,
                              optimizer_bytes=12):
    """A list of states in the order in which the stages shard them; exact fractions for the
    ceiling.
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    shard = math.ceil(Fraction(parameters) / ranks)
    held = [shard] * stage + [parameters] * (3 - stage)
    optimizer, gradients, weights = (
        n * each for n, each in zip(held, (optimizer_bytes, gradient_bytes, parameter_bytes)))
    return States(parameters=weights, gradients=gradients, optimizer_state=optimizer)


class _Stage1(ShardedOptimizerMixin, OverlappedDataParallel):
    """The collectives of the lab: divides the whole in place, reduce-scatters into a part of it."""

    def make_buckets(self, trained, bucket_cap_bytes):
        return buckets_of(trained, bucket_cap_bytes, self.group_of, ShardedBucket)

    def reduce(self, bucket):
        while self.works:
            self.works.pop().wait()
        bucket.flat.div_(dist.get_world_size(bucket.group))
        bucket.shard_grad = self.place_of(bucket)
        return dist.reduce_scatter_single(bucket.shard_grad, bucket.flat, group=bucket.group,
                                          async_op=True)

    def place_of(self, bucket):
        return bucket.flat.view(-1, len(bucket.shard))[bucket.rank]

    def finish(self):
        super().finish()
        for bucket in self.buckets:
            bucket.set_optimizer_gradients({p for p in bucket.parameters if p.grad is not None})

    def step_ends(self):
        for bucket in self.buckets:
            bucket.update_shard()
            dist.all_gather_single(bucket.weights, bucket.shard, group=bucket.group)


class ZeroStage1__divide_then_reduce_scatter(_Stage1):
    """As it is: the answers to stage 2 inherit, too."""


class _SumLater:
    """A handle: when the pieces of all ranks are here, their mean goes to its place."""

    def __init__(self, work, pieces, place):
        self.work, self.pieces, self.place = work, pieces, place

    def wait(self):
        self.work.wait()
        self.place.copy_(self.pieces.view(-1, len(self.place)).mean(0))
        return True


class ZeroStage1__all_to_all(_Stage1):
    """Reduce-scatter by an all-to-all and a local mean, in wait() of an own handle; gathers into a
    list of views.
    """

    def reduce(self, bucket):
        while self.works:
            self.works.pop().wait()
        pieces = torch.empty_like(bucket.flat)
        work = dist.all_to_all_single(pieces, bucket.flat, group=bucket.group, async_op=True)
        bucket.shard_grad = self.place_of(bucket)
        return _SumLater(work, pieces, bucket.shard_grad)

    def step_ends(self):
        for bucket in self.buckets:
            bucket.update_shard()
        for bucket in self.buckets:
            whole = list(bucket.weights.split(len(bucket.shard)))
            dist.all_gather(whole, bucket.shard.clone(), group=bucket.group)


class ZeroStage2__free_all_before(_Stage1):
    """place_of frees all buckets that left before; an empty tensor is the place."""

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)
        self.free_gradients(self.buckets)

    def place_of(self, bucket):
        self.free_gradients(self.buckets[:self.buckets.index(bucket)])
        return torch.empty_like(bucket.shard)

    def finish(self):
        super().finish()
        self.free_gradients(self.buckets)

    def free_gradients(self, buckets):
        for bucket in buckets:
            bucket.free_gradients()


class ZeroStage2__free_previous(_Stage1):
    """Frees only the bucket that left just before; the place is made by cloning the part of the
    whole.
    """

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)
        self.free_gradients(self.buckets)

    def place_of(self, bucket):
        i = self.buckets.index(bucket)
        if i > 0:
            self.free_gradients([self.buckets[i - 1]])
        return super().place_of(bucket).clone()

    def finish(self):
        super().finish()
        self.free_gradients(self.buckets[-1:])

    def free_gradients(self, buckets):
        for bucket in buckets:
            bucket.free_gradients()


class ZeroStage3__wait_then_prefetch(ShardedModel):
    """Waits for the unit first, then starts the next one."""

    def enter(self, unit, module, inputs, kwargs):
        unit.end_gather()
        if not in_backward():
            self.prefetch(self.place_in_order(unit) + 1)
        return call_after_backward(functools.partial(self.backward_done, unit), (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        if in_backward():
            return
        unit.free()
        begins = functools.partial(self.backward_of, unit, self.position - 1)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(begins)

    def backward_of(self, unit, place, _):
        self.backward_begins()
        unit.end_gather()
        self.prefetch(place - 1)

    def backward_done(self, unit):
        if self.sync:
            self.reduce(unit)
        unit.free()


class ZeroStage3__start_both_then_wait(ShardedModel):
    """Starts the unit's gather and the next one's, and waits after both are on their way; frees
    before it reduces.
    """

    def enter(self, unit, module, inputs, kwargs):
        unit.begin_gather()
        if not in_backward():
            place = self.place_in_order(unit)
            self.prefetch(place + 1)
        unit.end_gather()
        return call_after_backward(functools.partial(self.backward_done, unit), (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        if not in_backward():
            begins = functools.partial(self.backward_of, unit, self.position - 1)
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(begins)
            unit.free()

    def backward_of(self, unit, place, _):
        self.backward_begins()
        unit.begin_gather()
        if place > 0:
            self.prefetch(place - 1)
        unit.end_gather()

    def backward_done(self, unit):
        unit.free()
        if self.sync:
            self.reduce(unit)


def units_to_keep__climb(step):
    """All sets of up to 11 units; else a climb by adding, dropping and swapping, from several
    starts.
    """
    n = len(step.nbytes)
    if max(step.nbytes, default=0) > step.limit:
        raise ValueError(f"the largest unit, {max(step.nbytes)} bytes, is above {step.limit}")
    if n <= 11:
        sets = [list(c) for k in range(n + 1) for c in combinations(range(n), k)]
        return min(sets, key=step.seconds)
    known = {}

    def seconds(kept):
        if kept not in known:
            if len(known) >= 2990:
                return math.inf
            known[kept] = step.seconds(sorted(kept))
        return known[kept]

    draw = random.Random(0)
    best = frozenset()
    starts = [frozenset()]
    tail, room = set(), step.limit
    for i in reversed(range(n)):
        if tail and sum(step.nbytes[j] for j in tail | {i}) > room / 2:
            break
        tail.add(i)
    starts.append(frozenset(tail))
    while len(known) < 2990:
        now = starts.pop(0) if starts else frozenset(
            best ^ set(draw.sample(range(n), min(n, 4))))
        better, before = True, len(known)
        while better:
            better = False
            moves = [now ^ {i} for i in range(n)]
            moves += [now - {i} | {j} for i in now for j in range(n) if j not in now]
            draw.shuffle(moves)
            for move in moves:
                if seconds(move) < seconds(now):
                    now, better = move, True
                    break
        if seconds(now) < seconds(best):
            best = now
        if len(known) == before and not starts:
            starts.append(frozenset(draw.sample(range(n), draw.randint(1, n))))
            if draw.random() < 0.02:
                break
    return sorted(best)


def units_to_keep__beam(step):
    """A beam: of all sets with k units the 14 fastest grow by one unit; the fastest set of all
    sizes wins.
    """
    largest = max(step.nbytes, default=0)
    if largest > step.limit:
        raise ValueError(f"a unit of {largest} bytes is above the limit of {step.limit}")
    n, calls, beam, best = len(step.nbytes), 1, [()], (step.seconds([]), ())
    tried = {()}
    while beam:
        grown = {tuple(sorted({*kept, i})) for kept in beam for i in range(n) if i not in kept}
        scored = []
        for kept in sorted(grown - tried):
            tried.add(kept)
            if sum(step.nbytes[i] for i in kept) <= step.limit and calls < 3000:
                calls += 1
                scored.append((step.seconds(list(kept)), kept))
        scored = sorted(each for each in scored if each[0] < math.inf)
        beam = [kept for _, kept in scored[:14 if n > 7 else 200]]
        best = min([best] + scored[:1])
    return list(best[1])


def zero_traffic__formula(stage, nbytes, ranks, resident_bytes=0):
    """The formula: two or three collectives of (R-1)/R."""
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    whole = 2 * nbytes if stage < 3 else 3 * nbytes - resident_bytes
    return whole * (ranks - 1) / ranks


def zero_traffic__ring(stage, nbytes, ranks, resident_bytes=0):
    """Counts the R-1 messages of each ring, collective by collective."""
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    collectives = [nbytes, nbytes] + [nbytes - resident_bytes] * (stage == 3)
    return sum(each / ranks for each in collectives for _ in range(ranks - 1))


def offload_optimizer__post_hook(model, new_optimizer, groups=None, place=None):
    """The tools of the lab, with a hook after step()."""
    place = CpuMemory() if place is None else place
    for bucket in model.buckets:
        bucket.set_master(place.copy(bucket.shard))
    optimizer = model.make_optimizer(new_optimizer, groups)
    optimizer.register_step_post_hook(lambda optimizer, *_: place.take_state(optimizer))
    return optimizer


def offload_optimizer__wrapped_step(model, new_optimizer, groups=None, place=None):
    """Wraps the step of this one optimizer instead of a hook; copies a detached shard."""
    if place is None:
        place = CpuMemory()
    masters = [place.copy(bucket.shard.detach()) for bucket in model.buckets]
    for bucket, master in zip(model.buckets, masters):
        bucket.set_master(master)
    optimizer = model.make_optimizer(new_optimizer, groups)
    step = optimizer.step

    def step_and_take(*args, **kwargs):
        result = step(*args, **kwargs)
        place.take_state(optimizer)
        return result

    optimizer.step = step_and_take
    return optimizer


def deepspeed_config__straight(parameters, ranks, gpu_bytes, batch, micro_batch, other_bytes=0,
                               precision="bf16", lr=3e-4, bucket=50_000_000):
    """Line after line, as the stub begins."""
    if batch % (micro_batch * ranks):
        raise ValueError(f"batch={batch} must be micro_batch={micro_batch} x ranks={ranks} x a "
                         "whole number of accumulation steps")
    config = {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {
        "lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
    zero = {"overlap_comm": True, "contiguous_gradients": True}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    way = fastest_way(parameters, ranks, gpu_bytes, other_bytes)
    config["train_batch_size"] = batch
    config["train_micro_batch_size_per_gpu"] = micro_batch
    config["gradient_accumulation_steps"] = batch // (micro_batch * ranks)
    zero["stage"] = way.stage
    zero["reduce_bucket_size"] = bucket
    zero["allgather_bucket_size"] = bucket
    if way.stage == 3:
        zero["stage3_prefetch_bucket_size"] = bucket
    if way.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if way.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config["zero_optimization"] = zero
    return config


def deepspeed_config__one_literal(parameters, ranks, gpu_bytes, batch, micro_batch, other_bytes=0,
                                  precision="bf16", lr=3e-4, bucket=50_000_000):
    """One dictionary built with ** of conditional parts."""
    steps, rest = divmod(batch, micro_batch * ranks)
    if rest:
        raise ValueError(f"batch={batch} does not divide by {micro_batch} x {ranks}")
    way = fastest_way(parameters, ranks, gpu_bytes, other_bytes=other_bytes)
    away = lambda name: {name: {"device": "cpu", "pin_memory": True}}
    return {
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {
            "lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": way.stage, "overlap_comm": True, "contiguous_gradients": True,
            "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
            **({"stage3_prefetch_bucket_size": bucket} if way.stage == 3 else {}),
            **(away("offload_optimizer") if way.offload_optimizer else {}),
            **(away("offload_param") if way.offload_parameters else {}),
        },
    }
