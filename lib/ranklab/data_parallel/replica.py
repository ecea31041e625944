"""The base class of data-parallel models: equal replicas, buckets, equal buffers."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ranklab.data_parallel import recovery, refusals
from ranklab.data_parallel.buckets import Bucket, buckets_of
from ranklab.data_parallel.recovery import EndOfBackward
from ranklab.data_parallel.replicas import broadcast_together


class Replica(EndOfBackward, nn.Module):
    """Make `module` equal on all ranks, and lay out its gradients in buckets.

    A subclass averages the gradients. It registers its hooks in __init__, and has a method
    `finish()`, called at the end of each backward unless `sync` is False (see no_sync).
    Sparse gradients are not supported. Don't use torch.autograd.grad with it: a backward that stops
    before the parameters looks like any other, so the buckets are sent with no gradients in them.

    buckets: the Bucket of each message, in the order of sending.
    find_unused_parameters: whether a parameter may get no gradient; its gradient is then zeros.
    Raises: ValueError for a module that trains nothing, or whose parameters differ in shape between
        ranks; for find_unused_parameters with a SyncBatchNorm in the same group.
    """

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__()
        self.module, self.group, self.find_unused_parameters = module, group, find_unused_parameters
        if find_unused_parameters:
            refusals.refuse_mixed_messages(module, group)
        refusals.refuse_other_shapes(module, group)
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("no parameter requires a gradient: there is nothing to average")
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=self.group_of(tensor), group_src=0)
        self.buckets = self.make_buckets(trained, bucket_cap_bytes)
        self.sync = True
        self.buffers_from = 0  # the rank whose buffers count; join_uneven changes it
        self.buffers_stale = True
        self.joining = False

    def make_buckets(self, trained, bucket_cap_bytes):
        return buckets_of(trained, bucket_cap_bytes, self.group_of, Bucket)

    def group_of(self, tensor):
        """Return the group of the ranks that hold a copy of this tensor (in some models not all).
        """
        return self.group

    def forward(self, *inputs, **kwargs):
        self.begin_step()
        outputs = self.module(*inputs, **kwargs)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self.backward_begins)
        return outputs

    def begin_step(self):
        """Broadcast the buffers, and clean up after a backward that failed."""
        if self.joining:
            refusals.refuse_while_joining(self)
        if recovery.failed_before(self):
            recovery.end_failed_backward(self)
        self.sync_buffers()

    def sync_buffers(self):
        """Broadcast the buffers, if the previous forward was for training.

        As in torch, an evaluation forward sends nothing unless it follows a training forward. So
        some ranks may evaluate more batches than others, but each at least one.
        Cost: one broadcast for each type of buffer.
        """
        if self.buffers_stale:
            broadcast_together(self.module.buffers(), self.buffers_from, self.group)
        self.buffers_stale = self.sync and torch.is_grad_enabled()

    def backward_begins(self, _=None):
        """Make sure that finish() is called at the end of this backward."""
        if self.sync:
            self.await_end_of_backward()

    def reduce_now(self):
        """Average the gradients accumulated inside no_sync."""
        missing = {p for p in self.parameters() if p.requires_grad and p.grad is None}
        for bucket in self.buckets:
            bucket.missing.clear()
        self.finish()
        if missing and not self.find_unused_parameters:
            raise self.no_gradient(missing)

    def used_anywhere(self, used_here=None):
        """Return the parameters that have a gradient, or are in used_here, on at least one rank.

        Cost: one all-reduce of 4 bytes for each parameter.
        """
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        if used_here is None:
            used_here = {p for p in parameters if p.grad is not None}
        counts = torch.tensor([p in used_here for p in parameters], dtype=torch.int32,
                              device=parameters[0].device)
        dist.all_reduce(counts, group=self.group)
        return {p for p, ranks in zip(parameters, counts.tolist()) if ranks}

    def shadow(self):
        """Take part, with zeros, in all collectives of the other ranks' forward and backward.

        Afterwards this rank has the averaged gradients and the buffers.
        """
        self.begin_step()
        for bucket in self.buckets:
            bucket.flat.zero_()
            dist.all_reduce(bucket.flat, group=bucket.group)
        if self.find_unused_parameters:
            self.used_anywhere()

    def no_gradient(self, missing):
        """Return the error for parameters that got no gradient in this backward."""
        return refusals.no_gradient(self, missing)

    def second_gradient(self, parameter):
        """Return the error for a gradient that comes when its bucket may have been sent already."""
        return refusals.second_gradient(self, parameter)

    def no_sync(self):
        """See the function no_sync."""
        return no_sync(self)

    def state_dict(self, *args, **kwargs):
        """Return the state dict of the plain module, so that a checkpoint is independent of ranks.

        Only for the outermost module: a module with a Replica inside can't load its own state dict.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)


@contextlib.contextmanager
def no_sync(model):
    """Keep gradients local in the block: backward accumulates them and sends nothing.

    The next backward outside averages the sums. So a batch in several pieces sends as much as a
    batch in one piece, if all pieces but the last are inside.
    This also holds after an error in the block, and inside another no_sync.
    Lab: 03
    """
    old_sync, model.sync = model.sync, False
    try:
        yield
    finally:  # also when the step inside failed
        model.sync = old_sync
