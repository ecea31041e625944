"""When units are gathered, freed and reduced: hooks around their forward and their backward.

ZeRO's stage 3 stands on it with flat shards (sharded_model.py), FSDP with rows (ranklab.fsdp).
What tells that a backward runs, and when it ends, is from data_parallel.
"""

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ranklab.data_parallel.recovery import EndOfBackward, in_backward


class Unit:
    """A module whose parameters are gathered, used and freed together.

    A subclass says how. Its methods are called often, also when there is nothing left to do:
        begin_gather()      the parameters are on their way to this rank
        end_gather()        they are here
        reshard()           this rank has its shard alone, and the rest takes no memory
        has_gradients()     True where there are any that have not left yet
        reduce_gradients()  they are on their way to become means, each shard on its owner
        end_reduction()     they have arrived
    hooks  the UnitHooks of the model
    stays  True: free() does nothing, until all backward ends
    """

    def __init__(self, module):
        self.module, self.hooks, self.stays = module, None, False
        module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        module.register_forward_hook(self.after_forward)

    def before_forward(self, *call):
        return self.hooks.before_forward(self, *call)

    def after_forward(self, *call):
        self.hooks.after_forward(self, *call)

    def free(self):
        if not self.stays:
            self.reshard()


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
        self.position = 0

    def after_forward(self, unit, module, inputs, outputs):
        """Leaves the unit, if it returns a tensor: then that tells when its backward begins. Else,
        as when the tensor is inside of an object, the unit stays whole until all backward ends.
        """
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
        if unit is self.root:
            self.forward_ends(tensors)
        elif tensors:
            self.leave(unit, module, inputs, outputs)
        else:
            unit.stays = True

    def forward_ends(self, tensors):
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self.backward_begins)
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
        """The root is whole, and finish() will be called."""
        self.await_its_end()  # inside no_sync, too: units must be freed
        self.root.end_gather()  # a backward before this one may have freed it

    def reduce(self, unit):
        """The unit's gradients are on their way to their owners; those before have arrived."""
        for other in self.units:
            other.end_reduction()
        unit.reduce_gradients()

    def finish(self):
        """All gradients have arrived, and no unit is whole; called at the end of backward."""
        for unit in (*reversed(self.units[:-1]), self.root) if self.sync else ():
            # the root in any case: another rank may have used what this one has not
            if unit is self.root or unit.has_gradients():
                self.reduce(unit)
        for unit in self.units:
            unit.end_reduction()
        self.free_all()

    def free_all(self):
        for unit in self.units:
            unit.stays = False
            unit.free()


class _AfterBackward(torch.autograd.Function):
    """The identity; `then` is called when the gradients of all of the inputs are known, which is
    after those of every parameter that was used since.
    """

    @staticmethod
    def forward(ctx, then, *tensors):
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.then()
        return None, *gradients


def call_after_backward(then, inputs):
    """`inputs`, in any nesting, such that their backward ends with `then()`."""
    needed = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not needed or not torch.is_grad_enabled():
        return inputs
    passed = dict(zip(map(id, needed), _AfterBackward.apply(then, *needed)))
    return tree_map(lambda x: passed.get(id(x), x), inputs)
