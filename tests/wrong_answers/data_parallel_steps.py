"""Lab 03, what runs in a step: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

import functools

import torch
import torch.distributed as dist

from ranklab.data_parallel import Replica

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
