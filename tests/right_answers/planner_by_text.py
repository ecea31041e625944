"""Lab 13: right answers that were written from the lab's text alone."""

import math
import random
from dataclasses import replace

from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.search import Found, NoLayout
from ranklab.planner.space import ADVISED, layouts, refuse
from ranklab.planner.step import head_seconds, step_time


def search_layouts__exhaustive(model, machine, gpus, sequence, batch, tools=ADVISED, watch=iter,
                               reserve=0.1):
    """All plans of layouts(), each also with parts of its layers recomputed; sorted by time."""
    plans = [plan for tool in tools
             for plan in layouts(model, machine, gpus, sequence, batch, tool)]
    room, least, found = machine.memory_bytes * (1 - reserve), math.inf, {}

    def attempt(plan):
        try:
            refuse(plan, model, machine, gpus, sequence, batch)
            memory = memory_per_gpu(model, plan, machine)
        except ValueError:
            return math.inf
        if memory.total <= room:
            found[plan] = Found(plan, memory, step_time(model, plan, machine))
        return memory.total

    for plan in watch(plans):
        least = min(least, attempt(plan))
        if plan.recompute != "none":
            deep = max(plan.stages(model.layers))
            for layers in {1, deep // 8, deep // 4, deep // 2, 3 * deep // 4} - {0, deep}:
                least = min(least, attempt(replace(plan, recomputed=layers / deep)))
    if not found:
        raise NoLayout("no layout of these tools can be had" if least == math.inf else
                       f"no layout fits: the smallest one needs {least / 1e9:.1f} GB of a GPU")
    return sorted(found.values(), key=lambda each: each.step.total)


def search_layouts__climbing(model, machine, gpus, sequence, batch, tools=ADVISED, watch=iter,
                             reserve=0.1):
    """Hill climbing from the best forty of each tool: one field at a time, while a step falls."""
    room, known, least = machine.memory_bytes * (1 - reserve), {}, [math.inf]

    def seconds(plan):
        if plan not in known:
            known[plan] = None
            try:
                refuse(plan, model, machine, gpus, sequence, batch)
                memory = memory_per_gpu(model, plan, machine)
                least[0] = min(least[0], memory.total)
                if memory.total <= room:
                    known[plan] = Found(plan, memory, step_time(model, plan, machine))
            except ValueError:
                pass
        return known[plan].step.total if known[plan] else math.inf

    def neighbours(plan):
        deep = max(plan.stages(model.layers))
        for kind in ("none", "selective", "operators", "full"):
            for layers in range(1, deep + 1, max(1, deep // 10)):
                part = 1.0 if kind == "none" else layers / deep
                yield replace(plan, recompute=kind, recomputed=part)
        for zero in range(4):
            for shard in (0, 2, 4, 8, 16, 32):
                yield replace(plan, zero=zero, shard=shard)
        for where in ("pipeline", "data"):
            yield replace(plan, outermost=where)
        if plan.tool == "deepspeed":
            yield replace(plan, offload=not plan.offload)
        for factor in (2, 4):
            if plan.micro_batches % factor == 0:
                yield replace(plan, micro_batch=plan.micro_batch * factor,
                              micro_batches=plan.micro_batches // factor)
            if plan.micro_batch % factor == 0:
                yield replace(plan, micro_batch=plan.micro_batch // factor,
                              micro_batches=plan.micro_batches * factor)
        for virtual in range(1, deep + 1):
            yield replace(plan, virtual=virtual,
                          schedule="interleaved" if virtual > 1 else "1f1b")

    for plan in watch([plan for tool in tools
                       for plan in layouts(model, machine, gpus, sequence, batch, tool)]):
        seconds(plan)
    for tool in tools:
        of_tool = [plan for plan in known if plan.tool == tool]
        for plan in sorted(of_tool, key=seconds)[:40]:
            best = seconds(plan)
            while True:
                step = min(neighbours(plan), key=seconds)
                if seconds(step) >= best:
                    break
                plan, best = step, seconds(step)
    found = [each for each in known.values() if each]
    if not found:
        raise NoLayout("no layout of these tools can be had" if least[0] == math.inf else
                       f"no layout fits: the smallest one needs {least[0] / 1e9:.1f} GB of a GPU")
    return sorted(found, key=lambda each: each.step.total)


def search_layouts__evolution(model, machine, gpus, sequence, batch, tools=ADVISED, watch=iter,
                              reserve=0.1):
    """Evolution: random changes of good plans for fifteen generations, after one of layouts()."""
    rng, room, seen, fit = random.Random(0), machine.memory_bytes * (1 - reserve), {}, []

    def born(plan):
        if plan in seen:
            return
        seen[plan] = math.inf
        try:
            refuse(plan, model, machine, gpus, sequence, batch)
            memory = memory_per_gpu(model, plan, machine)
        except ValueError:
            return
        seen[plan] = memory.total
        if memory.total <= room:
            fit.append(Found(plan, memory, step_time(model, plan, machine)))

    def changed(plan):
        way = rng.choice(("recompute", "recomputed", "zero", "shard", "virtual", "micro", "ranks"))
        if way == "recompute":
            return replace(plan, recompute=rng.choice(("none", "selective", "operators", "full")))
        if way == "recomputed":
            return replace(plan, recomputed=rng.randint(0, 20) / 20)
        if way == "zero":
            return replace(plan, zero=rng.randrange(4))
        if way == "shard":
            return replace(plan, shard=rng.choice((0, 2, 4, 8, 16, 32)))
        if way == "virtual":
            virtual = rng.randint(1, max(plan.stages(model.layers)))
            return replace(plan, virtual=virtual,
                           schedule="interleaved" if virtual > 1 else "1f1b")
        sizes = {name: getattr(plan, name) for name in ("dp", "tp", "pp", "cp")}
        micro = plan.micro_batch
        if way == "micro":
            micro = max(1, rng.choice((micro * 2, micro // 2)))
        else:
            one, two = rng.sample(sorted(sizes), 2)
            if sizes[one] % 2:
                return plan
            sizes[one], sizes[two] = sizes[one] // 2, sizes[two] * 2
        if batch % (sizes["dp"] * micro):
            return plan
        return replace(plan, **sizes, micro_batch=micro,
                       micro_batches=batch // (sizes["dp"] * micro),
                       sequence_parallel=sizes["tp"] > 1 and plan.sequence_parallel)

    for plan in watch([plan for tool in tools
                       for plan in layouts(model, machine, gpus, sequence, batch, tool)]):
        born(plan)
    least = min(seen.values(), default=math.inf)
    if not fit and least < math.inf:  # what almost fits may fit after a change
        for plan in sorted(seen, key=seen.get)[:50]:
            for _ in range(40):
                born(changed(plan))
    for _ in range(15 if fit else 0):
        elite = sorted(fit, key=lambda each: each.step.total)[:40]
        for parent in elite:
            for _ in range(12):
                child = changed(parent.plan)
                born(child)
                born(changed(child))
    least = min(seen.values(), default=math.inf)
    if not fit:
        raise NoLayout("no layout of these tools can be had" if least == math.inf else
                       f"no layout fits: the smallest one needs {least / 1e9:.1f} GB of a GPU")
    return sorted(fit, key=lambda each: each.step.total)


def fp8_speedup__from_the_stub(model, plan, machine):
    """From the stub's sentences, one after another."""
    if plan.precision != "bf16":
        raise ValueError("this plan is not in bf16")
    if machine.fp8 == 0:
        raise ValueError("this machine has no FP8")
    before = step_time(model, plan, machine)
    faster = machine.rate("fp8") / machine.rate("bf16")
    head = head_seconds(model, plan, machine)["products"] * plan.micro_batches / plan.pp
    layers = before.products - head
    again = layers / 3 * plan.rerun_share
    products = layers / faster + head
    recompute = before.recompute - again + again / faster
    messages = before.tensor + before.context + before.expert + before.weights
    busy = products + before.attention + before.other + recompute + messages
    was_busy = before.products + before.attention + before.other + before.recompute + messages
    bubble = before.bubble * busy / was_busy
    after = busy + bubble + before.pipeline + before.data + before.optimizer + before.rest
    return before.total / after
