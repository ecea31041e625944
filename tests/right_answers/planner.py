"""Lab 13: right answers that differ from the library's. Each must pass."""

import heapq
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from ranklab.planner.constants import CONSTANTS
from ranklab.planner.cost import cost_per_token
from ranklab.planner.memory import (
    GpuMemory, buffer_bytes, in_flight, kept_bytes, memory_per_gpu, numbers_of, ours, states,
)
from ranklab.planner.search import RESERVE, Found, NoLayout, step_time
from ranklab.planner.space import ADVISED, layouts, refuse
from ranklab.planner.step import (
    Step, bubble_part, head_seconds, layer_seconds, sent_seconds, update_seconds,
)


def rough_step_seconds__a_micro_batch_at_a_time(model, plan, machine):
    """Times a micro-batch on a stage, and counts how many of them fit one after another."""
    rate = 0.5 * machine.peak_flops
    numbers = 6 * model.active + 12 * model.layers * plan.sequence * model.heads * model.head_size
    if plan.recompute == "full":
        numbers *= 8 / 6
    of_chunk = (plan.micro_batch * plan.sequence * numbers / rate
                / (plan.tp * plan.cp * plan.pp * plan.virtual))
    return of_chunk * (plan.micro_batches * plan.virtual + plan.pp - 1)


def rough_step_seconds__from_dollars(model, plan, machine):
    """A GPU that costs a dollar a second: the cost of a token is its seconds."""
    of_token = cost_per_token(model, plan.sequence, machine, 0.55, 3600)
    busy = of_token * plan.batch * plan.sequence / plan.gpus
    again = busy / 3 if plan.recompute == "full" else 0.0
    part = (plan.pp - 1) / (plan.micro_batches * plan.virtual + plan.pp - 1)
    return (busy + again) / (1 - part)


def rough_step_seconds__or_the_network(model, plan, machine):
    """The longer of computing and sending gradients of 16 bits once around a ring."""
    flops = model.flops_per_token(plan.sequence) * (4 / 3 if plan.recompute == "full" else 1)
    tokens = plan.dp * plan.micro_batch * plan.micro_batches * plan.sequence
    seconds = flops * tokens / (machine.peak_flops * plan.gpus) / 0.51
    seconds *= 1 + (plan.pp - 1) / plan.micro_batches / plan.virtual
    sent = 2 * 2 * model.parameters / (plan.tp * plan.pp) * (plan.dp - 1) / plan.dp
    return max(seconds, sent / machine.network) if plan.gpus > machine.node else seconds


def memory_per_gpu__every_rank(model, plan, machine, tool=None, constants=CONSTANTS):
    """All ranks are asked, and the last one gets its logits afterwards."""
    tool = tool if tool is not None else plan.tool
    if tool == "ours":
        return ours(model, plan, constants)
    best = None
    for rank in reversed(range(plan.pp)):
        dense, sparse = numbers_of(model, plan, rank)
        a, b, c = states(plan, tool, dense, min(plan.shard or plan.dp * plan.cp, plan.dp * plan.cp))
        if sparse:
            more = states(plan, tool, sparse, plan.dp * plan.cp * plan.tp // plan.ep)
            a, b, c = a + more[0], b + more[1], c + more[2]
        kept = 0
        for _ in range(plan.stages(model.layers)[rank]):
            kept += kept_bytes(model, plan, tool) * in_flight(plan, rank)
        if plan.recompute != "none":
            kept += 2 * kept_bytes(model, plan, tool, "none")
        logits = 0
        if rank == plan.pp - 1:
            logits = (8 + 4 * (tool == "torchtitan")) * plan.tokens * model.vocab / plan.tp
        mine = GpuMemory(
            weights=a, gradients=b, optimizer=0 if plan.offload else c, activations=kept,
            logits=logits, buffers=buffer_bytes(model, plan, tool, dense),
            context=constants.context_bytes, allowance=(kept + logits) * constants.gaps)
        if best is None or mine.total > best.total:
            best = mine
    return best


def memory_per_gpu__by_tensors(model, plan, machine, tool=None, constants=CONSTANTS):
    """One row for each rank, and the row whose sum is largest."""
    tool = tool or plan.tool
    if tool == "ours":
        return ours(model, plan, constants)
    layers, rows = torch.tensor(plan.stages(model.layers), dtype=torch.float64), []
    waits = torch.tensor([in_flight(plan, rank) for rank in range(plan.pp)], dtype=torch.float64)
    activations = layers * waits * kept_bytes(model, plan, tool)
    activations += 2 * kept_bytes(model, plan, tool, "none") * (plan.recompute != "none")
    for rank in range(plan.pp):
        numbers, experts = numbers_of(model, plan, rank)
        held = torch.tensor([states(plan, tool, numbers, plan.sharders), states(
            plan, tool, experts, max(1, plan.copies * plan.tp // plan.ep))],
            dtype=torch.float64).sum(0)
        held[2] *= not plan.offload
        logits = plan.tokens * model.vocab / plan.tp * ({"torchtitan": 12}.get(tool, 8))
        comes = torch.tensor([activations[rank], logits * (rank == plan.pp - 1)],
                             dtype=torch.float64)
        rows.append(torch.cat([held, comes, torch.tensor(
            [buffer_bytes(model, plan, tool, numbers), constants.context_bytes,
             constants.gaps * comes.sum()], dtype=torch.float64)]))
    return GpuMemory(*max(rows, key=torch.sum))


def memory_per_gpu__a_table_of_ranks(model, plan, machine, tool=None, constants=CONSTANTS):
    """numpy's columns over ranks; the row of the largest sum, in numpy's own floats."""
    tool = plan.tool if tool is None else tool
    if tool == "ours":
        return ours(model, plan, constants)
    ranks = range(plan.pp)
    pairs = [numbers_of(model, plan, rank) for rank in ranks]
    same = max(plan.dp * plan.cp * plan.tp // plan.ep, 1)
    held = np.array([states(plan, tool, dense, plan.sharders) for dense, _ in pairs], float)
    held += np.array([states(plan, tool, experts, same) for _, experts in pairs])
    held[:, 2] = 0 if plan.offload else held[:, 2]
    waiting = np.array([in_flight(plan, rank) * n
                        for rank, n in zip(ranks, plan.stages(model.layers))], float)
    again = 2 * kept_bytes(model, plan, tool, "none") if plan.recompute != "none" else 0
    activations = waiting * kept_bytes(model, plan, tool) + again
    logits = np.zeros(plan.pp)
    logits[-1] = plan.tokens * model.vocab / plan.tp * (12 if tool == "torchtitan" else 8)
    buffers = [buffer_bytes(model, plan, tool, dense) for dense, _ in pairs]
    rows = np.column_stack([held, activations, logits, buffers,
                            np.full(plan.pp, constants.context_bytes),
                            constants.gaps * (activations + logits)])
    return GpuMemory(*rows[rows.sum(axis=1).argmax()])


def step_time__stage_by_stage(model, plan, machine, constants=CONSTANTS):
    """Each stage's own seconds; the average is their sum by pp, the waiting their largest."""
    layers = layer_seconds(model, plan, machine, constants)
    head = head_seconds(model, plan, machine, constants)
    each = math.fsum(layers.values()) / model.layers
    stages = [n * each for n in plan.stages(model.layers)]
    stages[-1] += head["products"] + head["other"]
    average = sum(stages) / plan.pp
    sent = sent_seconds(model, plan, machine, average, constants)
    whole = (average + sent) / (1 - bubble_part(model, plan, machine, constants))
    bubble = plan.micro_batches * (whole - average - sent + max(stages) - average)
    data, optimizer = update_seconds(model, plan, machine, average, constants)
    parts = dict(layers)
    for part in head:
        parts[part] += head[part]
    for part in parts:
        parts[part] *= plan.micro_batches / plan.pp
    return Step(pipeline=plan.micro_batches * sent, bubble=bubble, data=data, optimizer=optimizer,
                rest=constants.step_seconds, **parts)


def step_time__in_numpy(model, plan, machine, constants=CONSTANTS):
    """Parts as an array; a bubble of none where there is one stage."""
    M, P = plan.micro_batches, plan.pp
    layers = layer_seconds(model, plan, machine, constants)
    head = head_seconds(model, plan, machine, constants)
    all_layers = np.array(list(layers.values()))
    parts = M * (all_layers + np.array([head.get(part, 0.0) for part in layers])) / P
    busy, ends = parts.sum(), sum(head.values())
    sent = M * sent_seconds(model, plan, machine, busy / M, constants) if P > 1 else 0
    bubble = np.float64(0)
    if P > 1:
        of_stages = np.array(plan.stages(model.layers)) * all_layers.sum() / model.layers
        of_stages[-1] += ends
        part = bubble_part(model, plan, machine, constants)
        bubble = (busy + sent) / (1 / part - 1) if part else bubble
        bubble = bubble + M * of_stages.max() - busy
    data, optimizer = update_seconds(model, plan, machine, busy / M, constants)
    return Step(*parts, sent, bubble, data, optimizer, constants.step_seconds)


def step_time__one_micro_batch_after_the_other(model, plan, machine, constants=CONSTANTS):
    """Adds up M times; the whole pipeline's time comes first, and the bubble is what is left."""
    M, P = plan.micro_batches, plan.pp
    layers = layer_seconds(model, plan, machine, constants)
    head = head_seconds(model, plan, machine, constants)
    parts, sent = dict.fromkeys(layers, 0.0), 0.0
    one = sum(layers.values()) / P + sum(head.values()) / P
    for _ in range(M):
        for part, seconds in layers.items():
            parts[part] += (seconds + head.get(part, 0)) / P
        sent += sent_seconds(model, plan, machine, one, constants)
    busy = math.fsum(parts.values())
    whole = (busy + sent) / (1 - bubble_part(model, plan, machine, constants))
    of_a_layer, fullest = sum(layers.values()) / model.layers, 0.0
    for rank, number in enumerate(plan.stages(model.layers)):
        own = number * of_a_layer + (sum(head.values()) if rank + 1 == P else 0)
        fullest = max(fullest, own)
    data, optimizer = update_seconds(model, plan, machine, one, constants)
    return Step(**parts, pipeline=sent, bubble=whole - busy - sent + M * fullest - busy, data=data,
                optimizer=optimizer, rest=constants.step_seconds)


def cost_per_token__seconds_of_a_token(model, sequence, machine, mfu, price):
    """The seconds that a token takes at the peak; torch's numbers."""
    if not (mfu > 0 and mfu <= 1):
        raise ValueError(f"MFU {mfu:.0%}")
    seconds = torch.tensor(model.flops_per_token(sequence) / machine.peak_flops / mfu,
                           dtype=torch.float64)
    return (seconds * price / 3600).item()


def cost_per_token__of_an_hour(model, sequence, machine, mfu, price):
    """The tokens of an hour's FLOPs; attention by hand."""
    if mfu <= 0 or mfu > 1:
        raise ValueError(f"an MFU of {mfu}")
    each = 6 * model.active + 12 * model.layers * model.heads * model.head_size * sequence
    return price / (3600 * mfu * machine.peak() / each)


def scaling_curve__two_passes(model, plan, machine, counts, weak=False):
    """All plans first; an efficiency is seconds of a GPU for a token beside the first one's."""
    whole, plans = plan.tp * plan.pp * plan.cp, []
    for gpus in counts:
        if gpus % whole or gpus < whole:
            raise ValueError(f"{gpus} GPUs")
        dp = gpus // whole
        pieces = Fraction(plan.micro_batches) if weak else Fraction(
            plan.batch, dp * plan.micro_batch)
        if pieces.denominator > 1:
            raise ValueError(f"{pieces} micro-batches")
        plans.append(replace(plan, dp=dp, micro_batches=int(pieces)))
    seconds = [step_time(model, each, machine).total for each in plans]
    tokens = [each.batch * each.sequence for each in plans]
    of_a_gpu = [t / s / each.gpus for t, s, each in zip(tokens, seconds, plans)]
    return [(each.gpus, t / s, rate / of_a_gpu[0])
            for each, t, s, rate in zip(plans, tokens, seconds, of_a_gpu)]


def scaling_curve__by_recursion(model, plan, machine, counts, weak=False):
    """The first count's rate is handed on; a generator makes the list."""
    def points(counts, first=None):
        if not counts:
            return
        gpus, *rest = counts
        dp = gpus * plan.dp / plan.gpus
        pieces = plan.micro_batches * (1 if weak else plan.dp / dp) if dp >= 1 else 0.5
        if dp != int(dp) or pieces != int(pieces) or pieces < 1:
            raise ValueError(f"{gpus} GPUs make {dp} data ranks with {pieces} micro-batches")
        each = replace(plan, dp=int(dp), micro_batches=int(pieces))
        tokens = each.batch * each.sequence / step_time(model, each, machine).total
        first = first or tokens / gpus
        yield gpus, tokens, tokens / gpus / first
        yield from points(rest, first)

    return list(points(list(counts)))


def scaling_curve__arrays(model, plan, machine, counts, weak=False):
    """numpy for all counts; tuples of numpy's numbers."""
    counts = np.array(counts)
    dp = counts // (plan.tp * plan.pp * plan.cp)
    if (dp * plan.tp * plan.pp * plan.cp != counts).any() or (dp == 0).any():
        raise ValueError("GPUs that do not divide")
    pieces = np.full(len(counts), plan.micro_batches)
    if not weak:
        pieces = plan.batch // (dp * plan.micro_batch)
        if (pieces * dp * plan.micro_batch != plan.batch).any():
            raise ValueError("a batch that does not divide")
    speed = np.array([step_time(model, each, machine).tokens_per_second(each) for each in (
        replace(plan, dp=int(d), micro_batches=int(p)) for d, p in zip(dp, pieces))])
    efficiency = speed * counts[0] / (speed[0] * counts)
    return [(int(n), s, e) for n, s, e in zip(counts, speed, efficiency)]


def search_layouts__fastest_first(model, machine, gpus, sequence, batch, tools=ADVISED, watch=iter,
                                  reserve=RESERVE):
    """Times of all come first, and memory is asked along the sorted list until twenty fit."""
    plans = [plan for tool in tools
             for plan in watch(layouts(model, machine, gpus, sequence, batch, tool))]
    heap = [(step_time(model, plan, machine).total, number) for number, plan in enumerate(plans)]
    heapq.heapify(heap)
    found, least = [], math.inf
    while heap and len(found) < 20:
        _, number = heapq.heappop(heap)
        memory = memory_per_gpu(model, plans[number], machine)
        least = min(least, memory.total)
        if memory.total <= machine.memory_bytes * (1 - reserve):
            found.append(Found(plans[number], memory, step_time(model, plans[number], machine)))
    if not found:
        raise NoLayout(f"{least:.0f} bytes are needed")
    return found


def search_layouts__recomputes_a_share(model, machine, gpus, sequence, batch, tools=ADVISED,
                                       watch=iter, reserve=0.1):
    """Of each layout also: a share of the layers is recomputed, states are sharded in a node, data
    ranks lie outermost. Faster than the library's for Mixtral and for long sequences.
    """
    found, least = [], None

    def look(plan):
        nonlocal least
        memory = memory_per_gpu(model, plan, machine)
        if least is None or memory.total < least:
            least = memory.total
        if fits := memory.total <= machine.memory_bytes - reserve * machine.memory_bytes:
            found.append(Found(plan, memory, step_time(model, plan, machine)))
        return fits

    for plan in watch([plan for tool in tools
                       for plan in layouts(model, machine, gpus, sequence, batch, tool)]):
        look(plan)
        if plan.recompute != "none":
            any(look(replace(plan, recomputed=share / 8)) is False for share in range(7, 0, -1))
        if plan.zero == 3 and plan.copies > machine.node:
            look(replace(plan, shard=machine.node))
        if plan.dp > 1 and plan.pp > 1 and plan.outermost == "pipeline":
            look(replace(plan, outermost="data"))
    if not found:
        if least is None:
            raise NoLayout("no layout divides this")
        raise NoLayout(f"{least / 1e9:.1f} GB are needed, and a GPU has {machine.memory_bytes:.2e}")
    found.sort(key=lambda each: each.step.total)
    for each in found[:3]:
        refuse(each.plan, model, machine, gpus, sequence, batch)
    return found


def fp8_speedup__a_new_step(model, plan, machine):
    """A Step whose products, second forwards and bubble are new; the rest is the old one's."""
    if plan.precision != "bf16" or machine.fp8 <= 0:
        raise ValueError(f"{plan.precision} on {machine.name}")
    old, part = step_time(model, plan, machine), plan.micro_batches / plan.pp
    ratio = Fraction(machine.rate("bf16")) / Fraction(machine.rate("fp8"))
    layers = part * layer_seconds(model, plan, machine)["products"]
    new = replace(old, products=old.products - layers + layers * float(ratio),
                  recompute=old.recompute - (1 - float(ratio)) * layers * plan.rerun_share / 3,
                  bubble=0)
    outside = sum((old.pipeline, old.data, old.optimizer, old.rest))
    factor = (new.total - outside) / (old.total - outside - old.bubble)
    return old.total / replace(new, bubble=factor * old.bubble).total


def fp8_speedup__shares_of_the_law(model, plan, machine):
    """Amdahl's law as it is written down: 1 / (1 - s + s / f), twice, for busy and for waiting."""
    for is_so in (plan.precision == "bf16", machine.fp8 != 0):
        if not is_so:
            raise ValueError("from bf16 to FP8, on a GPU that has both")
    step = step_time(model, plan, machine)
    parts = {name: getattr(step, name) for name in Step.__dataclass_fields__}
    once = sum(parts.pop(name) for name in ("pipeline", "data", "optimizer", "rest"))
    bubble = parts.pop("bubble")
    busy = math.fsum(parts.values())
    head = head_seconds(model, plan, machine)["products"] / plan.pp * plan.micro_batches
    share = (parts["products"] - head) * (3 + plan.rerun_share) / 3 / busy
    gain = 1 / (1 - share + share * machine.bf16 / machine.fp8)
    share = (busy + bubble) / (busy + bubble + once)
    return 1 / (1 - share + share / gain)
