"""OverlappedDataParallel: gradients travel while backward still computes the next ones.

Torch's DDP sends the same bytes. It learns the order of its buckets from the first backward; ours
is the reverse of registration. Where layers are registered in the order of use, the two orders
differ only inside a layer (a convolution's weight is ready before its bias), so the borders of
buckets differ as well.
"""

import functools

import torch.distributed as dist

from ranklab.data_parallel.replica import Replica


class OverlappedDataParallel(Replica):
    """`module`, with gradients that are the mean over ranks when backward() returns.

    As soon as all gradients of a bucket are there, their all-reduce begins, and backward goes on
    with the earlier layers. All ranks send their buckets in the same order, whatever the order in
    which they become ready: the first message of one rank meets the first of the others.
    A parameter without gradient is an error; with find_unused_parameters it counts as zeros, at the
    end of backward (torch looks for it in the graph, in forward).
    cost   one all-reduce for each bucket: all gradients once; with find_unused_parameters 4 bytes
           more for each parameter
    error  ValueError at the end of backward on the ranks where a parameter got no gradient; the
           others are not left waiting
    paper  Li et al. 2020, PyTorch Distributed
    lab    03
    """

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)
        self.waiting, self.works = list(self.buckets), []
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
            bucket = self.waiting.pop(0)
            bucket.gather()
            self.works.append(self.reduce(bucket))

    def reduce(self, bucket):
        """The bucket is on its way to become the mean over ranks; returns the handle."""
        bucket.flat /= dist.get_world_size(bucket.group)
        return dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)

    def finish(self):
        """All gradients are averaged; called at the end of backward."""
        missing = {parameter for bucket in self.waiting for parameter in bucket.missing}
        for bucket in self.waiting:  # the other ranks wait for these: send zeros
            bucket.missing.clear()
        self.launch_ready_buckets()
        used = self.used_anywhere() if self.find_unused_parameters else ()
        for work in self.works:
            work.wait()
        for bucket in self.buckets:
            bucket.fill_none(used)
            bucket.missing = set(bucket.parameters)
        self.waiting, self.works = list(self.buckets), []
        if missing and not self.find_unused_parameters:
            raise self.no_gradient(missing)
