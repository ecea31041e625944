"""What a data-parallel model needs besides the idea: equal replicas, buckets, buffers, errors."""

import contextlib
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ranklab.data_parallel.batch_norm import sync_batch_norm_groups
from ranklab.data_parallel.buckets import Bucket, assign_buckets
from ranklab.data_parallel.replicas import broadcast_parameters, broadcast_together


class Replica(nn.Module):
    """`module`, equal on all ranks from here on, and with its gradients laid out in buckets.

    A subclass averages the gradients. It registers its hooks in __init__, and has a method
    `finish()`: it is called at the end of each backward, unless `sync` is False (see no_sync).

    buckets      the Bucket of each message, in the order in which they must travel
    find_unused  whether a parameter may get no gradient; it then counts as zeros
    Sparse gradients are not for it. Nor is torch.autograd.grad: a backward that ends before the
    parameters looks like any other, so the buckets are sent, and all gradients are missing.
    error  a module that trains nothing, or whose parameters differ in shape between ranks;
           find_unused with a SyncBatchNorm in the same group
    """

    def __init__(self, module, cap_bytes=25 * 2**20, group=None, find_unused=False):
        super().__init__()
        self.module, self.group, self.find_unused = module, group, find_unused
        if find_unused:
            refuse_mixed_messages(module, group)
        refuse_other_shapes(module, group)
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("no parameter requires a gradient: there is nothing to average")
        broadcast_parameters(module, group=group)
        self.buckets = [Bucket(each) for each in assign_buckets(trained, cap_bytes)]
        self.sync = True
        self.buffers_from = 0  # the rank whose buffers count; join_uneven changes it
        self.buffers_stale = True
        self.joining = False
        self.in_backward = False

    def forward(self, *inputs, **kwargs):
        if self.joining and not self.sync:
            raise ValueError("no_sync inside join_uneven: a rank that has no batch left would "
                             "wait for the gradients of this one")
        self.begin_step()
        outputs = self.module(*inputs, **kwargs)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self.backward_begins)
        return outputs

    def begin_step(self):
        """The buffers are broadcast, and nothing is left of a backward that failed before."""
        if self.joining and sync_batch_norm_groups(self.module):
            raise ValueError("a SyncBatchNorm inside join_uneven: it would wait for the statistics "
                             "of ranks that have no batch left")
        # Not so inside a backward, where a checkpoint around the whole model runs it once more.
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            self.end_failed_backward()
        self.sync_buffers()

    def end_failed_backward(self):
        """What a backward that raised has left unsent is sent, and its gradients are gone.

        Recovered: messages. Buckets on their way can't be called back, and other ranks may have
        sent more of them or fewer; so all send the rest, and the next backward meets the next.
        Not recovered: the step. A rank that did not fail has a mean with parts missing, and may
        have stepped by it: after an error that one rank alone can have, all must skip that step.
        """
        self.in_backward = False
        with contextlib.suppress(ValueError):  # that gradients are missing is no news
            self.finish()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None  # some were averaged, some were not

    def sync_buffers(self):
        """All ranks have the same buffers, where the forward before this one trained.

        As torch does: without such a forward nothing is sent, so that evaluation may take more
        batches on some ranks than on others, but at least one on each: its first forward sends.
        cost   one broadcast for each type of buffer
        """
        if self.buffers_stale:
            broadcast_together(self.module.buffers(), self.buffers_from, self.group)
        self.buffers_stale = self.sync and torch.is_grad_enabled()

    def backward_begins(self, _=None):
        """finish() will be called when all of this backward is done."""
        if self.sync and not self.in_backward:
            self.in_backward = True
            # Autograd calls back at the end of the backward() in which this hook ran: the outer
            # one, even when checkpointing calls backward() again inside.
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ends)

    def backward_ends(self):
        self.in_backward = False
        self.finish()

    def used_anywhere(self):
        """The parameters that have a gradient on this rank or on any other.

        cost   one all-reduce of 4 bytes for each parameter
        """
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32,
                            device=parameters[0].device)
        dist.all_reduce(used, group=self.group)
        return {p for p, ranks in zip(parameters, used.tolist()) if ranks}

    def shadow(self):
        """This rank has sent and received what the others do in a forward and backward: zeros.

        Its gradients and buffers are the others' then.
        """
        self.begin_step()
        for bucket in self.buckets:
            bucket.flat.zero_()
            dist.all_reduce(bucket.flat, group=self.group)
        if self.find_unused:
            self.used_anywhere()

    def no_gradient(self, missing):
        """The error for parameters that got no gradient in this backward."""
        names, trained = self.names(missing), sum(len(b.parameters) for b in self.buckets)
        return ValueError(f"{len(names)} of {trained} parameters got no gradient on rank "
                          f"{dist.get_rank(self.group)}: {', '.join(names)}. Use them in the loss, "
                          "freeze them, or say find_unused=True")

    def second_gradient(self, parameter):
        """The error for a gradient that comes when its bucket may be on its way already."""
        return ValueError(f"{self.names([parameter])[0]} got two gradients in one backward. Does "
                          "checkpointing run it twice? use_reentrant=False adds them up first")

    def names(self, parameters):
        wanted = {id(parameter) for parameter in parameters}
        return [name for name, p in self.module.named_parameters() if id(p) in wanted]

    def no_sync(self):
        """See the function no_sync."""
        return no_sync(self)

    def state_dict(self, *args, **kwargs):
        """That of the plain module, so that a checkpoint knows nothing of ranks.

        Of the outermost module only: one with a Replica inside can't load what it has saved.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)


@contextlib.contextmanager
def no_sync(model):
    """Inside, backward leaves gradients local and adds them up; nothing is sent.

    The next backward outside averages the sums. So a batch in several pieces costs what a batch in
    one piece does, if all but the last are inside.
    lab    03
    """
    before, model.sync = model.sync, False
    try:
        yield
    finally:  # also when the step inside failed
        model.sync = before


def refuse_mixed_messages(module, group=None):
    """Returns when no SyncBatchNorm of `module` sends in the group of the buckets.

    error  ValueError on every rank
    """
    if any((each or dist.group.WORLD) == (group or dist.group.WORLD)
           for each in sync_batch_norm_groups(module)):
        raise ValueError("find_unused=True with a SyncBatchNorm in the same group: ranks that use "
                         "different parameters would send in different orders. Give it its own: "
                         "convert_sync_batch_norm(model, dist.new_group())")


def refuse_other_shapes(module, group=None):
    """Returns when all ranks have parameters of the same names, shapes and types.

    cost   one all-reduce of 16 bytes
    error  ValueError on every rank
    """
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad)
              for name, p in module.named_parameters()]
    mine = int.from_bytes(hashlib.blake2b(repr(shapes).encode(), digest_size=7).digest(), "big")
    device = next((p.device for p in module.parameters()), "cpu")
    extremes = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        raise ValueError(f"the {len(shapes)} parameters of rank {dist.get_rank(group)} differ from "
                         "those of another rank in name, shape, type or requires_grad")
