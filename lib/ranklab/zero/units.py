"""The engine under ZeRO's stage 3 and FSDP: gather, use, free and reduce a model unit by unit.

    Shards     parameters that travel in one message; flat (sharded_model.py), or in rows
               (ranklab.fsdp)
    Unit       a module with its Shards
    UnitHooks  all units of a model: their order, and the calls around forward and backward

data_parallel tells when a backward runs, when it ends, and whether the last one raised.
"""

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from ranklab.data_parallel.recovery import (
    EndOfBackward, end_failed_backward, failed_before, in_backward,
)


class Shards:
    """Keep this rank's shard of parameters that travel in one message; gather and free the rest.

    A subclass defines how, in methods that may also be called when there is nothing left to do:
        begin_unshard()      start gathering the parameters; `work` is the handle
        unshard()            finish gathering them, and set `is_whole`
        free()               free all memory except this rank's shard
        has_gradients()      return whether there are gradients that have not been sent yet
        reduce_gradients()   start averaging the gradients, each shard on its owner: `reduction` is
                             (this rank's shard_grad, the handle)
        add_gradients(shard_grad)  add the reduced gradient to the shard's gradient
        drop_gradients()     set the gradients to None
    """

    work = reduction = None
    is_whole = False

    def reshard(self):
        """Keep only this rank's shard."""
        if self.work:  # on its way, and not used
            self.unshard()
        self.free()
        self.is_whole = False

    def end_reduction(self):
        """Wait for the gradients that are being reduced, and add them."""
        if self.reduction:
            shard_grad, work = self.reduction
            work.wait()
            self.add_gradients(shard_grad)
            self.reduction = None


class Unit:
    """Gather, use and free the Shards of a module together.

    reshard_after_forward: if False, the unit stays whole from its forward to its backward.
    is_pinned: if True, free() does nothing until the whole backward ends.
    hooks: the UnitHooks of the model.
    """

    def __init__(self, module, shards, reshard_after_forward=True):
        self.shards, self.reshard_after_forward = shards, reshard_after_forward
        self.is_pinned, self.hooks = False, None
        module.register_forward_pre_hook(
            lambda *call: self.hooks.before_forward(self, *call), with_kwargs=True)
        module.register_forward_hook(lambda *call: self.hooks.after_forward(self, *call))

    def begin_gather(self):
        """Start gathering the parameters, if they are not here already."""
        for shards in self.shards:
            shards.begin_unshard()

    def end_gather(self):
        """Gather the parameters, and wait until they are here."""
        self.begin_gather()
        for shards in self.shards:
            shards.unshard()

    def free(self):
        """Keep only this rank's shards."""
        for shards in () if self.is_pinned else self.shards:
            shards.reshard()


class UnitHooks(EndOfBackward):
    """Call a model's units around their forward and backward.

    A subclass gathers and frees them, in four methods:
        enter(unit, module, inputs, kwargs)   before a unit's forward; returns (inputs, kwargs)
        leave(unit, module, inputs, outputs)  after it
        backward_of(unit, place, gradient)    before its backward; `place` is its place in `order`
        backward_done(unit)                   after it
    The last unit is the root: all parameters in no other unit (embeddings, the last norm). It is
    whole from the start of forward to the end of backward. All ranks must use the same units in the
    same order. So a backward may raise on all ranks, but not on only one: the others would wait.
    sync: if False, backward leaves whole gradients where they are (see no_sync).
    """

    sync = True

    def watch(self, units):
        """Use these units, even if another UnitHooks has watched their modules before."""
        self.units, self.root = units, units[-1]
        self.buckets = [shards for unit in units for shards in unit.shards]
        self.order, self.position = [], 0  # the order of units in the last forward
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
        """Clean up after a backward that raised, or a forward without a backward."""
        if failed_before(self):
            end_failed_backward(self)
        self.free_all()
        self.position = 0

    def after_forward(self, unit, module, inputs, outputs):
        """Leave the unit, if it returned a tensor, whose gradient tells when its backward begins.

        Otherwise, for example with a tensor inside an object, it stays whole until backward ends.
        """
        tensors = [output for output in tree_leaves(outputs) if isinstance(output, torch.Tensor)]
        if unit is self.root:
            self.forward_ends(tensors)
        elif tensors:
            is_pinned = unit.is_pinned
            unit.is_pinned = is_pinned or not unit.reshard_after_forward
            self.leave(unit, module, inputs, outputs)
            unit.is_pinned = is_pinned
        else:
            unit.is_pinned = True

    def forward_ends(self, tensors):
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self.backward_begins)
        if not torch.is_grad_enabled() and not in_backward():
            self.free_all()  # no backward will come to it

    def place_in_order(self, unit):
        """Return the unit's place in `order`, which this forward corrects; advance `position`."""
        place = self.position
        if self.order[place : place + 1] != [unit]:
            self.order[place:] = [unit]  # the first forward, or one with a different order
        self.position += 1
        return place

    def prefetch(self, place):
        """Start gathering the unit at this place in `order`, if there is one."""
        if 0 <= place < len(self.order):
            self.order[place].begin_gather()

    # --- backward -------------------------------------------------------------------------------

    def backward_begins(self, _=None):
        """Gather the root, and make sure that finish() is called."""
        self.await_end_of_backward()  # also inside no_sync: units must be freed
        self.root.end_gather()  # an earlier backward may have freed it

    def reduce(self, unit):
        """Start reducing the unit's gradients to their owners; wait for earlier ones."""
        self.end_reductions()
        for shards in unit.shards:
            shards.reduce_gradients()

    def end_reductions(self):
        for shards in self.buckets:
            shards.end_reduction()

    def finish(self):
        """Wait for all gradients, and free all units; called at the end of a backward."""
        for unit in (*reversed(self.units[:-1]), self.root) if self.sync else ():
            # the root in any case: another rank may have used a parameter that this one has not
            if unit is self.root or any(shards.has_gradients() for shards in unit.shards):
                self.reduce(unit)
        self.end_reductions()
        self.free_all()

    def free_all(self):
        for unit in self.units:
            unit.is_pinned = False
            unit.free()


def call_after_backward(callback, inputs):
    """Return `inputs`, nested in any way; call callback() when their gradients are complete.

    Then the gradients of every parameter used after `inputs` are complete as well.
    """
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return inputs
    views = {id(x): x.view_as(x) for x in tensors}  # used from here on alone, as `x` may not be
    register_multi_grad_hook(list(views.values()), lambda gradients: callback())
    return tree_map(lambda x: views.get(id(x), x), inputs)
