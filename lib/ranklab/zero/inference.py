"""The forward of stage 3: run a model on ranks none of which can hold all of it."""

from ranklab.zero.sharded_model import ShardedModel


class ZeroInference(ShardedModel):
    """Shard `module` over the ranks, and gather each unit as a whole only while it computes.

    A unit is gathered before its forward and freed after it. While one unit computes the next is on
    its way, from the second forward on: the first shows their order. It is for torch.no_grad(); a
    backward needs ZeroStage3.
    Cost: a forward sends all parameters once, (R-1)/R of them; bytes held: 1/R of everything, and
        two units.
    Paper: Rajbhandari et al. 2020, ZeRO, P_os+g+p
    Lab: 06
    """

    def enter(self, unit, module, inputs, kwargs):
        """Before a unit's forward: gather it, and start gathering the next one."""
        unit.end_gather()
        self.prefetch(self.place_in_order(unit) + 1)

    def leave(self, unit, module, inputs, outputs):
        """After a unit's forward: free it."""
        unit.free()
