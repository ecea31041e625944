"""Lab 03: mistakes that earlier checks let through, or named wrongly.

The first line of each docstring is a pattern that the check's output must hold.
"""

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
