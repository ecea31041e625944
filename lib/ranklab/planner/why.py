"""why: where a step's time goes, and over which link. assumptions: what the seconds assume.
"""

from dataclasses import replace

from ranklab.planner.placement import place
from ranklab.planner.step import step_time

GROUPS = {"tensor": "tensor", "context": "context", "expert": "expert", "weights": "shard",
          "pipeline": "pipeline", "data": "weights"}  # part of a Step -> field of its Placement
COMPUTING = ("products", "attention", "other")
HIDDEN = {  # tool: {axis: its messages, and what hides them}
    "megatron": {"data": "gradients (--overlap-grad-reduce, --overlap-param-gather)",
                 "tensor": "tensor messages (--tp-comm-overlap)",
                 "context": "the ring's keys (--cp-comm-type p2p)",
                 "pipeline": "messages between stages (if they are interleaved)"},
    "torchtitan": {"data": "FSDP's weights and gradients (its prefetching)",
                   "context": "the ring's keys"},
    "deepspeed": {"data": "ZeRO's weights and gradients (overlap_comm)"}, "ours": {}}


def shares(plan, step, machine):
    """Return [(name, share of the step)], the largest first: "computing", "bubble", "tensor by
    NVLink".
    """
    parts = {"computing": sum(getattr(step, part) for part in COMPUTING)}
    for part in ("recompute", "bubble", "optimizer", "rest"):
        parts[part] = getattr(step, part)
    placement = place(plan, machine)
    for part, group in GROUPS.items():
        link = slowest_link(getattr(placement, group), machine)
        parts[f"{part} by {link}"] = getattr(step, part)
    return sorted(((name, seconds / step.total) for name, seconds in parts.items() if seconds),
                  key=lambda pair: -pair[1])


def slowest_link(span, machine):
    """Return the name of the slowest link that a group with this Span crosses."""
    if span.island < span.ranks:
        return "links of islands"
    if span.node < span.ranks:
        return "network"
    return "NVLink" if machine.link > 100e9 else "PCIe"


def why(plan, step, machine, most=3):
    """Say where most of the step's time goes: "computing 74%, bubble 9%, tensor by NVLink 7%"."""
    return ", ".join(f"{name} {share:.0%}"
                     for name, share in shares(plan, step, machine)[:most] if share >= 0.005)


def assumptions(model, plan, machine):
    """Return [(assumption behind the seconds of a step, the seconds without it)].

    The assumptions: messages hidden behind computing, of the axes with more than one rank;
    attention kernels for H100 and later; and all together, if there are two or more.
    """
    ranks = {"data": plan.copies, "tensor": plan.tp, "context": plan.cp, "pipeline": plan.pp}
    messages = HIDDEN[plan.tool]
    rows = [(f"{messages[axis]} hidden",
             {"hides": tuple(name for name in plan.hides if name != axis)})
            for axis in plan.hides if ranks.get(axis, 1) > 1 and axis in messages]
    if plan.attention == "tuned":
        rows.append(("attention by cuDNN or FlashAttention 3", {"attention": "flash"}))
    if len(rows) > 1:
        without = "flash" if plan.attention == "tuned" else plan.attention
        rows.append(("all of these", {"hides": (), "attention": without}))
    return [(words, step_time(model, replace(plan, **change), machine).total)
            for words, change in rows]
