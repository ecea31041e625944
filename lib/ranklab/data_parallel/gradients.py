"""Two ways to average gradients over ranks: after backward, or while backward still runs.

    average_gradients         naive: one message for each parameter, after backward
    OverlappedDataParallel    one message for each bucket, as soon as its gradients are ready

Its base class (replica.py) makes equal replicas and their buckets (buckets.py), and calls finish()
at the end of each backward.
torch's DDP sends the same bytes as the second. It learns the order of its buckets from the first
backward; ours is the reverse order of registration. If layers are registered in the order of use,
the two orders differ only inside a layer (a convolution's weight is ready before its bias), so
bucket boundaries differ as well.
"""

import functools

import torch
import torch.distributed as dist

from ranklab.data_parallel.replica import Replica


def average_gradients(model, group=None):
    """Replace every gradient by its mean over ranks; a gradient that is None counts as zeros.

    The naive version. It starts when backward is over, so nothing overlaps, and the message of a
    bias with ten numbers pays the same latency as the message of a matrix with a million.
    Cost: one all-reduce for each parameter that requires a gradient, or fewer; each gradient is
        sent once, in its own dtype.
    Lab: 03
    """
    R = dist.get_world_size(group)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # others may have one, and wait for ours
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= R
        dist.all_reduce(parameter.grad, group=group)


class OverlappedDataParallel(Replica):
    """Wrap `module` so that its gradients are means over ranks when backward() returns.

    The all-reduce of a bucket begins as soon as all its gradients are ready, and backward continues
    with the earlier layers.
    All ranks send their buckets in the same order, regardless of the order in which they become
    ready: the first message of one rank is matched with the first of the others.
    A parameter without a gradient is an error; with find_unused_parameters it counts as zeros, at
    the end of backward (torch looks for it in the graph, in forward).
    Cost: one all-reduce for each bucket: all gradients once; with find_unused_parameters 4 bytes
        more for each parameter.
    Raises: ValueError at the end of backward, on the ranks where a parameter got no gradient; the
        other ranks are not left waiting.
    Paper: Li et al. 2020, PyTorch Distributed
    Lab: 03
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
        """Cross the parameter off its bucket; autograd calls this once parameter.grad is ready."""
        if self.sync:
            self.backward_begins()
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            bucket.missing.remove(parameter)
            self.launch_ready_buckets()

    def launch_ready_buckets(self):
        """Start sending buckets in order, up to the first one that is not ready."""
        while self.waiting and not self.waiting[0].missing:
            bucket = self.waiting.pop(0)
            bucket.gather()
            self.works.append(self.reduce(bucket))

    def reduce(self, bucket):
        """Start averaging the bucket over ranks; return the work handle."""
        bucket.flat /= dist.get_world_size(bucket.group)
        return dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)

    def finish(self):
        """Wait until all gradients are averaged; called at the end of backward."""
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
