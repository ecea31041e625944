"""The engine under ZeRO's stage 3 and FSDP: units of a model are gathered, used, freed, reduced.

    Shards     parameters that travel in one message; flat (sharded_model.py), or in rows
               (ranklab.fsdp)
    Unit       a module with its Shards
    UnitHooks  all units of a model: their order, and what is done around forward and backward

data_parallel tells when a backward runs, when it ends, and that one has raised.
"""

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from ranklab.data_parallel.recovery import (
    EndOfBackward, end_failed_backward, failed_before, in_backward,
)


class Shards:
    """Parameters that travel in one message: this rank keeps its shard, the rest comes and goes.

    A subclass says how. Its methods are called often, also when there is nothing left to do:
        begin_unshard()      the parameters are on their way to this rank; `work` is the handle
        unshard()            they are here: `is_whole`
        free()               what is not this rank's shard takes no memory
        has_gradients()      True where there are any that have not left yet
        reduce_gradients()   they are on their way to become means, each shard on its owner:
                             `reduction` is (where this rank's arrives, the handle)
        add_gradients(mine)  what arrived is added to what was there
        drop_gradients()     there are none
    """

    work = reduction = None
    is_whole = False

    def reshard(self):
        """This rank has only its shard."""
        if self.work:  # on its way, and not used
            self.unshard()
        self.free()
        self.is_whole = False

    def end_reduction(self):
        """The gradients have arrived."""
        if self.reduction:
            mine, work = self.reduction
            work.wait()
            self.add_gradients(mine)
            self.reduction = None


class Unit:
    """A module, whose Shards are gathered, used and freed together.

    reshard_after_forward  False: the unit stays whole from its forward to its backward
    stays  True: free() does nothing, until all backward ends
    hooks  the UnitHooks of the model
    """

    def __init__(self, module, shards, reshard_after_forward=True):
        self.shards, self.reshard_after_forward = shards, reshard_after_forward
        self.stays, self.hooks = False, None
        module.register_forward_pre_hook(
            lambda *call: self.hooks.before_forward(self, *call), with_kwargs=True)
        module.register_forward_hook(lambda *call: self.hooks.after_forward(self, *call))

    def begin_gather(self):
        """The parameters are on their way to this rank, if they are not here."""
        for shards in self.shards:
            shards.begin_unshard()

    def end_gather(self):
        """The parameters are here."""
        self.begin_gather()
        for shards in self.shards:
            shards.unshard()

    def free(self):
        """This rank has only its shards."""
        for shards in () if self.stays else self.shards:
            shards.reshard()


class UnitHooks(EndOfBackward):
    """A model in units. A subclass gathers and frees them, in four methods:
        enter(unit, module, inputs, kwargs)   before a unit's forward; returns (inputs, kwargs)
        leave(unit, module, inputs, outputs)  after it
        backward_of(unit, place, gradient)    before its backward; `place` is that in `order`
        backward_done(unit)                   after it
    The last unit is the root: what belongs to no other (embeddings, the last norm). It is whole
    from the forward's begin to the backward's end. All ranks must use the same units in the same
    order. So a backward may raise on all ranks, but not on one alone: the others wait for it.
    sync  False: backward leaves whole gradients where they are (see no_sync)
    """

    sync = True

    def watch(self, units):
        """From here on these are the units, also of modules that another UnitHooks has watched."""
        self.units, self.root = units, units[-1]
        self.buckets = [shards for unit in units for shards in unit.shards]
        self.order, self.position = [], 0  # of units in forward, as the last one has shown it
        for unit in units:
            unit.hooks = self

    # --- forward --------------------------------------------------------------------------------

    def before_forward(self, unit, module, inputs, kwargs):
        if unit is not self.root:
            return self.enter(unit, module, inputs, kwargs)
        if not in_backward():
            self.forward_begins()
        self.root.end_gather()

    def forward_begins(self):
        """What a backward that raised, or a forward without a backward, left behind is gone."""
        if failed_before(self):
            end_failed_backward(self)
        self.free_all()
        self.position = 0

    def after_forward(self, unit, module, inputs, outputs):
        """The unit is left, if it returned a tensor, because that tells when its backward begins.
        Otherwise, say if the tensor is inside an object, the unit stays whole until backward ends.
        """
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
        if unit is self.root:
            self.forward_ends(tensors)
        elif tensors:
            stays, unit.stays = unit.stays, unit.stays or not unit.reshard_after_forward
            self.leave(unit, module, inputs, outputs)
            unit.stays = stays
        else:
            unit.stays = True

    def forward_ends(self, tensors):
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self.backward_begins)
        if not torch.is_grad_enabled() and not in_backward():
            self.free_all()  # no backward will come to it

    def place_in_order(self, unit):
        """Which place in `order` the unit has, as this forward comes to it."""
        place = self.position
        if self.order[place : place + 1] != [unit]:
            self.order[place:] = [unit]  # the first forward, or one with another order
        self.position += 1
        return place

    def prefetch(self, place):
        """The unit at this place in `order` is on its way, if there is one."""
        if 0 <= place < len(self.order):
            self.order[place].begin_gather()

    # --- backward -------------------------------------------------------------------------------

    def backward_begins(self, _=None):
        """The root is whole, and finish() will be called."""
        self.await_end_of_backward()  # inside no_sync, too: units must be freed
        self.root.end_gather()  # an earlier backward may have freed it

    def reduce(self, unit):
        """The unit's gradients are on their way to their owners; earlier ones have arrived."""
        self.end_reductions()
        for shards in unit.shards:
            shards.reduce_gradients()

    def end_reductions(self):
        for shards in self.buckets:
            shards.end_reduction()

    def finish(self):
        """All gradients have arrived, and no unit is whole; called at the end of backward."""
        for unit in (*reversed(self.units[:-1]), self.root) if self.sync else ():
            # the root in any case: another rank may have used a parameter that this one has not
            if unit is self.root or any(shards.has_gradients() for shards in unit.shards):
                self.reduce(unit)
        self.end_reductions()
        self.free_all()

    def free_all(self):
        for unit in self.units:
            unit.stays = False
            unit.free()


def call_after_backward(then, inputs):
    """`inputs`, in any nesting, whose backward ends with `then()`: once all their gradients are
    known, those of every parameter that was used after them are known, too.
    """
    needed = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not needed or not torch.is_grad_enabled():
        return inputs
    passed = {id(x): x.view_as(x) for x in needed}  # used from here on alone, as `x` may not be
    register_multi_grad_hook(list(passed.values()), lambda gradients: then())
    return tree_map(lambda x: passed.get(id(x), x), inputs)
