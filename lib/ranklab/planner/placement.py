"""place: how far each group of a plan's ranks reaches on a machine. traffic.py, step.py and why.py
read the result; no other module counts ranks in a node.
"""

from dataclasses import dataclass

from ranklab.planner.plan import Span


_PLACEMENTS = {}  # sizes of the axes, of a node and of an island: the Placement


@dataclass(frozen=True)
class Placement:
    """The Span of each group of ranks.

    tensor, context, expert, pipeline  the ranks of that axis
    weights        the ranks with the same weights: all of the data and context axes
    shard          those of them that share one copy of the sharded states
    replicas       the ranks that hold the same shard (HSDP)
    expert_copies  the ranks with the same experts
    """

    tensor: Span
    context: Span
    expert: Span
    pipeline: Span
    weights: Span
    shard: Span
    replicas: Span
    expert_copies: Span


def place(plan, machine):
    """Return the Placement of a plan on a machine: once for all plans with these groups."""
    key = (plan.tp, plan.cp, plan.dp, plan.pp, plan.ep, plan.sharders, plan.outermost,
           machine.node, machine.island)
    if key not in _PLACEMENTS:
        _PLACEMENTS[key] = _placed(plan, machine)
    return _PLACEMENTS[key]


def _placed(plan, machine):
    spans = {axis: plan.span(axis, machine)
             for axis in ("tensor", "context", "expert", "pipeline", "weights", "shard")}
    same_experts = max(1, plan.copies * plan.tp // plan.ep)
    return Placement(
        **spans,
        replicas=Span(*(max(1, ranks // plan.sharders) for ranks in spans["weights"])),
        expert_copies=Span(*(min(same_experts, ranks) for ranks in spans["weights"])))
