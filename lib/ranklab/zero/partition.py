"""Which rank owns which numbers: a bucket (data_parallel) as one flat tensor of R equal shards."""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.basics.flat import pieces
from ranklab.data_parallel.buckets import Bucket
from ranklab.trainer.parallel import groups_here


def partition_flat(tensors, ranks):
    """Copy the tensors into one flat tensor, and cut it into R equal shards; return (flat, shards).

    Padded with zeros so that the length is a multiple of `ranks`. shards[r] is a view of flat, and
    belongs to rank r. The tensors have one dtype, are on one device, and stay unchanged.
    Shape: any shapes of n numbers in total -> (ceil(n/R) R,), R times (ceil(n/R),).
    Cost: sends nothing; a copy of the tensors.
    Lab: 06
    """
    n = sum(tensor.numel() for tensor in tensors)
    length = -(-n // ranks)
    flat = tensors[0].new_zeros(length * ranks)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[:n])
    return flat, flat.view(ranks, length).unbind()


class Part(NamedTuple):
    """The part of one parameter that a rank owns: numbers of the flat parameter, from `start` on.
    """

    parameter: nn.Parameter
    start: int
    in_shard: slice
    master: nn.Parameter  # these numbers, as the optimizer steps them: a view of the bucket's


def parts_of(parameters, master, rank):
    """List the Parts of `parameters` in shard number `rank`; a shard is as long as `master`."""
    parts, begin, length = [], 0, len(master)
    for parameter in parameters:
        start = max(0, rank * length - begin)
        stop = min(parameter.numel(), (rank + 1) * length - begin)
        if start < stop:
            in_shard = slice(begin + start - rank * length, begin + stop - rank * length)
            parts.append(Part(parameter, start, in_shard, nn.Parameter(master[in_shard])))
        begin += parameter.numel()
    return parts


class ShardedBucket(Bucket):
    """Hold a bucket's parameters, like its gradients, in one flat tensor of R shards.

    weights: the whole parameters; each parameter is a view of it.
    shard: the part of the weights that this rank owns.
    master: the same numbers in float32 or better, which the optimizer steps; the shard itself
        if that is precise enough (copying it onto itself does nothing).
    shard_grad: after a reduction, the mean gradient of the shard.
    """

    def __init__(self, parameters, group=None):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(parameters, group, multiple_of=ranks)
        self.weights, shards = partition_flat([p.detach() for p in parameters], ranks)
        n = len(self.flat) - self.padding
        for parameter, view in zip(parameters, pieces(self.weights[:n], parameters)):
            parameter.data = view
        self.rank, self.shard = rank, shards[rank]
        self.shard_grad = self.old_grads = None
        self.used = set()  # parameters that had a gradient in this backward
        self.set_master(self.shard if self.shard.itemsize >= 4 else self.shard.float())

    def set_master(self, master):
        self.master = master
        self.parts = parts_of(self.parameters, master, self.rank)

    def gather(self):
        """Gather as Bucket does, after saving the optimizer's gradients of earlier backwards."""
        self.old_grads = [None if part.master.grad is None else part.master.grad.clone()
                          for part in self.parts]
        self.used.update(p for p in self.parameters if p.grad is not None)
        self.flat.untyped_storage().resize_(self.flat.nbytes)  # its memory may have been freed
        super().gather()

    def set_optimizer_gradients(self, used_by_others=()):
        """Add shard_grad to the optimizer's gradients, and drop the parameters' gradients.

        A parameter that no rank has used gets no gradient.
        Raises: RuntimeError if shard_grad was not set to the mean gradient.
        """
        used = self.used.union(used_by_others).intersection(self.parameters)
        if used and self.shard_grad is None:
            raise RuntimeError("bucket.shard_grad is None when the backward ends: put the mean "
                               "gradient of this rank's shard there")
        for part, old_grad in zip(self.parts, self.old_grads or ()):
            if part.parameter not in used:
                part.master.grad = old_grad
                continue
            # what is added must be there; else the copy may go on until backward_ends()
            mean = self.shard_grad[part.in_shard].to(part.master, non_blocking=old_grad is None)
            part.master.grad = mean if old_grad is None else old_grad.add_(mean)
        self.shard_grad = self.old_grads = None
        self.used.clear()
        super().drop_gradients()

    def drop_gradients(self):
        """Set the gradients of parameters and optimizer to None."""
        self.used.clear()
        super().drop_gradients()
        for part in self.parts:
            part.master.grad = None

    def free_gradients(self):
        """Free the memory of the whole gradients until the next gather()."""
        self.flat.untyped_storage().resize_(0)

    def update_shard(self):
        """Copy the master's numbers to the shard, rounded to the parameters' type."""
        self.shard.copy_(self.master, non_blocking=True)


class ShardedOptimizerMixin:
    """Step only this rank's shards, in any stage; for a Replica whose buckets are ShardedBuckets.
    """

    def make_optimizer(self, new_optimizer, groups=None):
        """Make new_optimizer for the parts that this rank owns; its step ends with step_ends().

        The optimizer must treat each number by itself, as SGD, Adam and AdamW do. An optimizer that
        uses a whole matrix (Muon, Shampoo) or its norm (LARS) would see only parts of it: see
        muon.py.
        groups: dicts with "params", a list of (name, parameter), and options; by default one group
            of all trained parameters. A parameter in no group is not stepped.
        """
        groups = groups or [{"params": [(name, p) for name, p in self.module.named_parameters()
                                        if p.requires_grad]}]
        masters = {id(part.parameter): part.master
                   for bucket in self.buckets for part in bucket.parts}
        optimizer = new_optimizer(groups_here(groups, lambda _, p: masters.get(id(p))))
        optimizer.register_step_post_hook(lambda *_: self.step_ends())
        return optimizer

    def backward_ends(self):
        """End as Replica does, then wait for gradients on their way to the CPU's memory."""
        super().backward_ends()
        shard, master = self.buckets[0].shard, self.buckets[0].master
        if shard.is_cuda and not master.is_cuda:  # torch copies to pinned memory, and goes on
            torch.cuda.current_stream().synchronize()

    def full_parameters(self):
        """Make all parameters of `module` available in the block; always so in stages 1 and 2.
        """
        return contextlib.nullcontext()

    def load_state_dict(self, *args, **kwargs):
        with self.full_parameters():
            result = super().load_state_dict(*args, **kwargs)
        for bucket in self.buckets:
            bucket.master.copy_(bucket.shard)
        return result
