"""A model in flat shards: its units, each in buckets (data_parallel) that come and go.

When they come and go is in unit_hooks.py and stage3.py.
"""

import contextlib
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from ranklab.data_parallel.buckets import buckets_of
from ranklab.data_parallel.replica import Replica
from ranklab.zero.partition import ShardedBucket, ShardedOptimizerMixin
from ranklab.zero.unit_hooks import Unit, UnitHooks


def units_of(module):
    """[(module, its parameters)]: what is gathered, used and freed together; `module` itself last.

    The units are the blocks of a transformer: the entries of each ModuleList that is not inside
    another one. A parameter that two units have, or none, belongs to `module`, and is there all
    the time.
    """
    blocks = blocks_of(module)
    users = Counter(parameter for block in blocks for parameter in block.parameters())
    units = [(block, [p for p in block.parameters() if users[p] == 1]) for block in blocks]
    inside = {parameter for _, its in units for parameter in its}
    rest = [p for p in module.parameters() if p not in inside]
    return [(block, its) for block, its in units if its] + [(module, rest)]


def blocks_of(module):
    """The entries of all outermost ModuleLists and ModuleDicts, in their order."""
    found = []
    for child in module.children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        found += child.children() if is_list else blocks_of(child)
    return found


class ShardedWeights(ShardedBucket):
    """A ShardedBucket of which this rank keeps the shard only; the whole comes and goes."""

    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        self.trained = parameters[0].requires_grad
        self.in_weights, self.shard = self.shard, self.shard.clone()
        self.set_master(self.shard if self.master is self.in_weights else self.master)
        self.work, self.is_whole = None, True
        self.free_gradients()
        self.free()

    def gather(self):
        """As a ShardedBucket's; the parameters have no gradients, because a second use in the same
        backward would add to what is on its way.
        """
        super().gather()
        for parameter in self.parameters:
            parameter.grad = None

    def begin_gather(self):
        """The whole weights are on their way to this rank, if they are not here."""
        if not self.is_whole:
            self.is_whole = True
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.work = dist.all_gather_single(self.weights, self.shard, group=self.group,
                                               async_op=True)

    def end_gather(self):
        """The whole weights are here."""
        if self.work:
            self.work.wait()
            self.work = None

    def free(self):
        """The weights take no memory until they are gathered again."""
        if self.is_whole:
            self.end_gather()  # they may still be on their way
            self.weights.untyped_storage().resize_(0)
            self.is_whole = False


class FlatUnit(Unit):
    """A Unit in ShardedWeights: one for each type, frozen parameters apart."""

    def __init__(self, module, parameters, group_of):
        super().__init__(module)
        self.buckets = [bucket for trained in (True, False) for bucket in buckets_of(
            [p for p in parameters if p.requires_grad == trained], 2**63, group_of,
            ShardedWeights)]
        self.trained = [bucket for bucket in self.buckets if bucket.trained]
        self.under_way = []  # (bucket, where its mean arrives, handle)

    def begin_gather(self):
        for bucket in self.buckets:
            bucket.begin_gather()

    def end_gather(self):
        self.begin_gather()
        for bucket in self.buckets:
            bucket.end_gather()

    def reshard(self):
        for bucket in self.buckets:
            bucket.free()

    def has_gradients(self):
        return any(p.grad is not None for bucket in self.trained for p in bucket.parameters)

    def reduce_gradients(self):
        for bucket in self.trained:
            bucket.gather()
            bucket.flat /= dist.get_world_size(bucket.group)
            arriving = torch.empty_like(bucket.shard)
            work = dist.reduce_scatter_single(arriving, bucket.flat, group=bucket.group,
                                              async_op=True)
            self.under_way.append((bucket, arriving, work))

    def end_reduction(self):
        """And the whole gradients are freed."""
        for bucket, arriving, work in self.under_way:
            work.wait()
            bucket.own = arriving if bucket.own is None else bucket.own + arriving
            bucket.free_gradients()
        self.under_way = []


class ShardedModel(ShardedOptimizerMixin, UnitHooks, Replica):
    """`module` in units, each of them in shards: one of R on each rank.

    A subclass gathers and frees the units, in the four methods of UnitHooks. Outside of these the
    parameters of `module` are empty: see whole().
    """

    def __init__(self, module, group=None, find_unused_parameters=False):
        super().__init__(module, group=group, find_unused_parameters=find_unused_parameters)

    def make_buckets(self, trained, bucket_cap_bytes):
        self.watch([FlatUnit(module, its, self.group_of) for module, its in units_of(self.module)])
        return [bucket for unit in self.units for bucket in unit.buckets]

    def finish(self):
        """As of UnitHooks; and the optimizer has its gradients."""
        self.free_all()  # before the last messages
        super().finish()
        if not self.sync:
            return
        trained = [bucket for unit in self.units for bucket in unit.trained]
        missing = [p for bucket in trained for p in bucket.parameters if p not in bucket.used]
        used = self.used_anywhere() if self.find_unused_parameters else ()
        for bucket in trained:
            bucket.set_optimizer_gradients(used)
        if missing and not self.find_unused_parameters:
            raise self.no_gradient(missing)

    def step_ends(self):
        """The next gather sends what was stepped."""
        self.free_all()  # a forward without a backward leaves copies, which are old now
        for bucket in self.buckets:
            bucket.update_shard()

    @contextlib.contextmanager
    def whole(self):
        """Inside, `module` has all its parameters, on every rank; what is written there stays."""
        for unit in self.units:
            unit.end_gather()
        try:
            yield
        finally:
            for bucket in self.buckets:
                bucket.shard.copy_(bucket.in_weights)
            self.free_all()

    def state_dict(self, *args, **kwargs):
        """That of the plain module, whole and copied, on every rank."""
        with self.whole():
            state = super().state_dict(*args, **kwargs)
            return {name: value.clone() for name, value in state.items()}
