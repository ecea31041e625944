"""Who owns what: the parameters of a bucket (data_parallel) in one flat piece of R equal shards."""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.basics.flat import pieces
from ranklab.data_parallel.buckets import Bucket
from ranklab.trainer.parallel import groups_here


def partition_flat(tensors, ranks):
    """(flat, shards): the numbers of all tensors one after the other, and flat's R equal parts.

    Zeros at the end make `ranks` divide. shards[r] is a view of flat, and belongs to rank r. The
    tensors are of one type, on one device, and unchanged.
    shape  any shapes of n numbers in all -> (ceil(n/R) R,), R times (ceil(n/R),)
    cost   sends nothing; a copy of the tensors
    lab    06
    """
    n = sum(tensor.numel() for tensor in tensors)
    each = -(-n // ranks)
    flat = tensors[0].new_zeros(each * ranks)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[:n])
    return flat, flat.view(ranks, each).unbind()


class Part(NamedTuple):
    """What a rank owns of one parameter: numbers of the flattened parameter, from `start` on."""

    parameter: nn.Parameter
    start: int
    in_shard: slice
    master: nn.Parameter  # these numbers, as the optimizer steps them: a view of the bucket's


def parts_of(parameters, master, rank):
    """The Parts of `parameters` that lie in shard number `rank`, as long as `master`."""
    parts, begin, each = [], 0, len(master)
    for parameter in parameters:
        start = max(0, rank * each - begin)
        stop = min(parameter.numel(), (rank + 1) * each - begin)
        if start < stop:
            in_shard = slice(begin + start - rank * each, begin + stop - rank * each)
            parts.append(Part(parameter, start, in_shard, nn.Parameter(master[in_shard])))
        begin += parameter.numel()
    return parts


class ShardedBucket(Bucket):
    """A bucket whose parameters lie in one flat piece of memory, too, in R shards.

    weights  the whole parameters; each parameter is a view of it
    shard    the part of the weights that this rank owns
    master   the same numbers in float32 or better: what the optimizer steps; the shard itself
             where that is precise enough (to copy it onto itself does nothing)
    own      after a reduction: the mean gradient of the shard
    """

    def __init__(self, parameters, group=None):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(parameters, group, multiple_of=ranks)
        self.weights, shards = partition_flat([p.detach() for p in parameters], ranks)
        n = len(self.flat) - self.padding
        for parameter, view in zip(parameters, pieces(self.weights[:n], parameters)):
            parameter.data = view
        self.rank, self.shard = rank, shards[rank]
        self.own = self.before = None
        self.used = set()  # parameters that had a gradient in this backward
        self.set_master(self.shard if self.shard.itemsize >= 4 else self.shard.float())

    def set_master(self, master):
        self.master = master
        self.parts = parts_of(self.parameters, master, self.rank)

    def gather(self):
        """As in Bucket; what an earlier backward has left for the optimizer is kept."""
        self.before = [None if part.master.grad is None else part.master.grad.clone()
                       for part in self.parts]
        self.used.update(p for p in self.parameters if p.grad is not None)
        self.flat.untyped_storage().resize_(self.flat.nbytes)  # its memory may have been freed
        super().gather()

    def set_optimizer_gradients(self, used_by_others=()):
        """The optimizer's gradients are those in `own`, added to what was there before; the
        parameters' own are gone. One that no rank has used gets none.

        error  RuntimeError where nothing has put the mean gradient into `own`
        """
        used = self.used.union(used_by_others).intersection(self.parameters)
        if used and self.own is None:
            raise RuntimeError("bucket.own is None when the backward ends: put the mean gradient "
                               "of this rank's shard there")
        for part, before in zip(self.parts, self.before or ()):
            if part.parameter not in used:
                part.master.grad = before
                continue
            # what is added must be there; else the copy may go on until backward_ends()
            mean = self.own[part.in_shard].to(part.master, non_blocking=before is None)
            part.master.grad = mean if before is None else before.add_(mean)
        self.own = self.before = None
        self.used.clear()
        super().drop_gradients()

    def drop_gradients(self):
        """As in Bucket; the optimizer has no gradients either."""
        self.used.clear()
        super().drop_gradients()
        for part in self.parts:
            part.master.grad = None

    def free_gradients(self):
        """The whole gradients take no memory until the next gather()."""
        self.flat.untyped_storage().resize_(0)

    def update_shard(self):
        """The shard has the master's numbers, rounded to the parameters' type."""
        self.shard.copy_(self.master, non_blocking=True)


class ShardedOptimizerMixin:
    """What all stages share: an optimizer over the shards of this rank. For a Replica whose buckets
    are ShardedBuckets.
    """

    def make_optimizer(self, new_optimizer, groups=None):
        """new_optimizer over the parts that this rank owns; its step ends with step_ends().

        The optimizer must treat each number by itself, as SGD, Adam and AdamW do. One that looks
        at a whole matrix (Muon, Shampoo) or at its norm (LARS) would see only parts of it.
        groups  dicts with "params", a list of (name, parameter), and options of their own; all that
                is trained, by default. What is in no group is not stepped
        """
        groups = groups or [{"params": [(name, p) for name, p in self.module.named_parameters()
                                        if p.requires_grad]}]
        masters = {id(part.parameter): part.master
                   for bucket in self.buckets for part in bucket.parts}
        optimizer = new_optimizer(groups_here(groups, lambda _, p: masters.get(id(p))))
        optimizer.register_step_post_hook(lambda *_: self.step_ends())
        return optimizer

    def backward_ends(self):
        """As in Replica; gradients on their way to the CPU's memory have arrived."""
        super().backward_ends()
        shard, master = self.buckets[0].shard, self.buckets[0].master
        if shard.is_cuda and not master.is_cuda:  # torch copies to pinned memory, and goes on
            torch.cuda.current_stream().synchronize()

    def whole(self):
        """Inside, `module` has all its parameters; stages 1 and 2 always have them."""
        return contextlib.nullcontext()

    def load_state_dict(self, *args, **kwargs):
        with self.whole():
            result = super().load_state_dict(*args, **kwargs)
        for bucket in self.buckets:
            bucket.master.copy_(bucket.shard)
        return result
