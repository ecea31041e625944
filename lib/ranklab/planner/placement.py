"""place: how far each group of a plan's ranks reaches on a machine. traffic.py, step.py and why.py
read the result; no other module counts ranks in a node.
"""

import functools
from dataclasses import dataclass

from ranklab.planner.plan import Span, span


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
    """Return the Placement of a plan on a machine."""
    return _place(plan.tp, plan.cp, plan.dp, plan.pp, plan.ep, plan.sharders, plan.outermost,
                  machine.node, machine.island)


@functools.lru_cache(maxsize=4096)  # the plans of a search differ in other things, too
def _place(tp, cp, dp, pp, ep, sharders, outermost, node, island):
    ranks = {"tensor": tp, "context": cp, "expert": ep, "pipeline": pp, "weights": dp * cp,
             "shard": sharders}
    spans = {axis: span(axis, number, tp, cp, dp, pp, outermost, node, island)
             for axis, number in ranks.items()}
    same_experts = max(1, dp * cp * tp // ep)
    return Placement(
        **spans,
        replicas=Span(*(max(1, number // sharders) for number in spans["weights"])),
        expert_copies=Span(*(min(same_experts, number) for number in spans["weights"])))
