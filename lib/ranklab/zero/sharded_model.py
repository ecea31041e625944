"""A Replica (data_parallel) in flat shards, on the engine of units.py.

stage3.py says when its units are gathered and freed.
"""

import contextlib
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from ranklab.data_parallel.buckets import buckets_of
from ranklab.data_parallel.replica import Replica
from ranklab.zero.partition import ShardedBucket, ShardedOptimizerMixin
from ranklab.zero.units import Shards, Unit, UnitHooks


def units_of(module):
    """Split `module` into units that are gathered, used and freed together; `module` itself last.

    The units are the blocks of a transformer: the entries of each ModuleList that is not inside
    another one. A parameter in two units, or in none, belongs to `module`, which stays gathered
    all the time.
    Returns: a list of (module, its parameters).
    """
    blocks = blocks_of(module)
    users = Counter(parameter for block in blocks for parameter in block.parameters())
    units = [(block, [p for p in block.parameters() if users[p] == 1]) for block in blocks]
    unit_parameters = {parameter for _, parameters in units for parameter in parameters}
    rest = [p for p in module.parameters() if p not in unit_parameters]
    return [(block, parameters) for block, parameters in units if parameters] + [(module, rest)]


def blocks_of(module):
    """List the entries of all outermost ModuleLists and ModuleDicts, in order."""
    blocks = []
    for child in module.children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        blocks += child.children() if is_list else blocks_of(child)
    return blocks


class FlatShards(Shards, ShardedBucket):
    """Keep only the shard of a ShardedBucket on this rank; gather and free the whole bucket."""

    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        self.trained = parameters[0].requires_grad
        self.in_weights, self.shard = self.shard, self.shard.clone()
        self.set_master(self.shard if self.master is self.in_weights else self.master)
        self.free_gradients()
        self.free()

    def begin_unshard(self):
        if not (self.is_whole or self.work):
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.work = dist.all_gather_single(self.weights, self.shard, group=self.group,
                                               async_op=True)

    def unshard(self):
        self.begin_unshard()
        if self.work:
            self.work.wait()
            self.work, self.is_whole = None, True

    def free(self):
        self.weights.untyped_storage().resize_(0)

    def has_gradients(self):
        return any(p.grad is not None for p in self.parameters)

    def reduce_gradients(self):
        if not self.trained:
            return
        self.gather()
        for parameter in self.parameters:
            parameter.grad = None  # a second use must not add to what is on its way
        self.flat /= dist.get_world_size(self.group)
        shard_grad = torch.empty_like(self.shard)
        work = dist.reduce_scatter_single(shard_grad, self.flat, group=self.group, async_op=True)
        self.reduction = shard_grad, work

    def add_gradients(self, shard_grad):
        """Add `shard_grad` to the shard's gradient, and free the whole gradients."""
        self.shard_grad = shard_grad if self.shard_grad is None else self.shard_grad + shard_grad
        self.free_gradients()


class ShardedModel(ShardedOptimizerMixin, UnitHooks, Replica):
    """Cut `module` into units, and each unit into R shards, one for each rank.

    A subclass gathers and frees the units, in the four methods of UnitHooks. At all other times
    the parameters of `module` are empty: see full_parameters().
    """

    def __init__(self, module, group=None, find_unused_parameters=False):
        super().__init__(module, group=group, find_unused_parameters=find_unused_parameters)

    def make_buckets(self, trained, bucket_cap_bytes):
        self.watch([Unit(module, self.shards_of(parameters))
                    for module, parameters in units_of(self.module)])
        return self.buckets

    def shards_of(self, parameters):
        """Make FlatShards of the parameters: one for each type, with frozen parameters separate."""
        return [shards for trained in (True, False) for shards in buckets_of(
            [p for p in parameters if p.requires_grad == trained], 2**63, self.group_of,
            FlatShards)]

    def finish(self):
        """Finish as UnitHooks does, and give the optimizer its gradients."""
        self.free_all()  # before the last messages
        super().finish()
        if not self.sync:
            return
        trained = [shards for shards in self.buckets if shards.trained]
        used_here = {p for shards in trained for p in shards.used}
        missing = [p for shards in trained for p in shards.parameters if p not in used_here]
        used = self.used_anywhere(used_here) if self.find_unused_parameters else ()
        for shards in trained:
            shards.set_optimizer_gradients(used)
        if missing and not self.find_unused_parameters:
            raise self.no_gradient(missing)

    def step_ends(self):
        """Copy the stepped parameters to the shards, which the next gather sends."""
        for shards in self.buckets:
            shards.update_shard()

    @contextlib.contextmanager
    def full_parameters(self):
        """Gather all parameters of `module` in the block, on every rank; changes to them stay."""
        self.free_all()  # what a forward without a backward left whole is stale after a step
        for shards in self.buckets:
            shards.unshard()
        try:
            yield
        finally:
            for shards in self.buckets:
                shards.shard.copy_(shards.in_weights)
            self.free_all()

    def state_dict(self, *args, **kwargs):
        """Return the state dict of the plain module, whole and copied, on every rank."""
        with self.full_parameters():
            state = super().state_dict(*args, **kwargs)
            return {name: value.clone() for name, value in state.items()}
