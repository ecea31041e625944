"""What a model in shards needs besides the idea of when to gather and when to free.

It is a Replica of data_parallel, whose buckets are those of its units.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ranklab.data_parallel.recovery import in_backward
from ranklab.data_parallel.replica import Replica
from ranklab.zero.owned import Owned
from ranklab.zero.units import Unit, units_of


class ShardedModel(Owned, Replica):
    """`module` in units, each of them in shards: one of R on each rank.

    A subclass gathers and frees them, in four methods:
        enter(unit, module, inputs, kwargs)   before a unit's forward; returns (inputs, kwargs)
        leave(unit, module, inputs, outputs)  after it
        backward_of(unit, place, gradient)    before its backward; `place` is that in `order`
        backward_done(unit)                   after it
    What belongs to no unit (embeddings, the last norm) is whole from the forward's begin to the
    backward's end. Outside of these the parameters of `module` are empty: see whole().
    All ranks must use the same units in the same order. So a backward may raise on all ranks, but
    not on one alone: the others wait for its units.

    units        the modules to gather one by one; by default the blocks of the model (units_of)
    find_unused  as in Replica
    """

    def __init__(self, module, units=None, group=None, find_unused=False):
        self.chosen = units
        super().__init__(module, group=group, find_unused=find_unused)
        self.order, self.position = [], 0  # of units in forward, as the last one has shown it
        self.reduced, self.under_way = set(), []  # units in this backward; (bucket, place, handle)
        module.register_forward_pre_hook(self.forward_begins)
        module.register_forward_hook(self.forward_ends)
        for unit in self.units:
            if unit.module is not module:
                unit.module.register_forward_pre_hook(functools.partial(self.enter, unit),
                                                      with_kwargs=True)
                unit.module.register_forward_hook(functools.partial(self.forward_of_ends, unit))

    def make_buckets(self, trained, cap_bytes):
        self.units = [Unit(module, its, self.group_of)
                      for module, its in units_of(self.module, self.chosen)]
        return [bucket for unit in self.units for bucket in unit.buckets]

    # --- the order of units ---------------------------------------------------------------------

    def gather_rest(self):
        """What belongs to no unit is whole."""
        for unit in self.units:
            if unit.module is self.module:
                unit.end_gather()

    def forward_begins(self, *_):
        self.gather_rest()
        if not in_backward():
            self.position = 0

    def forward_of_ends(self, unit, module, inputs, outputs):
        """Leaves the unit, if it returns a tensor: then that tells when its backward begins. Else,
        as when the tensor is inside of an object, the unit stays whole until all backward ends.
        """
        if any(isinstance(each, torch.Tensor) for each in tree_leaves(outputs)):
            self.leave(unit, module, inputs, outputs)
        else:
            unit.stays = True

    def forward_ends(self, *_):
        if not torch.is_grad_enabled() and not in_backward():
            self.free_all()  # no backward will

    def place_in_order(self, unit):
        """Which place in `order` the unit has, as this forward comes to it."""
        place = self.position
        if self.order[place : place + 1] != [unit]:
            self.order[place:] = [unit]  # the first forward, or one that goes another way
        self.position += 1
        return place

    def prefetch(self, place):
        """The unit at this place in `order` is on its way, if there is one."""
        if 0 <= place < len(self.order):
            self.order[place].begin_gather()

    # --- backward -------------------------------------------------------------------------------

    def backward_begins(self, _=None):
        self.await_its_end()  # with sync=False, too: units must be freed
        self.gather_rest()  # a backward before this one may have freed it

    def reduce(self, unit):
        """The unit's gradients are on their way to become means, each shard on its owner."""
        self.reduced.add(unit)
        for bucket in unit.trained:
            self.settle()  # so one message is under way; perhaps it was of the same bucket
            bucket.gather()
            bucket.flat /= dist.get_world_size(bucket.group)
            arriving = torch.empty_like(bucket.shard)
            work = dist.reduce_scatter_single(arriving, bucket.flat, group=bucket.group,
                                              async_op=True)
            self.under_way.append((bucket, arriving, work))

    def settle(self):
        """What was on its way has arrived, and the whole gradients are freed."""
        for bucket, arriving, work in self.under_way:
            work.wait()
            bucket.own = arriving if bucket.own is None else bucket.own + arriving
            bucket.free_gradients()
        self.under_way = []

    def finish(self):
        """The optimizer has its gradients, and no unit is whole; called at the end of backward."""
        self.free_all()
        if not self.sync:
            return
        for unit in reversed(self.units):
            if unit not in self.reduced:
                self.reduce(unit)
        self.settle()
        self.reduced.clear()
        trained = [bucket for unit in self.units for bucket in unit.trained]
        missing = [p for bucket in trained for p in bucket.parameters if p not in bucket.used]
        used = self.used_anywhere() if self.find_unused else ()
        for bucket in trained:
            bucket.hand_over(used)
        if missing and not self.find_unused:
            raise self.no_gradient(missing)

    # --- between the steps ----------------------------------------------------------------------

    def step_ends(self):
        """The next gather sends what was stepped."""
        self.free_all()  # a forward without a backward leaves copies, which are old now
        for bucket in self.buckets:
            bucket.update_shard()

    def free_all(self):
        for unit in self.units:
            unit.stays = False
            unit.free()

    @contextlib.contextmanager
    def whole(self):
        """Inside, `module` has all its parameters, on every rank; what is written there stays."""
        for unit in self.units:
            unit.end_gather()
        try:
            yield
        finally:
            for bucket in self.buckets:
                bucket.take_shard()
            self.free_all()

    def state_dict(self, *args, **kwargs):
        """That of the plain module, whole and copied, on every rank."""
        with self.whole():
            state = super().state_dict(*args, **kwargs)
            return {name: value.clone() for name, value in state.items()}
