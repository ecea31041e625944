"""Lab 03, what runs in a step once more: right in the plain case, wrong at an edge.

The first line of each docstring is a pattern that the check's output must hold.
"""

import functools

import torch
import torch.distributed as dist

from ranklab.data_parallel import Replica

# --- OverlappedDataParallel ---------------------------------------------------------------------


class _Overlapped(Replica):
    """Right; each mistake replaces one of its parts."""

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
            self.launch_ready_buckets(bucket)

    def launch_ready_buckets(self, _=None):
        while self.waiting and not self.waiting[0].missing:
            self.launch(self.waiting.pop(0))

    def launch(self, bucket):
        bucket.gather()
        bucket.flat /= dist.get_world_size(self.group)
        self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))

    def launch_the_rest(self):
        missing = set()
        while self.waiting:
            missing |= self.waiting[0].missing
            self.launch(self.waiting.pop(0))
        return missing

    def ask(self, _):
        return self.used_anywhere() if self.find_unused else ()

    def wait(self):
        for work in self.works:
            work.wait()

    def start_anew(self, used):
        for bucket in self.buckets:
            bucket.fill_none(used)
            bucket.missing = set(bucket.parameters)
        self.waiting, self.works = list(self.buckets), []

    def finish(self):
        missing = self.launch_the_rest()
        used = self.ask(missing)
        self.wait()
        self.start_anew(used)
        if missing and not self.find_unused:
            raise self.no_gradient(missing)


class OverlappedDataParallel__at_most_one_leaves(_Overlapped):
    """leaves right behind the one that it has waited for"""

    def launch_ready_buckets(self, _=None):
        if self.waiting and not self.waiting[0].missing:
            self.launch(self.waiting.pop(0))


class OverlappedDataParallel__only_the_hooks_own_bucket(_Overlapped):
    """whichever bucket this hook was for"""

    def launch_ready_buckets(self, bucket=None):
        if not bucket.missing and self.waiting[0] is bucket:
            self.launch(self.waiting.pop(0))


class OverlappedDataParallel__always_asks(_Overlapped):
    """ask only with find_unused"""

    def ask(self, _):
        return self.used_anywhere()


class OverlappedDataParallel__asks_where_something_is_missing(_Overlapped):
    """also those that miss nothing"""

    def ask(self, missing):
        return self.used_anywhere() if self.find_unused and missing else ()


class OverlappedDataParallel__asks_before_the_rest_leaves(_Overlapped):
    """With find_unused all ranks then call|comes after the last bucket"""

    def finish(self):
        used = self.ask(())
        self.ask = lambda missing: used
        super().finish()
        del self.ask


class OverlappedDataParallel__asks_for_each_bucket(_Overlapped):
    """ask once, then fill all buckets"""

    def ask(self, _):
        return [self.used_anywhere() for _ in self.buckets][0] if self.find_unused else ()


class OverlappedDataParallel__waits_before_the_rest_leaves(_Overlapped):
    """first launch what is left, and then wait"""

    def launch_the_rest(self):
        super().wait()
        return super().launch_the_rest()

    def wait(self):
        pass  # done, it thinks


class OverlappedDataParallel__raises_before_the_reset(_Overlapped):
    """Raise last"""

    def wait(self):
        super().wait()
        missing = {p for bucket in self.buckets for p in bucket.missing}
        if missing and not self.find_unused:
            raise self.no_gradient(missing)


class OverlappedDataParallel__missing_is_who_has_none(_Overlapped):
    """and no error comes"""

    def launch_the_rest(self):
        super().launch_the_rest()
        return {p for bucket in self.buckets for p in bucket.parameters if p.grad is None}


class OverlappedDataParallel__raises_with_find_unused(_Overlapped):
    """raise only where self.find_unused is False"""

    def finish(self):
        missing = {p for bucket in self.waiting for p in bucket.missing}
        super().finish()
        if missing:
            raise self.no_gradient(missing)
