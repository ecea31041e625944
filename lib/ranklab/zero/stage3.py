"""ZeRO's stage 3: a rank holds its shard of each unit, and the whole unit only while it runs."""

import functools

import torch
from torch.utils._pytree import tree_leaves

from ranklab.zero.sharded_model import ShardedModel
from ranklab.zero.units import call_after_backward, in_backward


class ZeroStage3(ShardedModel):
    """Shard `module` over the ranks, and gather each unit as a whole only while it runs.

    A unit is gathered before its forward and freed after it; the same in backward, where its
    gradients are reduced to shards and freed as well. While one unit computes the next is on its
    way: in backward the one before. With sync=False gradients stay, but units are freed all the
    same. Right also where a checkpoint runs a forward once more inside the backward.
    Cost: a step sends the units' parameters twice, all others once and all gradients once, (R-1)/R
        of them; bytes held: 1/R of everything, and two units.
    Paper: Rajbhandari et al. 2020, ZeRO, P_os+g+p
    Lab: 06
    """

    def enter(self, unit, module, inputs, kwargs):
        """Before a unit's forward: gather it, and start gathering the next one."""
        unit.end_gather()
        if not in_backward():
            self.prefetch(self.place_in_order(unit) + 1)
        return call_after_backward(functools.partial(self.backward_done, unit), (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        """After a unit's forward: free it, and have it gathered when its backward begins."""
        if in_backward():
            return
        begins = functools.partial(self.backward_of, unit, self.position - 1)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(begins)
        unit.free()

    def backward_of(self, unit, place, _):
        """Before a unit's backward: gather it, and start gathering the one before it."""
        self.backward_begins()
        unit.end_gather()
        self.prefetch(place - 1)

    def backward_done(self, unit):
        """After a unit's backward: start reducing its gradients to their owners, and free it."""
        if self.sync:
            self.reduce(unit)
        unit.free()
