"""Lab 03: mistakes that earlier checks let through, or named wrongly.

The first line of each docstring is a pattern that the check's output must hold.
"""

import contextlib
import hashlib

import torch
import torch.distributed as dist

from ranklab.data_parallel import Replica, broadcast_parameters

# --- broadcast_parameters -----------------------------------------------------------------------


def _tensors(model):
    return [t.detach() for t in [*model.parameters(), *model.buffers()]]


def broadcast_parameters__copies_of_what_is_channels_last(model, src=0, group=None):
    """It is channels-last"""
    for t in _tensors(model):
        dist.broadcast(t.contiguous(), group=group, group_src=src)


def broadcast_parameters__never_waits(model, src=0, group=None):
    """nobody has waited for \\d+ of its \\d+ broadcasts"""
    for t in _tensors(model):
        dist.broadcast(t, group=group, group_src=src, async_op=True)


def broadcast_parameters__waits_for_the_last_one(model, src=0, group=None):
    """not for the last alone"""
    for t in _tensors(model):
        work = dist.broadcast(t, group=group, group_src=src, async_op=True)
    work.wait()


def broadcast_parameters__no_whole_numbers(model, src=0, group=None):
    """Whole numbers travel like the others"""
    for t in _tensors(model):
        if t.is_floating_point():
            dist.broadcast(t, group=group, group_src=src)


def broadcast_parameters__autograd_sees_it(model, src=0, group=None):
    """Autograd must not see the message"""
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t, group=group, group_src=src)


# --- average_gradients --------------------------------------------------------------------------


def _with_gradients(parameters):
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            yield p


def average_gradients__copies_of_what_is_channels_last(model, group=None):
    """which is channels-last"""
    for p in _with_gradients(model.parameters()):
        p.grad /= dist.get_world_size(group)
        dist.all_reduce(p.grad.contiguous(), group=group)


def average_gradients__in_one_buffer_by_memory(model, group=None):
    """which is channels-last"""
    for p in _with_gradients(model.parameters()):
        flat = p.grad.reshape(-1)
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)


def average_gradients__waits_for_the_last_one(model, group=None):
    """nobody has waited for \\d+ of its \\d+ all-reduces"""
    for p in _with_gradients(model.parameters()):
        p.grad /= dist.get_world_size(group)
        work = dist.all_reduce(p.grad, group=group, async_op=True)
    work.wait()


def average_gradients__divides_under_way(model, group=None):
    """divided while they travelled"""
    works = []
    for p in _with_gradients(model.parameters()):
        works.append(dist.all_reduce(p.grad, group=group, async_op=True))
        p.grad /= dist.get_world_size(group)
    for work in works:
        work.wait()


def average_gradients__tied_ones_twice(model, group=None):
    """The tied weight travels twice"""
    every = [p for _, p in model.named_parameters(remove_duplicate=False)]
    for p in _with_gradients(every):
        p.grad /= dist.get_world_size(group)
        dist.all_reduce(p.grad, group=group)


def average_gradients__one_zero_for_each_shape(model, group=None):
    """is not the mean over ranks"""
    zeros = {}
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = zeros.setdefault((p.shape, p.dtype), torch.zeros_like(p))
            p.grad /= dist.get_world_size(group)
            dist.all_reduce(p.grad, group=group)


def average_gradients__buffers_kept_by_size(model, group=None, kept={}):
    """is not the mean over ranks"""
    for i, p in enumerate(_with_gradients(model.parameters())):
        buffer = kept.setdefault((i, p.shape), torch.zeros_like(p))
        buffer.copy_(p.grad / dist.get_world_size(group))
        dist.all_reduce(buffer, group=group)
        p.grad = buffer


# --- OverlappedDataParallel ---------------------------------------------------------------------


class _Overlapped(Replica):
    """Right; each mistake replaces one of its parts. (The library's own is hidden in a check.)"""

    def __init__(self, module, cap_bytes=25 * 2**20, group=None, find_unused=False):
        super().__init__(module, cap_bytes, group, find_unused)
        self.waiting, self.works = list(self.buckets), []
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(
                    lambda p, bucket=bucket: self.gradient_ready(bucket, p))

    def gradient_ready(self, bucket, parameter):
        if self.sync:
            self.backward_begins()
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            bucket.missing.remove(parameter)
            self.launch_ready_buckets()

    def launch_ready_buckets(self):
        while self.waiting and not self.waiting[0].missing:
            bucket = self.waiting.pop(0)
            bucket.gather()
            self.launch(bucket)

    def launch(self, bucket):
        bucket.flat /= dist.get_world_size(self.group)
        self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))

    def finish(self):
        missing = {p for bucket in self.waiting for p in bucket.missing}
        for bucket in self.waiting:
            bucket.missing.clear()
        self.launch_ready_buckets()
        used = self.used_anywhere() if self.find_unused else ()
        for work in self.works:
            work.wait()
        for bucket in self.buckets:
            bucket.fill_none(used)
            bucket.missing = set(bucket.parameters)
        self.waiting, self.works = list(self.buckets), []
        if missing and not self.find_unused:
            raise self.no_gradient(missing)


class OverlappedDataParallel__takes_a_second_gradient(_Overlapped):
    """gets two gradients in one backward, and no error comes"""

    def gradient_ready(self, bucket, parameter):
        if self.sync:
            self.backward_begins()
            bucket.missing.discard(parameter)
            self.launch_ready_buckets()


class OverlappedDataParallel__backward_begins_unseen(_Overlapped):
    """Leave self.backward_begins"""

    def gradient_ready(self, bucket, parameter):
        if self.sync:
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            bucket.missing.remove(parameter)
            self.launch_ready_buckets()


class OverlappedDataParallel__find_unused_sends_at_the_end(_Overlapped):
    """with find_unused, no bucket leaves before"""

    def gradient_ready(self, bucket, parameter):
        if self.find_unused and self.sync:
            self.backward_begins()
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            bucket.missing.remove(parameter)
        else:
            super().gradient_ready(bucket, parameter)


class OverlappedDataParallel__divides_under_way(_Overlapped):
    """divided while they travelled"""

    def launch(self, bucket):
        self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))
        bucket.flat /= dist.get_world_size(self.group)


# --- no_sync ------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_sync__kept_on_the_model(model):
    """in a variable of its own"""
    model.before, model.sync = model.sync, False
    try:
        yield
    finally:
        model.sync = model.before


@contextlib.contextmanager
def no_sync__one_depth_for_all_models(model, depth=[0]):
    """Each model has its own"""
    depth[0] += 1
    model.sync = False
    try:
        yield
    finally:
        depth[0] -= 1
        model.sync = depth[0] == 0


# --- sync_batch_norm, scale_learning_rate, join_uneven, replicas_agree --------------------------


def _sync_batch_norm(x, weight, bias, eps, group, running, sum_of, kept=None):
    over = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    if weight.shape != x.shape[1:2]:
        raise ValueError("weight must be (C,)")

    class Normalise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            C, wide = x.shape[1], x.double()
            sums = sum_of(torch.cat([wide.sum(over), wide.square().sum(over),
                                     wide.new_tensor([x.numel() // C])]), group, "forward")
            n = sums[-1]
            mean, square = (sums[:-1] / n).split(C)
            variance = (square - mean.square()).clamp(min=0)
            scale = (variance + eps).rsqrt()
            if running:
                running[0].add_(running[2] * (mean - running[0]))
                running[1].add_(running[2] * (variance * n / (n - 1) - running[1]))
            ctx.save_for_backward(x, weight, mean, scale, n)
            if kept is not None:
                kept[C] = mean, scale, n
            normal = (wide - mean.view(shape)) * scale.view(shape)
            return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, scale, n = ctx.saved_tensors
            mean, scale, n = (mean, scale, n) if kept is None else kept[x.shape[1]]
            normal = (x.double() - mean.view(shape)) * scale.view(shape)
            mine = torch.cat([grad.double().sum(over), (grad * normal).sum(over)])
            sums = sum_of(mine.clone(), group, "backward")
            by_mean, by_variance = (part.view(shape) for part in (sums / n).chunk(2))
            of_x = (grad - by_mean - normal * by_variance) * (scale * weight).view(shape)
            of_bias, of_weight = mine.to(weight.dtype).chunk(2)
            return of_x.to(x.dtype), of_weight, of_bias

    return Normalise.apply(x, weight, bias)


def _all_reduced(x, group, way):
    dist.all_reduce(x, group=group)
    return x


def _all_gathered(x, group, way):
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x, group=group)
    return sum(every)


def _padded_backward(x, group, way):
    padded = torch.cat([x, x.new_zeros(100 if way == "backward" else 0)])
    dist.all_reduce(padded, group=group)
    return padded[: x.numel()]


def sync_batch_norm__by_all_gather(x, weight, bias, eps=1e-5, group=None, running=None):
    """An all-reduce adds up under way"""
    return _sync_batch_norm(x, weight, bias, eps, group, running, _all_gathered)


def sync_batch_norm__more_bytes_in_backward(x, weight, bias, eps=1e-5, group=None, running=None):
    """bytes in backward; 48 are enough"""
    return _sync_batch_norm(x, weight, bias, eps, group, running, _padded_backward)


def sync_batch_norm__the_last_ones_statistics(x, weight, bias, eps=1e-5, group=None, running=None,
                                              kept={}):
    """the gradient of x is off"""
    return _sync_batch_norm(x, weight, bias, eps, group, running, _all_reduced, kept)


def scale_learning_rate__min_ends_the_warmup(lr, batch, base_batch, step=None, warmup=0,
                                             rule="linear"):
    """min\\(\\) takes the end at once"""
    if batch < 1 or base_batch < 1 or warmup < 0 or rule not in ("linear", "sqrt"):
        raise ValueError(rule)
    scaled = lr * (batch / base_batch) ** (1 if rule == "linear" else 0.5)
    if step is None or not warmup:
        return scaled
    return min(scaled, lr + (scaled - lr) * step / warmup)


def join_uneven__asks_whether_a_batch_is_true(batches, model):
    """`batch is None`, not `if batch`"""
    batches, rank, last = iter(batches), dist.get_rank(model.group), 0
    try:
        model.joining = True
        while True:
            batch = next(batches, None)
            going_on = torch.tensor(rank if batch else -1)
            dist.all_reduce(going_on, dist.ReduceOp.MAX, group=model.group)
            if going_on < 0:
                break
            model.buffers_from = last = going_on.item()
            if batch:
                yield batch
            else:
                model.shadow()
        broadcast_parameters(model.module, last, model.group)
    finally:
        model.joining, model.buffers_from = False, 0


def replicas_agree__by_all_gather(model, group=None):
    """one all-reduce is enough"""
    digest = hashlib.blake2b(digest_size=7)
    for p in model.parameters():
        digest.update(p.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
    mine = torch.tensor([int.from_bytes(digest.digest(), "big")])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return all(one.item() == mine.item() for one in every)
