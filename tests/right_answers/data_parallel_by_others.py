"""Lab 03: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import collections
import contextlib
import functools
import hashlib
import itertools
import math
import torch
import torch.distributed as dist
from ranklab.data_parallel import Replica

def _broadcast(model, src=0, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=src)

def broadcast_parameters__one_by_one(model, src=0, group=None):
    """One broadcast for each tensor; one that is not contiguous travels as a copy."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor = tensor.detach()
        if tensor.is_contiguous():
            dist.broadcast(tensor, group=group, group_src=src)
        else:
            copy = tensor.contiguous()
            dist.broadcast(copy, group=group, group_src=src)
            tensor.copy_(copy)

def broadcast_parameters__flat(model, src=0, group=None):
    """One flat message for each type and device, by the global rank, over state found by id."""
    src = dist.get_global_rank(group if group is not None else dist.group.WORLD, src)
    kinds, seen = {}, set()
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for tensors in kinds.values():
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.broadcast(flat, src, group=group)
            for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
                t.copy_(part.view(t.shape))

def shard_sampler__cycle(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """randperm, and itertools.cycle to repeat the beginning."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be between 0 and ranks - 1 = {ranks - 1}")
    if n < 1:
        raise ValueError(f"n={n} samples must be at least 1")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    each = n // ranks if drop_last else -(-n // ranks)
    return list(itertools.islice(itertools.cycle(order), rank, each * ranks, ranks))

def shard_sampler__of_torch(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """torch's DistributedSampler itself."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be between 0 and ranks - 1 = {ranks - 1}")
    if n < 1:
        raise ValueError(f"n={n} samples must be at least 1")
    sampler = torch.utils.data.DistributedSampler(range(n), ranks, rank, seed=seed,
                                                  drop_last=drop_last)
    sampler.set_epoch(epoch)
    return list(sampler)

def average_gradients__one_by_one(model, group=None):
    """Divide, then one all-reduce for each parameter, in place where that is possible."""
    R = dist.get_world_size(group)
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            message = p.grad.contiguous()
            message /= R
            dist.all_reduce(message, group=group)
            if message is not p.grad:
                p.grad.copy_(message)

def average_gradients__flat(model, group=None):
    """One flat message for each type, divided after the sum; new gradients."""
    R = dist.get_world_size(group)
    kinds = collections.defaultdict(list)
    for p in model.parameters():
        if p.requires_grad:
            kinds[p.dtype, p.device].append(p)
    for parameters in kinds.values():
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                          for p in parameters])
        dist.all_reduce(flat, group=group)
        flat = flat / R
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = part.view(p.shape)

def assign_buckets__one_pass(parameters, bucket_cap_bytes):
    """One pass from the last, dict of open ones."""
    if bucket_cap_bytes < 1:
        raise ValueError(f"bucket_cap_bytes={bucket_cap_bytes} must be at least 1")
    closed, still_open = [], {}
    for p in reversed(list(parameters)):
        key = p.dtype, p.device
        bucket = still_open.setdefault(key, [])
        bucket.append(p)
        if sum(q.numel() * q.element_size() for q in bucket) >= bucket_cap_bytes:
            closed.append(still_open.pop(key))
    return closed + list(still_open.values())

def assign_buckets__kind_by_kind(parameters, bucket_cap_bytes):
    """Each kind for itself, with the times of opening and closing; then a sort by these."""
    if bucket_cap_bytes < 1:
        raise ValueError(f"bucket_cap_bytes={bucket_cap_bytes} must be at least 1")
    line = list(enumerate(list(parameters)[::-1]))
    found = []
    for kind in {(p.dtype, p.device) for _, p in line}:
        bucket, size, opened = [], 0, None
        for i, p in line:
            if (p.dtype, p.device) != kind:
                continue
            opened = i if not bucket else opened
            bucket.append(p)
            size += p.nbytes
            if size >= bucket_cap_bytes:
                found.append(((0, i), bucket))
                bucket, size = [], 0
        if bucket:
            found.append(((1, opened), bucket))
    return [bucket for _, bucket in sorted(found, key=lambda pair: pair[0])]

class OverlappedDataParallel__divide_before(Replica):
    """Divides before the all-reduce, a list of handles."""

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)  # makes buckets
        self.waiting, self.works = list(self.buckets), []  # not yet sent; handles of those sent
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = functools.partial(self.gradient_ready, bucket)
                parameter.register_post_accumulate_grad_hook(hook)

    def gradient_ready(self, bucket, parameter):
        """Called by autograd as soon as it has added to parameter.grad."""
        if self.sync:
            self.backward_begins()
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            bucket.missing.remove(parameter)
            self.launch_ready_buckets()

    def launch_ready_buckets(self):
        """All buckets are on their way, up to the first one that is not ready."""
        while self.waiting and not self.waiting[0].missing:
            self.works.append(self.reduce(self.waiting.pop(0)))

    def reduce(self, bucket):
        """The bucket is on its way to become the mean over ranks; returns the handle."""
        bucket.gather()
        bucket.flat /= dist.get_world_size(self.group)
        return dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def finish(self):
        """All gradients are averaged, and the next backward begins like the first one. Buckets that
        are left travel too, with zeros for missing gradients, even before an error, because other
        ranks wait for them.
        """
        missing = {parameter for bucket in self.waiting for parameter in bucket.missing}
        for bucket in self.waiting:
            self.works.append(self.reduce(bucket))
        used = self.used_anywhere() if self.find_unused_parameters else ()
        for work in self.works:
            work.wait()
        for bucket in self.buckets:
            bucket.fill_none(used)
            bucket.missing = set(bucket.parameters)
        self.waiting, self.works = list(self.buckets), []
        if missing and not self.find_unused_parameters:
            raise self.no_gradient(missing)

class _Mean:
    """A handle whose wait() also divides."""

    def __init__(self, work, flat, R):
        self.work, self.flat, self.R = work, flat, R

    def wait(self):
        self.work.wait()
        self.flat.div_(self.R)

class OverlappedDataParallel__divide_after(Replica):
    """Sums, and the handle's wait() divides; takewhile instead of popping one by one."""

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)  # makes buckets
        self.waiting, self.works = list(self.buckets), []  # not yet sent; handles of those sent
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = functools.partial(self.gradient_ready, bucket)
                parameter.register_post_accumulate_grad_hook(hook)

    def gradient_ready(self, bucket, parameter):
        """Called by autograd as soon as it has added to parameter.grad."""
        if self.sync:
            self.backward_begins()
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self.launch_ready_buckets()

    def launch_ready_buckets(self):
        """All buckets are on their way, up to the first one that is not ready."""
        ready = list(itertools.takewhile(lambda bucket: not bucket.missing, self.waiting))
        self.waiting = self.waiting[len(ready):]
        self.works += [self.reduce(bucket) for bucket in ready]

    def reduce(self, bucket):
        """The bucket is on its way to become the mean over ranks; returns the handle."""
        bucket.gather()
        work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        return _Mean(work, bucket.flat, dist.get_world_size(self.group))

    def finish(self):
        """All gradients are averaged, and the next backward begins like the first one. Buckets that
        are left travel too, with zeros for missing gradients, even before an error, because other
        ranks wait for them.
        """
        missing = {parameter for bucket in self.waiting for parameter in bucket.missing}
        while self.waiting:
            self.waiting[0].missing.clear()
            self.launch_ready_buckets()
        used = set()
        if self.find_unused_parameters:
            used = self.used_anywhere()
        while self.works:
            self.works.pop(0).wait()
        if self.find_unused_parameters:
            for bucket in self.buckets:
                bucket.fill_none(used)
        for bucket in self.buckets:
            bucket.missing.update(bucket.parameters)
            self.waiting.append(bucket)
        if missing and not self.find_unused_parameters:
            raise self.no_gradient(missing)

def replicas_agree__max(model, group=None):
    """MAX of (h, -h)."""
    digest, device = hashlib.blake2b(digest_size=7), "cpu"  # 56 bits: an int64 and its negative
    for parameter in model.parameters():
        device = parameter.device
        content = parameter.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(content.cpu().numpy())
    number = int.from_bytes(digest.digest(), "big")
    pair = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(pair, dist.ReduceOp.MAX, group)
    largest, smallest = pair.tolist()
    return largest == -smallest

def replicas_agree__min(model, group=None):
    """MIN of (h, a large number - h)."""
    digest, device = hashlib.blake2b(digest_size=7), "cpu"  # 56 bits: an int64 and its negative
    for parameter in model.parameters():
        device = parameter.device
        content = parameter.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(content.cpu().numpy())
    number = int.from_bytes(digest.digest(), "big")
    pair = torch.tensor([number, 2**56 - number], device=device)
    dist.all_reduce(pair, op=dist.ReduceOp.MIN, group=group)
    return pair.sum().item() == 2**56

@contextlib.contextmanager
def no_sync__finally(model):
    """try, finally, and the old value."""
    before, model.sync = model.sync, False
    try:
        yield
    finally:
        model.sync = before

@contextlib.contextmanager
def no_sync__stack(model):
    """An ExitStack puts the old value back."""
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, model, "sync", model.sync)
        model.sync = False
        yield model

def scale_learning_rate__line(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """A line between the two rates."""
    if batch < 1 or base_batch < 1 or warmup < 0:
        raise ValueError(f"batch={batch} and base_batch={base_batch} must be at least 1, and "
                         f"warmup={warmup} at least 0")
    powers = {"linear": 1, "sqrt": 0.5}
    if rule not in powers:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(powers)}")
    scaled = lr * (batch / base_batch) ** powers[rule]
    if step is None or step >= warmup:
        return scaled
    return lr + (scaled - lr) * step / warmup

def scale_learning_rate__factor(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """A factor between 1 and k; the root by math.sqrt."""
    if batch < 1 or base_batch < 1 or warmup < 0:
        raise ValueError(f"batch={batch} and base_batch={base_batch} must be at least 1, and "
                         f"warmup={warmup} at least 0")
    powers = {"linear": 1, "sqrt": 0.5}
    if rule not in powers:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(powers)}")
    k = batch / base_batch if rule == "linear" else math.sqrt(batch / base_batch)
    part = 1.0 if step is None or warmup == 0 else min(step / warmup, 1.0)
    return lr * ((1 - part) + k * part)

def sync_batch_norm__sums(x, weight, bias, eps=1e-5, group=None, running=None):
    """Sums and squares as in the text."""
    if x.dim() < 2 or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        raise ValueError(f"x {tuple(x.shape)} must be (B, C, ...), and weight and bias (C,), not "
                         f"{tuple(weight.shape)} and {tuple(bias.shape)}")
    dims = [dim for dim in range(x.dim()) if dim != 1]  # all but the channels
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]  # (C,) -> (1, C, 1, ...)

    class NormaliseOverRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            C, wide = x.shape[1], x.double()
            count = wide.new_tensor([x.numel() // C])
            sums = torch.cat([wide.sum(dims), wide.square().sum(dims), count])
            dist.all_reduce(sums, group=group)
            n = sums[-1]
            mean, square = (sums[:-1] / n).chunk(2)
            variance = (square - mean.square()).clamp(min=0)
            scale = (variance + eps).rsqrt()
            if x.numel() <= C and n < 2:  # in this order: reading n waits for the device
                raise ValueError(f"n={n:.0f} values in a channel of all ranks must be at least 2")
            if running:
                running_mean, running_variance, momentum = running
                running_mean += momentum * (mean - running_mean)
                running_variance += momentum * (variance * n / (n - 1) - running_variance)
            ctx.save_for_backward(x, weight, mean, scale, n)
            normal = (wide - mean.view(shape)) * scale.view(shape)
            return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, scale, n = ctx.saved_tensors
            normal = (x.double() - mean.view(shape)) * scale.view(shape)
            local_sums = torch.cat([grad.double().sum(dims), (grad * normal).sum(dims)])  # (2 C,)
            means = local_sums / n
            dist.all_reduce(means, group=group)
            first, second = means.chunk(2)
            x_grad = (weight * scale).view(shape) * (
                grad - first.view(shape) - normal * second.view(shape))
            bias_grad, weight_grad = local_sums.to(weight.dtype).chunk(2)
            return x_grad.to(x.dtype), weight_grad, bias_grad

    return NormaliseOverRanks.apply(x, weight, bias)

def sync_batch_norm__var_mean(x, weight, bias, eps=1e-5, group=None, running=None):
    """Local mean and variance first, sums from them, in another order; 1 / sqrt, addcmul."""
    if x.dim() < 2 or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        raise ValueError(f"x {tuple(x.shape)} must be (B, C, ...), and weight and bias (C,), not "
                         f"{tuple(weight.shape)} and {tuple(bias.shape)}")
    dims = [dim for dim in range(x.dim()) if dim != 1]  # all but the channels
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]  # (C,) -> (1, C, 1, ...)

    class NormaliseOverRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            C, wide = x.shape[1], x.double()
            count = wide.new_tensor([x.numel() // C])
            message = wide.new_zeros(2 * C + 1)
            if x.numel():
                line = wide.transpose(0, 1).reshape(C, -1)
                local = line.mean(1)
                spread = ((line - local[:, None]) ** 2).mean(1)
                message[0] = count[0]
                message[1:C + 1] = count * local
                message[C + 1:] = count * (spread + local ** 2)
            dist.all_reduce(message, op=dist.ReduceOp.SUM, group=group)
            n = message[:1]
            mean = message[1:C + 1] / n
            variance = (message[C + 1:] / n - mean * mean).clamp(min=0)
            scale = 1 / torch.sqrt(variance + eps)
            if x.numel() <= C and n < 2:  # in this order: reading n waits for the device
                raise ValueError(f"n={n.item():.0f} values in a channel must be at least 2")
            if running:
                running_mean, running_variance, momentum = running
                running_mean += momentum * (mean - running_mean)
                running_variance += momentum * (variance * n / (n - 1) - running_variance)
            ctx.save_for_backward(x, weight, mean, scale, n)
            normal = (wide - mean.view(shape)) * scale.view(shape)
            return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, scale, n = ctx.saved_tensors
            normal = (x.double() - mean.view(shape)) * scale.view(shape)
            local_sums = torch.cat([grad.double().sum(dims), (grad * normal).sum(dims)])  # (2 C,)
            C = x.shape[1]
            total = local_sums.clone()
            work = dist.all_reduce(total, group=group, async_op=True)
            factor = (weight.double() * scale).view(shape)
            x_grad = factor * grad.double()
            work.wait()
            x_grad -= factor * total[:C].view(shape) / n
            x_grad = torch.addcmul(x_grad, normal, factor * total[C:].view(shape) / n, value=-1)
            bias_grad, weight_grad = local_sums.to(weight.dtype).chunk(2)
            return x_grad.to(x.dtype), weight_grad, bias_grad

    return NormaliseOverRanks.apply(x, weight, bias)

def join_uneven__max(batches, model):
    """MAX of rank + 1, or 0 without a batch."""
    batches, rank, last = iter(batches), dist.get_rank(model.group), 0
    device = next(model.parameters()).device
    try:
        model.joining = True  # it refuses no_sync and SyncBatchNorm meanwhile
        while True:
            batch = next(batches, None)  # one at a time: perhaps they don't fit in memory
            number = torch.tensor([0 if batch is None else rank + 1], device=device)
            dist.all_reduce(number, dist.ReduceOp.MAX, group=model.group)
            if not number:
                break
            last = int(number) - 1
            model.buffers_from = last
            if batch is None:
                model.shadow()
            else:
                yield batch
        _broadcast(model.module, last, model.group)
    finally:  # also when the loop was left early
        model.joining, model.buffers_from = False, 0

def join_uneven__bits(batches, model):
    """SUM of one bit for each rank; the lowest rank that has a batch gives the buffers."""
    batches, rank, last = iter(batches), dist.get_rank(model.group), 0
    device = next(model.parameters()).device
    try:
        model.joining = True  # it refuses no_sync and SyncBatchNorm meanwhile
        while True:
            batch = next(batches, None)  # one at a time: perhaps they don't fit in memory
            bits = torch.full((), (batch is not None) << rank, dtype=torch.int64, device=device)
            dist.all_reduce(bits, group=model.group)
            bits = bits.item()
            if bits == 0:
                break
            model.buffers_from = last = (bits & -bits).bit_length() - 1
            if batch is not None:
                yield batch
            else:
                model.shadow()
        _broadcast(model.module, last, model.group)
    finally:  # also when the loop was left early
        model.joining, model.buffers_from = False, 0
