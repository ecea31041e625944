"""ZeRO's stage 3: a rank holds its shard of each unit, and the whole unit only while it runs.

    forward    gather 0 | run 0, gather 1 | free 0, run 1, gather 2 | ...
    backward   gather n | run n, gather n-1 | reduce and free n, run n-1, gather n-2 | ...

Here is when a unit is gathered, reduced and freed; units.py has how, and calls these methods.
sharded_model.py cuts a model into units, and units into shards.
"""

import functools

import torch
from torch.utils._pytree import tree_leaves

from ranklab.zero.sharded_model import ShardedModel
from ranklab.zero.units import call_after_backward, in_backward


class ZeroStage3(ShardedModel):
    """Shard `module` over the ranks, and keep each unit whole only while it runs.

    A unit is gathered before its forward and freed after it, and likewise in backward, where its
    gradients are reduced to shards and freed as well. The next unit is gathered while one computes:
    in backward, the unit before it. With sync=False gradients stay, but units are still freed. Also
    correct if activation checkpointing runs a forward again inside the backward.
    Cost: (R-1)/R of the bytes of: the units' parameters twice (forward, backward), other parameters
        once, all gradients once. Bytes held: 1/R of everything, and two units.
    Paper: Rajbhandari et al. 2020, ZeRO, P_os+g+p
    Lab: 06
    """

    def enter(self, unit, module, inputs, kwargs):
        """Gather a unit before its forward, and start gathering the next one."""
        unit.end_gather()
        if not in_backward():
            self.prefetch(self.place_in_order(unit) + 1)
        return call_after_backward(functools.partial(self.backward_done, unit), (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        """Free a unit after its forward, and have it gathered when its backward begins."""
        if in_backward():
            return
        # enter() has counted this unit, so its place is one less.
        begins = functools.partial(self.backward_of, unit, self.position - 1)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(begins)
        unit.free()

    def backward_of(self, unit, place, _):
        """Gather a unit before its backward, and start gathering the one before it."""
        self.backward_begins()
        unit.end_gather()
        self.prefetch(place - 1)

    def backward_done(self, unit):
        """After a unit's backward, start reducing its gradients to their owners, and free it."""
        if self.sync:
            self.reduce(unit)
        unit.free()
