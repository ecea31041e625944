"""Lab 13: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

from collections import Counter
from dataclasses import asdict, replace
from ranklab.planner.constants import CONSTANTS
from ranklab.planner.memory import (
    GpuMemory, buffer_bytes, in_flight, kept_bytes, numbers_of, ours, states,
)
from ranklab.planner.step import (
    Step, bubble_part, head_seconds, layer_seconds, sent_seconds, update_seconds,
)


def memory_per_gpu__all_ranks(model, plan, machine, tool=None, constants=CONSTANTS):
    """A GpuMemory of each pipeline rank, and the max of them."""
    tool = tool or plan.tool
    if tool == "ours":
        return ours(model, plan, constants)
    found = []
    for rank, layers in enumerate(plan.stages(model.layers)):
        dense, experts = numbers_of(model, plan, rank)
        of_dense = states(plan, tool, dense, plan.sharders)
        of_experts = states(plan, tool, experts, plan.copies * plan.tp // plan.ep)
        weights, gradients, optimizer = (a + b for a, b in zip(of_dense, of_experts))
        activations = layers * in_flight(plan, rank) * kept_bytes(model, plan, tool)
        if plan.recompute != "none":
            activations += 2 * kept_bytes(model, plan, tool, "none")
        logits = 0.0
        if rank == plan.pp - 1:
            each = 12 if tool == "torchtitan" else 8
            logits = each * plan.tokens * model.vocab / plan.tp
        found.append(GpuMemory(
            weights, gradients, 0.0 if plan.offload else optimizer, activations, logits,
            buffer_bytes(model, plan, tool, dense), constants.context_bytes,
            constants.gaps * (activations + logits)))
    return max(found, key=lambda memory: memory.total)


def memory_per_gpu__keep_the_fullest(model, plan, machine, tool=None, constants=CONSTANTS):
    """A Counter for each rank, from the last rank to the first; keeps the fullest."""
    tool = plan.tool if tool is None else tool
    if tool == "ours":
        return ours(model, plan, constants)
    fullest = None
    for rank in reversed(range(plan.pp)):
        parts, kinds = Counter(), numbers_of(model, plan, rank)
        for numbers, ranks in zip(kinds, (plan.sharders, plan.copies * plan.tp // plan.ep)):
            if numbers:
                parts.update(dict(zip(("weights", "gradients", "optimizer"),
                                      states(plan, tool, numbers, ranks))))
        if plan.offload:
            parts["optimizer"] = 0
        waiting = plan.stages(model.layers)[rank] * in_flight(plan, rank)
        again = 0 if plan.recompute == "none" else kept_bytes(model, plan, tool, "none")
        parts["activations"] = waiting * kept_bytes(model, plan, tool) + again + again
        parts["logits"] = (rank + 1 == plan.pp) * plan.tokens * (model.vocab / plan.tp) * (
            {"torchtitan": 12}.get(tool, 8))
        parts["buffers"] = buffer_bytes(model, plan, tool, kinds[0])
        parts["context"] = constants.context_bytes
        parts["allowance"] = constants.gaps * (parts["activations"] + parts["logits"])
        names = GpuMemory.__dataclass_fields__
        memory = GpuMemory(**{name: parts[name] for name in names})
        if fullest is None or memory.total > fullest.total:
            fullest = memory
    return fullest


def step_time__counters(model, plan, machine, constants=CONSTANTS):
    """A Counter of the parts, scaled at the end."""
    c, M, P = constants, plan.micro_batches, plan.pp
    layers, head = (Counter(seconds(model, plan, machine, c))
                    for seconds in (layer_seconds, head_seconds))
    average = Counter({part: (layers[part] + head[part]) / P for part in {*layers, *head}})
    busy = sum(average.values())
    sent = sent_seconds(model, plan, machine, busy, c)
    part = bubble_part(model, plan, machine, c)
    bubble = M * (busy + sent) * part / (1 - part)
    of_layer, of_head = sum(layers.values()) / model.layers, sum(head.values())
    counts = plan.stages(model.layers)
    times = [n * of_layer + of_head * (i == len(counts) - 1) for i, n in enumerate(counts)]
    bubble += M * (max(times) - busy)
    data, optimizer = update_seconds(model, plan, machine, busy, c)
    return Step(**{part: M * seconds for part, seconds in average.items()}, pipeline=M * sent,
                bubble=bubble, data=data, optimizer=optimizer, rest=c.step_seconds)


def step_time__seconds_of_stages(model, plan, machine, constants=CONSTANTS):
    """Lists each stage's seconds; the average is their mean, the bubble is what is left of all."""
    c, M, P = constants, plan.micro_batches, plan.pp
    layers = layer_seconds(model, plan, machine, c)
    head = head_seconds(model, plan, machine, c)
    stages = [n / model.layers * sum(layers.values()) for n in plan.stages(model.layers)]
    stages[-1] += sum(head.values())
    beside = sum(stages) / P
    sent = sent_seconds(model, plan, machine, beside, c)
    even = M * (beside + sent) / (1 - bubble_part(model, plan, machine, c))
    bubble = even - M * (beside + sent) + M * (max(stages) - beside)
    parts = {name: 0.0 for name in Step.__dataclass_fields__}
    for given in (layers, head):
        for name, seconds in given.items():
            parts[name] += seconds * M / P
    parts["data"], parts["optimizer"] = update_seconds(model, plan, machine, beside, c)
    parts |= {"pipeline": sent * M, "bubble": bubble, "rest": c.step_seconds}
    return Step(**parts)


def cost_per_token__tokens_for_a_dollar(model, sequence, machine, mfu, price):
    """Tokens of an hour first."""
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu={mfu} must be above 0, and 1 at most")
    tokens_an_hour = 3600 * mfu * machine.peak_flops / model.flops_per_token(sequence)
    return price / tokens_an_hour


def scaling_curve__plans_first(model, plan, machine, counts, weak=False):
    """All plans first, then their steps."""
    one, batch = plan.tp * plan.pp * plan.cp, plan.batch
    plans = []
    for gpus in counts:
        dp, rest = divmod(gpus, one)
        if rest:
            raise ValueError(f"{one} GPUs of a pipeline do not divide {gpus}")
        new = replace(plan, dp=dp)
        if not weak:
            micro_batches, rest = divmod(batch, dp * plan.micro_batch)
            if rest:
                raise ValueError(f"{dp} x {plan.micro_batch} does not divide the batch of {batch}")
            new = replace(new, micro_batches=micro_batches)
        plans.append(new)
    speeds = [step_time__counters(model, each, machine).tokens_per_second(each) for each in plans]
    return [(each.gpus, speed, speed / each.gpus / (speeds[0] / plans[0].gpus))
            for each, speed in zip(plans, speeds)]


def scaling_curve__one_pass(model, plan, machine, counts, weak=False):
    """One pass with asdict, and tokens over seconds."""
    curve, first = [], None
    for gpus in counts:
        if gpus % (plan.tp * plan.pp * plan.cp):
            raise ValueError(f"{gpus} GPUs are no multiple of tp x pp x cp")
        dp = gpus // (plan.tp * plan.pp * plan.cp)
        micro_batches = plan.micro_batches
        if not weak:
            if plan.batch % (dp * plan.micro_batch):
                raise ValueError(f"a batch of {plan.batch} does not go into {dp} data ranks")
            micro_batches = plan.batch // (dp * plan.micro_batch)
        changed = type(plan)(**asdict(plan) | {"dp": dp, "micro_batches": micro_batches})
        seconds = step_time__seconds_of_stages(model, changed, machine).total
        speed = changed.batch * changed.sequence / seconds
        first = first or speed / gpus
        curve.append((gpus, speed, speed / gpus / first))
    return curve
