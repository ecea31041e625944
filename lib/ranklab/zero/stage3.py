"""ZeRO's stage 3: a rank holds its shard of the parameters, and the rest while they are used."""

import functools

import torch
from torch.utils._pytree import tree_leaves

from ranklab.zero.sharded_model import ShardedModel
from ranklab.zero.units import call_after_backward, in_backward


class ZeroStage3(ShardedModel):
    """`module`, of which each rank holds the R-th part, and each unit as a whole while it runs.

    A unit is gathered before its forward and freed after it; the same in backward, where its
    gradients are reduced to shards and freed, too. While one unit computes the next is on its way:
    in backward the one before. With sync=False gradients stay, but units are freed all the same.
    Right also where a checkpoint runs a forward once more inside the backward.
    cost   a step sends the units' parameters twice, all others once and all gradients once, (R-1)/R
           of them; bytes held: 1/R of everything, and two units
    paper  Rajbhandari et al. 2020, ZeRO, P_os+g+p
    lab    06
    """

    def enter(self, unit, module, inputs, kwargs):
        """Before a unit's forward: it is whole, and the next one is on its way."""
        unit.end_gather()
        if not in_backward():
            self.prefetch(self.place_in_order(unit) + 1)
        return call_after_backward(functools.partial(self.backward_done, unit), (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        """After it: the unit is free, and will be gathered when its backward begins."""
        if in_backward():
            return
        begins = functools.partial(self.backward_of, unit, self.position - 1)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(begins)
        unit.free()

    def backward_of(self, unit, place, _):
        """Before a unit's backward: it is whole, and the one before it is on its way."""
        self.backward_begins()
        unit.end_gather()
        self.prefetch(place - 1)

    def backward_done(self, unit):
        """After it: its gradients are on their way to their owners, and the unit is free."""
        if self.sync:
            self.reduce(unit)
        unit.free()
