"""Lab 03, what runs in a step: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

import contextlib
import functools

import torch
import torch.distributed as dist

from ranklab.data_parallel import Replica, broadcast_parameters

# --- OverlappedDataParallel ---------------------------------------------------------------------


class _Overlapped(Replica):
    """Right; each mistake replaces one of its parts. (The library's own is hidden in a check.)"""

    def __init__(self, module, cap_bytes=25 * 2**20, group=None, find_unused=False):
        super().__init__(module, cap_bytes, group, find_unused)
        self.waiting, self.works = list(self.buckets), []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = functools.partial(self.gradient_ready, bucket)
                parameter.register_post_accumulate_grad_hook(hook)

    def gradient_ready(self, bucket, parameter):
        if self.sync:
            self.backward_begins()
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            bucket.missing.remove(parameter)
            self.launch_ready_buckets()

    def launch_ready_buckets(self):
        while self.waiting and not self.waiting[0].missing:
            self.launch(self.waiting.pop(0))

    def launch(self, bucket, async_op=True):
        bucket.gather()
        bucket.flat /= dist.get_world_size(self.group)
        self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=async_op))

    def finish(self):
        missing = self.launch_the_rest()
        used = self.used_anywhere() if self.find_unused else ()
        self.wait()
        self.start_anew(used)
        if missing and not self.find_unused:
            raise self.no_gradient(missing)

    def launch_the_rest(self):
        missing = {parameter for bucket in self.waiting for parameter in bucket.missing}
        for bucket in self.waiting:
            bucket.missing.clear()
        self.launch_ready_buckets()
        return missing

    def wait(self):
        for work in self.works:
            work.wait()

    def start_anew(self, used):
        for bucket in self.buckets:
            bucket.fill_none(used)
            bucket.missing = set(bucket.parameters)
        self.waiting, self.works = list(self.buckets), []


class OverlappedDataParallel__the_sum(_Overlapped):
    """is the sum, 3 times the mean"""

    def launch(self, bucket):
        bucket.gather()
        self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))


class OverlappedDataParallel__divides_twice(_Overlapped):
    """Divide once"""

    def wait(self):
        super().wait()
        for bucket in self.buckets:
            bucket.flat /= dist.get_world_size(self.group)


class OverlappedDataParallel__the_weights(_Overlapped):
    """The hook gets the parameter, not its gradient"""

    def gradient_ready(self, bucket, parameter):
        self.backward_begins()
        parameter.data /= dist.get_world_size(self.group)
        self.works.append(dist.all_reduce(parameter.data, group=self.group, async_op=True))

    def finish(self):
        self.wait()
        self.works = []


class OverlappedDataParallel__one_message_for_each_parameter(_Overlapped):
    """Each bucket travels once, whole"""

    def gradient_ready(self, bucket, parameter):
        if self.sync:
            self.backward_begins()
            bucket.missing.remove(parameter)
            parameter.grad /= dist.get_world_size(self.group)
            self.works.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))

    def finish(self):
        self.wait()
        self.start_anew(())


class OverlappedDataParallel__never_gathered(_Overlapped):
    """is this rank's own"""

    def launch(self, bucket):
        bucket.flat /= dist.get_world_size(self.group)
        self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))


class OverlappedDataParallel__of_a_copy(_Overlapped):
    """all-reduce bucket.flat, in place"""

    def launch(self, bucket):
        bucket.gather()
        mean = bucket.flat / dist.get_world_size(self.group)
        self.works.append(dist.all_reduce(mean, group=self.group, async_op=True))


class OverlappedDataParallel__first_gradient_launches(_Overlapped):
    """only when nothing of it is missing"""

    def launch_ready_buckets(self):
        while self.waiting and len(self.waiting[0].missing) < len(self.waiting[0].parameters):
            self.launch(self.waiting.pop(0))

    def launch_the_rest(self):
        return set()


class OverlappedDataParallel__stands_still(_Overlapped):
    """without async_op=True"""

    def launch(self, bucket):
        super().launch(bucket, async_op=False)

    def wait(self):
        self.works = []


class OverlappedDataParallel__waits_for_each(_Overlapped):
    """while layers are still to be computed: no overlap"""

    def launch(self, bucket):
        super().launch(bucket)
        self.works[-1].wait()


class OverlappedDataParallel__all_at_the_end(_Overlapped):
    """no bucket leaves before the backward of all layers is over"""

    def gradient_ready(self, bucket, parameter):
        if self.sync:
            self.backward_begins()
            bucket.missing.remove(parameter)


class OverlappedDataParallel__nobody_waits(_Overlapped):
    """until then a gradient may be half summed"""

    def wait(self):
        pass


class OverlappedDataParallel__as_they_become_ready(_Overlapped):
    """Launch bucket 0, then 1, then 2|buckets leave in the order"""

    def launch_ready_buckets(self):
        for bucket in [bucket for bucket in self.waiting if not bucket.missing]:
            self.waiting.remove(bucket)
            self.launch(bucket)


class OverlappedDataParallel__no_sync_ignored(_Overlapped):
    """Look at self.sync first"""

    def gradient_ready(self, bucket, parameter):
        before, self.sync = self.sync, True
        super().gradient_ready(bucket, parameter)
        self.sync = before


class OverlappedDataParallel__no_sync_half_ignored(_Overlapped):
    """bucket.missing too|With sync=False the hook must leave"""

    def gradient_ready(self, bucket, parameter):
        bucket.missing.discard(parameter)
        if self.sync:
            self.backward_begins()
            self.launch_ready_buckets()


class OverlappedDataParallel__one_step_only(_Overlapped):
    """bucket.missing must be full again"""

    def start_anew(self, used):
        for bucket in self.buckets:
            bucket.fill_none(used)
        self.waiting, self.works = list(self.buckets), []


class OverlappedDataParallel__zeros_for_everybody(_Overlapped):
    """which no rank used, now has a gradient"""

    def start_anew(self, used):
        super().start_anew({p for bucket in self.buckets for p in bucket.parameters})


class OverlappedDataParallel__unused_stay_none(_Overlapped):
    """which other ranks used, has no gradient here"""

    def start_anew(self, used):
        super().start_anew(())


class OverlappedDataParallel__unused_by_me_only(_Overlapped):
    """which other ranks used, has no gradient here"""

    def used_anywhere(self):
        super().used_anywhere()
        return {p for bucket in self.buckets for p in bucket.parameters if p.grad is not None}


class OverlappedDataParallel__no_error(_Overlapped):
    """and no error comes"""

    def no_gradient(self, missing):
        return None

    def finish(self):
        self.launch_the_rest()
        used = self.used_anywhere() if self.find_unused else ()
        self.wait()
        self.start_anew(used)


class OverlappedDataParallel__raises_at_once(_Overlapped):
    """before it raises"""

    def finish(self):
        missing = {parameter for bucket in self.waiting for parameter in bucket.missing}
        if missing and not self.find_unused:
            raise self.no_gradient(missing)
        super().finish()


class OverlappedDataParallel__without_the_group(_Overlapped):
    """Hand self.group on to every collective"""

    def launch(self, bucket):
        bucket.gather()
        bucket.flat /= dist.get_world_size(self.group)
        self.works.append(dist.all_reduce(bucket.flat, async_op=True))


class OverlappedDataParallel__divides_by_the_world(_Overlapped):
    """and divide by its size: dist.get_world_size"""

    def launch(self, bucket):
        bucket.gather()
        bucket.flat /= dist.get_world_size()
        self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))


class OverlappedDataParallel__handles_kept(_Overlapped):
    """finish\\(\\) must leave self.works empty"""

    def start_anew(self, used):
        works = self.works
        super().start_anew(used)
        self.works = works


class OverlappedDataParallel__waiting_is_no_copy(_Overlapped):
    """self.waiting must be a copy: list\\(self.buckets\\)"""

    def start_anew(self, used):
        super().start_anew(used)
        self.waiting = self.buckets


class OverlappedDataParallel__no_handle(_Overlapped):
    """all_reduce returns None without async_op=True"""

    def launch(self, bucket):
        super().launch(bucket, async_op=False)


# --- no_sync ------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_sync__not_after_an_error(model):
    """into a `finally`"""
    before, model.sync = model.sync, False
    yield
    model.sync = before


@contextlib.contextmanager
def no_sync__always_on_afterwards(model):
    """Put back what `sync` was before"""
    model.sync = False
    try:
        yield
    finally:
        model.sync = True


@contextlib.contextmanager
def no_sync__stays_off(model):
    """Switch `sync` back on"""
    model.sync = False
    yield


@contextlib.contextmanager
def no_sync__the_wrong_way_round(model):
    """must be False while the block runs"""
    before, model.sync = model.sync, True
    try:
        yield
    finally:
        model.sync = before


def no_sync__a_plain_generator(model):
    """put @contextlib.contextmanager above"""
    before, model.sync = model.sync, False
    try:
        yield
    finally:
        model.sync = before


@contextlib.contextmanager
def no_sync__averages_on_leaving(model):
    """no_sync itself sends nothing"""
    before, model.sync = model.sync, False
    try:
        yield
    finally:
        model.sync = before
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= dist.get_world_size(model.group)
                dist.all_reduce(p.grad, group=model.group)


@contextlib.contextmanager
def no_sync__swallows_errors(model):
    """Leave errors alone"""
    before, model.sync = model.sync, False
    try:
        yield
    except Exception:
        pass
    model.sync = before


@contextlib.contextmanager
def no_sync__starts_from_zero(model):
    """autograd adds them up|Leave the gradients alone"""
    before, model.sync = model.sync, False
    try:
        yield
    finally:
        model.sync = before
        model.zero_grad()


# --- join_uneven --------------------------------------------------------------------------------


def _join(batches, model, share=dist.ReduceOp.MAX, shadow=True, source=True, last=True,
          until_first=False, rank_in=dist.get_rank, everybody=False, last_in=lambda group: group):
    batches, rank, end = iter(batches), rank_in(model.group), 0
    while True:
        batch = next(batches, None)
        going_on = torch.tensor(-1 if batch is None else rank)
        if until_first:
            going_on = torch.tensor(int(batch is not None) - 1)
            share = dist.ReduceOp.MIN
        dist.all_reduce(going_on, share, group=None if everybody else model.group)
        if going_on < 0:
            break
        end = going_on.item()
        if source:
            model.buffers_from = end
        if batch is not None:
            yield batch
        elif shadow:
            model.shadow()
    model.buffers_from = 0
    if last is not None:
        broadcast_parameters(model.module, end if last else 0, last_in(model.group))


def join_uneven__each_for_itself(batches, model):
    """must go on taking part"""
    yield from batches


def join_uneven__until_the_first_is_done(batches, model):
    """Nobody's batches are thrown away"""
    yield from _join(batches, model, until_first=True)


def join_uneven__weights_of_rank_0(batches, model):
    """those of rank 0, when its own batches were over"""
    yield from _join(batches, model, last=False)


def join_uneven__no_broadcast(batches, model):
    """which stepped to the end, has the right ones"""
    yield from _join(batches, model, last=None)


def join_uneven__buffers_of_rank_0(batches, model):
    """the buffers of `model.buffers_from` count"""
    yield from _join(batches, model, source=False)


def join_uneven__rank_in_the_world(batches, model):
    """dist.get_rank\\(model.group\\)"""
    yield from _join(batches, model, rank_in=lambda group: dist.get_rank())


def join_uneven__without_the_group(batches, model):
    """Hand model.group on to every collective"""
    yield from _join(batches, model, everybody=True)


def join_uneven__last_broadcast_without_the_group(batches, model):
    """Hand model.group on to every collective"""
    yield from _join(batches, model, last_in=lambda group: None)


def join_uneven__repeats_the_last_batch(batches, model):
    """it does not repeat a batch"""
    batches = list(batches)
    count = torch.tensor(len(batches))
    dist.all_reduce(count, dist.ReduceOp.MAX, group=model.group)
    for k in range(count):
        yield batches[k % len(batches)] if batches else (9, torch.zeros(4, 6))


def join_uneven__asks_for_the_length(batches, model):
    """A loader may have no length"""
    count = torch.tensor(len(batches))
    dist.all_reduce(count, dist.ReduceOp.MAX, group=model.group)
    for k in range(count):
        if k < len(batches):
            yield batches[k]
        else:
            model.shadow()


def join_uneven__yields_none_too(batches, model):
    """A None was yielded where a batch was expected"""
    batches, rank = iter(batches), dist.get_rank(model.group)
    try:
        model.joining = True
        while True:
            batch = next(batches, None)
            going_on = torch.tensor(-1 if batch is None else rank)
            dist.all_reduce(going_on, dist.ReduceOp.MAX, group=model.group)
            if going_on < 0:
                break
            model.buffers_from = going_on.item()
            if batch is None:
                model.shadow()
            yield batch
    finally:
        model.joining, model.buffers_from = False, 0


def join_uneven__a_function_that_returns(batches, model):
    """It must be a generator"""
    for batch in _join(batches, model):
        return batch


# --- sync_batch_norm ----------------------------------------------------------------------------


def _sum(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _norm(x, weight, bias, eps, group, running, statistics=None, grads=None, keep=None,
          own=lambda sums, group: sums, type=torch.float64):
    """Right; a mistake brings its own `statistics(wide, over, group)` -> mean, variance, n; its
    own `grads(sums, n, own n, group)` -> the two means of backward; `own` makes the gradients of
    weight and bias from this rank's sums; `keep` updates the running statistics.
    """
    over = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]

    class Normalise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            wide = x.to(type)
            mean, variance, n = (statistics or _pooled)(wide, over, group)
            scale = (variance + eps).rsqrt()
            (keep or _keep)(running, mean, variance, n)
            ctx.save_for_backward(x, weight, mean, scale)
            ctx.n = n
            normal = (wide - mean.view(shape)) * scale.view(shape)
            return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, scale = ctx.saved_tensors
            normal = (x.to(type) - mean.view(shape)) * scale.view(shape)
            mine = torch.cat([grad.to(type).sum(over), (grad * normal).sum(over)])
            here = max(1, x.numel() // x.shape[1])
            means = (grads or _means)(mine, ctx.n, here, group)
            by_mean, by_variance = (part.view(shape) for part in means.chunk(2))
            of_x = (grad - by_mean - normal * by_variance) * (scale * weight).view(shape)
            of_bias, of_weight = own(mine, group).to(weight.dtype).chunk(2)
            return of_x.to(x.dtype), of_weight, of_bias

    return Normalise.apply(x, weight, bias)


def _pooled(wide, over, group):
    C = wide.shape[1]
    count = wide.new_tensor([wide.numel() // C])
    sums = _sum(torch.cat([wide.sum(over), wide.square().sum(over), count]), group)
    mean, square = (sums[:-1] / sums[-1]).split(C)
    return mean, (square - mean.square()).clamp(min=0), sums[-1]


def _keep(running, mean, variance, n):
    if running:
        running[0].add_(running[2] * (mean - running[0]))
        running[1].add_(running[2] * (variance * n / (n - 1) - running[1]))


def _means(mine, n, here, group):
    return _sum(mine, group) / n


def sync_batch_norm__own_statistics(x, weight, bias, eps=1e-5, group=None, running=None):
    """these are this rank's own mean and variance"""

    def statistics(wide, over, group):
        return wide.mean(over), wide.var(over, unbiased=False), wide.numel() // wide.shape[1]

    return _norm(x, weight, bias, eps, group, running, statistics)


def sync_batch_norm__mean_of_variances(x, weight, bias, eps=1e-5, group=None, running=None):
    """Variances do not average"""

    def statistics(wide, over, group):
        mean, _, n = _pooled(wide, over, group)
        rows = wide.numel() // wide.shape[1]
        return mean, _sum(wide.var(over, unbiased=False) * rows, group) / n, n

    return _norm(x, weight, bias, eps, group, running, statistics)


def sync_batch_norm__mean_of_means(x, weight, bias, eps=1e-5, group=None, running=None):
    """in one tensor, and divide at the end"""

    def statistics(wide, over, group):
        R, n = dist.get_world_size(group), wide.numel() // wide.shape[1]
        means = _sum(wide.mean(over), group) / R
        return means, _sum(wide.var(over, unbiased=False), group) / R, n * R

    return _norm(x, weight, bias, eps, group, running, statistics)


def sync_batch_norm__own_count(x, weight, bias, eps=1e-5, group=None, running=None):
    """the count must be summed over ranks"""

    def statistics(wide, over, group):
        n = wide.numel() // wide.shape[1]
        if n < 2:  # as the scaffold has it
            raise ValueError(f"n={n:.0f} values in a channel of all ranks must be at least 2")
        mean, square = (_sum(torch.cat([wide.sum(over), wide.square().sum(over)]), group)
                        / n).chunk(2)
        return mean, (square - mean.square()).clamp(min=0), n

    return _norm(x, weight, bias, eps, group, running, statistics)


def sync_batch_norm__divided_by_n_minus_1(x, weight, bias, eps=1e-5, group=None, running=None):
    """For normalising, batch norm divides by n"""

    def statistics(wide, over, group):
        mean, variance, n = _pooled(wide, over, group)
        return mean, variance * n / (n - 1), n

    return _norm(x, weight, bias, eps, group, running, statistics)


def sync_batch_norm__own_sums_in_backward(x, weight, bias, eps=1e-5, group=None, running=None):
    """so their gradients count too"""
    return _norm(x, weight, bias, eps, group, running,
                 grads=lambda mine, n, here, group: mine / here)


def sync_batch_norm__own_count_in_backward(x, weight, bias, eps=1e-5, group=None, running=None):
    """divide by the count of all"""
    return _norm(x, weight, bias, eps, group, running,
                 grads=lambda mine, n, here, group: _sum(mine, group) / here)


def sync_batch_norm__statistics_as_constants(x, weight, bias, eps=1e-5, group=None, running=None):
    """Mean and variance depend on x as well"""
    return _norm(x, weight, bias, eps, group, running,
                 grads=lambda mine, n, here, group: torch.zeros_like(mine))


def sync_batch_norm__autograd_through_all_reduce(x, weight, bias, eps=1e-5, group=None,
                                                 running=None):
    """the gradient of x is off"""
    over = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    wide, C = x.double(), x.shape[1]
    sums = torch.cat([wide.sum(over), wide.square().sum(over), wide.new_tensor([x.numel() // C])])
    total = sums.detach().clone()
    dist.all_reduce(total, group=group)
    sums = sums + (total - sums).detach()  # the values of all ranks, the gradient of this one
    mean, square = (sums[:-1] / total[-1]).split(C)
    variance = square - mean.square()
    _keep(running, mean.detach(), variance.detach(), total[-1])
    scale = (variance + eps).rsqrt()
    normal = (wide - mean.view(shape)) * scale.view(shape)
    return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)


def sync_batch_norm__weight_summed_over_ranks(x, weight, bias, eps=1e-5, group=None, running=None):
    """Data parallelism averages this gradient later"""
    return _norm(x, weight, bias, eps, group, running, own=_sum)


def sync_batch_norm__two_messages(x, weight, bias, eps=1e-5, group=None, running=None):
    """2 collectives in forward"""

    def statistics(wide, over, group):
        n = _sum(wide.new_tensor([wide.numel() // wide.shape[1]]), group)
        mean, square = (_sum(torch.cat([wide.sum(over), wide.square().sum(over)]), group) / n) \
            .chunk(2)
        return mean, (square - mean.square()).clamp(min=0), n

    return _norm(x, weight, bias, eps, group, running, statistics)


def sync_batch_norm__running_variance_by_n(x, weight, bias, eps=1e-5, group=None, running=None):
    """with n - 1, not n"""

    def keep(running, mean, variance, n):
        if running:
            running[0].add_(running[2] * (mean - running[0]))
            running[1].add_(running[2] * (variance - running[1]))

    return _norm(x, weight, bias, eps, group, running, keep=keep)


def sync_batch_norm__running_forgotten(x, weight, bias, eps=1e-5, group=None, running=None):
    """the running mean is off"""
    return _norm(x, weight, bias, eps, group, running, keep=lambda *_: None)


def sync_batch_norm__summed_in_float32(x, weight, bias, eps=1e-5, group=None, running=None):
    """a small difference of two large numbers"""
    return _norm(x, weight, bias, eps, group, running, type=x.dtype)


def sync_batch_norm__without_the_group(x, weight, bias, eps=1e-5, group=None, running=None):
    """Hand `group` on to every collective"""
    return _norm(x, weight, bias, eps, None, running)


def sync_batch_norm__backward_without_the_group(x, weight, bias, eps=1e-5, group=None,
                                                running=None):
    """the gradient of x is not that of their batch"""
    return _norm(x, weight, bias, eps, group, running,
                 grads=lambda mine, n, here, group: _sum(mine, None) / n)


def sync_batch_norm__not_clamped(x, weight, bias, eps=1e-5, group=None, running=None):
    """clamp\\(min=0\\)"""

    def statistics(wide, over, group):
        count = wide.new_tensor([wide.numel() // wide.shape[1]])
        sums = _sum(torch.cat([wide.sum(over), wide.square().sum(over), count]), group)
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        return mean, square - mean.square(), sums[-1]

    return _norm(x, weight, bias, eps, group, running, statistics)
