"""The forward of stage 3: run a model on ranks none of which can hold all of it."""

from ranklab.zero.sharded_model import ShardedModel


class ZeroInference(ShardedModel):
    """Shard `module` over the ranks, and keep each unit whole only while it computes.

    A unit is gathered before its forward and freed after it. From the second forward on, the next
    unit is gathered while one computes: the first forward records their order. For torch.no_grad()
    only; a backward needs ZeroStage3.
    Cost: a forward sends all parameters once, (R-1)/R of them; bytes held: 1/R of everything, and
        two units.
    Paper: Rajbhandari et al. 2020, ZeRO, P_os+g+p
    Lab: 06
    """

    def enter(self, unit, module, inputs, kwargs):
        """Gather a unit before its forward, and start gathering the next one."""
        unit.end_gather()
        self.prefetch(self.place_in_order(unit) + 1)

    def leave(self, unit, module, inputs, outputs):
        """Free a unit after its forward."""
        unit.free()
