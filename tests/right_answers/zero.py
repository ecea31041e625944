"""Lab 06: right answers that differ from the library's. Each must pass."""

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ranklab.data_parallel.buckets import buckets_of
from ranklab.data_parallel.gradients import OverlappedDataParallel
from ranklab.formulas.muon import newton_schulz_flops
from ranklab.formulas.zero import States
from ranklab.ranks import shard_range
from ranklab.zero import CpuMemory, ZeroStage1, ZeroStage3, fastest_way, newton_schulz
from ranklab.zero.muon import COEFFICIENTS
from ranklab.zero.partition import ShardedBucket, ShardedOptimizerMixin
from ranklab.zero.sharded_model import ShardedModel
from ranklab.zero.units import call_after_backward, in_backward


def partition_flat__pad(tensors, ranks):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % ranks))
    return flat, list(flat.reshape(ranks, -1))


def zero_memory__by_a_table(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2,
                            optimizer_bytes=12):
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"there is no stage {stage}")
    own = int(-(-parameters // ranks))
    held = [own if stage >= first else parameters for first in (3, 2, 1)]
    return States(*(n * each for n, each in zip(held, (parameter_bytes, gradient_bytes,
                                                       optimizer_bytes))))


def zero_traffic__by_collectives(stage, nbytes, ranks, resident_bytes=0):
    if not 0 <= stage <= 3:
        raise ValueError(f"there is no stage {stage}")
    collectives = [nbytes, nbytes]  # gradients, parameters
    if stage == 3:
        collectives.append(nbytes - resident_bytes)
    return sum(n - n / ranks for n in collectives)


def units_to_keep__one_at_a_time(step):
    """Climbs from the empty set by single changes; another way to stop."""
    if max(step.nbytes) > step.limit:
        raise ValueError("a unit is larger than the limit")
    kept, now = set(), step.seconds()
    for _ in range(100):
        then, unit = min((step.seconds(kept ^ {unit}), unit) for unit in range(len(step.nbytes)))
        if then >= now:
            break
        kept, now = kept ^ {unit}, then
    return list(kept)


def offload_optimizer__backwards(model, new_optimizer, groups=None, place=None):
    where = CpuMemory() if place is None else place
    for bucket in reversed(model.buckets):
        bucket.set_master(where.copy(bucket.shard))
    optimizer = model.make_optimizer(new_optimizer, groups)

    def stepped(optimizer, args, kwargs):
        where.take_state(optimizer)

    optimizer.register_step_post_hook(stepped)
    return optimizer


def deepspeed_config__few_keys(parameters, ranks, gpu_bytes, batch, micro_batch, other_bytes=0,
                               precision="bf16", lr=3e-4, bucket=50_000_000):
    accumulation, left_over = divmod(batch, micro_batch * ranks)
    if left_over:
        raise ValueError(f"{left_over} sequences are left over")
    stage, *offloaded = fastest_way(parameters, ranks, gpu_bytes, other_bytes)
    places = [{"device": "cpu", "pin_memory": True} if is_away else {"device": "none"}
              for is_away in offloaded]
    return {
        "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "bf16": {"enabled": precision == "bf16"}, "fp16": {"enabled": precision == "fp16"},
        "zero_optimization": {
            "stage": stage, "offload_optimizer": places[0], "offload_param": places[1],
            "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket}}


class ZeroStage1__begins_all_gathers(ShardedOptimizerMixin, OverlappedDataParallel):
    """The mean arrives in a chunk of the gradients; in a step all gathers begin, then all end."""

    def make_buckets(self, trained, bucket_cap_bytes):
        return buckets_of(trained, bucket_cap_bytes, self.group_of, ShardedBucket)

    def reduce(self, bucket):
        for work in self.works:
            work.wait()
        bucket.shard_grad = bucket.flat.chunk(dist.get_world_size(bucket.group))[bucket.rank]
        return dist.reduce_scatter_single(bucket.shard_grad, bucket.flat.div_(dist.get_world_size(
            bucket.group)), group=bucket.group, async_op=True)

    def finish(self):
        super().finish()
        for bucket in self.buckets:
            bucket.set_optimizer_gradients({p for p in bucket.parameters if p.grad is not None})

    def step_ends(self):
        works = []
        for bucket in self.buckets:
            bucket.update_shard()
            works.append(dist.all_gather_into_tensor(bucket.weights, bucket.shard,
                                                     group=bucket.group, async_op=True))
        for work in works:
            work.wait()


class ZeroStage1__broadcasts(ZeroStage1__begins_all_gathers):
    def step_ends(self):
        for bucket in self.buckets:
            bucket.update_shard()
            for rank, shard in enumerate(bucket.weights.view(-1, len(bucket.shard))):
                dist.broadcast(shard, group=bucket.group, group_src=rank)


class ZeroStage2__frees_the_one_before(ZeroStage1):
    """Only one bucket can be left: that before this one."""

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)
        self.free_gradients(self.buckets)

    def place_of(self, bucket):
        place = self.buckets.index(bucket)
        if place:
            self.buckets[place - 1].free_gradients()
        return bucket.shard.new_zeros(len(bucket.shard))

    def finish(self):
        super().finish()
        self.free_gradients(reversed(self.buckets))

    def free_gradients(self, buckets):
        for bucket in buckets:
            bucket.free_gradients()


class ZeroStage3__begins_both(ShardedModel):
    """Both gathers are under way before the first is waited for; gradients by a plain method."""

    def enter(self, unit, module, inputs, kwargs):
        unit.begin_gather()
        if not in_backward():
            self.prefetch(1 + self.place_in_order(unit))
        unit.end_gather()
        return call_after_backward(lambda: self.backward_done(unit), (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        if not in_backward():
            place = self.position - 1
            tensors = [x for x in tree_leaves(outputs) if getattr(x, "requires_grad", False)]
            for tensor in tensors:
                tensor.register_hook(lambda grad: self.backward_of(unit, place, grad))
            unit.free()

    def backward_of(self, unit, place, gradient):
        unit.begin_gather()
        self.prefetch(place - 1)
        self.backward_begins()
        unit.end_gather()

    def backward_done(self, unit):
        if not self.sync:
            return unit.free()
        self.reduce(unit)
        unit.free()


def sharded_muon_step__gathers_on_all(weights, momenta, shapes, lr, weight_decay=0.1, group=None):
    """Every rank gathers and orthogonalises every matrix, as in Moonlight's Algorithm 1."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for weight, momentum, (m, n) in zip(weights, momenta, shapes):
        padded = momentum.new_zeros(-(-m // ranks), n)
        padded[: len(momentum)] = momentum
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=group)
        rows = [shard_range(m, r, ranks) for r in range(ranks)]
        update = newton_schulz(torch.cat([x[: len(r)] for x, r in zip(parts, rows)]))
        weight *= 1 - lr * weight_decay
        weight -= lr * max(1, m / n) ** 0.5 * update[rows[rank].start : rows[rank].stop]


def sharded_muon_step__owners_in_turn(weights, momenta, shapes, lr, weight_decay=0.1, group=None):
    """Matrix i belongs to rank i mod R; each is gathered and scattered by messages of its own."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for i, (weight, momentum, (m, n)) in enumerate(zip(weights, momenta, shapes)):
        owner, sizes = i % ranks, [len(shard_range(m, r, ranks)) for r in range(ranks)]
        update = momentum.bfloat16().contiguous()
        if rank == owner:
            parts = [update if r == rank else update.new_empty(size, n)
                     for r, size in enumerate(sizes)]
            for r, part in enumerate(parts):
                if r != rank and len(part):
                    dist.recv(part, group=group, group_src=r)
            whole = newton_schulz(torch.cat(parts)).contiguous()
            for r, part in enumerate(whole.split(sizes)):
                if r != rank and len(part):
                    dist.send(part, group=group, group_dst=r)
            update = whole.split(sizes)[rank]
        elif len(update):
            dist.send(update, group=group, group_dst=owner)
            dist.recv(update, group=group, group_src=owner)
        weight.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * max(1, m / n) ** 0.5)


def sharded_muon_step__by_flops_in_float32(weights, momenta, shapes, lr, weight_decay=0.1,
                                           group=None):
    """Whole matrices go to the rank with the fewest FLOPs, in float32; a sum brings them back."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    owner, loads = {}, [0] * ranks
    for i in sorted(range(len(shapes)), key=lambda i: newton_schulz_flops(*shapes[i]))[::-1]:
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += newton_schulz_flops(*shapes[i])
    for i, (m, n) in enumerate(shapes):
        rows = shard_range(m, rank, ranks)
        whole = momenta[i].new_zeros(m, n)
        whole[rows.start : rows.stop] = momenta[i]
        dist.reduce(whole, group=group, group_dst=owner[i])
        whole = newton_schulz(whole).float() if owner[i] == rank else torch.zeros_like(whole)
        dist.broadcast(whole, group=group, group_src=owner[i])
        weights[i].mul_(1 - lr * weight_decay)
        weights[i].sub_(whole[rows.start : rows.stop], alpha=lr * max(1, m / n) ** 0.5)


def sharded_muon_step__gram(weights, momenta, shapes, lr, weight_decay=0.1, group=None):
    """No rank sees a whole matrix: each step sums the n x n products of all ranks' rows."""
    a, b, c = COEFFICIENTS
    for weight, momentum, (m, n) in zip(weights, momenta, shapes):
        norm = momentum.bfloat16().float().square().sum()
        dist.all_reduce(norm, group=group)
        x = momentum.bfloat16().float() / norm.sqrt()
        for _ in range(5):
            gram = x.mT @ x
            dist.all_reduce(gram, group=group)
            x = a * x + x @ (b * gram + c * gram @ gram)
        weight.mul_(1 - lr * weight_decay).sub_(x, alpha=lr * max(1, m / n) ** 0.5)


class ZeroInference__begins_both(ShardedModel):
    """Both gathers are under way before the first is waited for."""

    def enter(self, unit, module, inputs, kwargs):
        unit.begin_gather()
        place = self.place_in_order(unit)
        self.prefetch(place + 1)
        unit.end_gather()

    def leave(self, unit, module, inputs, outputs):
        unit.free()


class ZeroInference__by_its_own_list(ShardedModel):
    """Looks the next unit up itself, and starts its gather without prefetch()."""

    def enter(self, unit, module, inputs, kwargs):
        unit.end_gather()
        following = self.order[self.place_in_order(unit) + 1 :][:1]
        for each in following:
            each.begin_gather()
        return inputs, kwargs

    def leave(self, unit, module, inputs, outputs):
        for shards in unit.shards:
            shards.reshard()


class ZeroInference__like_training(ShardedModel):
    """As ZeroStage3 does it, without a look at whether a backward runs."""

    enter, leave = ZeroStage3.enter, ZeroStage3.leave
    backward_of, backward_done = ZeroStage3.backward_of, ZeroStage3.backward_done
