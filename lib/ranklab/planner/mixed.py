"""mixed_step: a step on several kinds of GPUs; each kind has data ranks of its own."""

import math
from dataclasses import replace
from typing import NamedTuple

from ranklab.planner.memory import GpuMemory, memory_per_gpu
from ranklab.planner.search import RESERVE, NoLayout, room
from ranklab.planner.space import ADVISED, kernels, layouts
from ranklab.planner.step import step_time


def mixed_plans(model, plan, parts, batch):
    """[Plan]: one for each (machine, GPUs) of `parts`. Each kind gets micro-batches so that all
    end at about the same time, and together they are the whole batch.

    plan   what all kinds share: tp, pp, cp, micro-batch; virtual stages take rounds of pp
    error  ValueError if tp x pp x cp does not divide the GPUs of a kind
    """
    whole = plan.tp * plan.pp * plan.cp
    if wrong := [gpus for _, gpus in parts if gpus % whole]:
        raise ValueError(f"tp x pp x cp = {whole} must divide the {wrong[0]} GPUs of a kind")
    ranks = [gpus // whole for _, gpus in parts]
    plans = [replace(plan, dp=dp, micro_batches=1, attention=kernels(machine))
             for dp, (machine, _) in zip(ranks, parts)]
    round_ = plan.pp if plan.virtual > 1 else 1
    if batch % plan.micro_batch or batch // plan.micro_batch < round_ * sum(ranks):
        raise ValueError(f"a batch of {batch} has not {round_} micro-batches of {plan.micro_batch} "
                         f"for each of {sum(ranks)} data ranks")

    def seconds(place, M):
        return step_time(model, replace(plans[place], micro_batches=M), parts[place][0]).total

    # nine tenths go by speed; then each round goes to the kind that will finish it first
    each = [seconds(place, 2 * plan.pp) - seconds(place, plan.pp) for place in range(len(parts))]
    fair = batch / plan.micro_batch / sum(dp / slow for dp, slow in zip(ranks, each))
    pieces = [max(1, int(0.9 * fair / slow) // round_) * round_ for slow in each]
    left = batch // plan.micro_batch - sum(M * dp for M, dp in zip(pieces, ranks))
    while left:
        room = [place for place in range(len(parts)) if round_ * ranks[place] <= left]
        if not room:
            raise ValueError(f"micro-batches of {plan.micro_batch} can't fill a batch of {batch} "
                             f"over {', '.join(map(str, ranks))} data ranks")
        place = min(room, key=lambda place: seconds(place, pieces[place] + round_))
        pieces[place] += round_
        left -= round_ * ranks[place]
    return [replace(each, micro_batches=M) for each, M in zip(plans, pieces)]


def mixed_step(model, plans, machines):
    """Seconds of a step: that of the slowest kind, with gradients over the slowest network."""
    slowest = min(each.network for each in machines)
    everyone = sum(plan.dp for plan in plans)
    longest = 0.0
    for plan, machine in zip(plans, machines):
        step = step_time(model, plan, machine)
        together = replace(plan, dp=everyone)
        data = step_time(model, together, replace(machine, network=slowest)).data
        longest = max(longest, step.total - step.data + data)
    return longest


class Mixed(NamedTuple):
    """A Plan for each kind of GPU, the memory of each, and seconds of a step."""

    plans: list
    memory: GpuMemory
    seconds: float


def search_mixed(model, parts, sequence, batch, tools=ADVISED, tried=20, reserve=RESERVE):
    """[Mixed], the fastest first: of the layouts that fit in all kinds of GPUs those `tried` that
    are fastest on the slowest kind.

    parts    [(machine, GPUs)]
    reserve  the share of a GPU's memory that stays free
    error    NoLayout
    """
    every, common = sum(gpus for _, gpus in parts), math.gcd(*(gpus for _, gpus in parts))
    slow = min((machine for machine, _ in parts), key=lambda machine: machine.bf16)
    most = min(room(machine, reserve) for machine, _ in parts)
    tensor = min(machine.node for machine, _ in parts)
    some = max(1, round(batch / every)) * common  # about the share of the batch of these GPUs
    found = []
    for plan in (plan for tool in tools
                 for plan in layouts(model, slow, common, sequence, some, tool)):
        memory = memory_per_gpu(model, replace(plan, dp=plan.dp * every // common), slow)
        if memory.total <= most and plan.tp <= tensor:
            found.append((step_time(model, plan, slow).total, memory, plan))
    rows = []
    for _, memory, plan in sorted(found, key=lambda each: each[0]):
        try:
            plans = mixed_plans(model, plan, parts, batch)
        except ValueError:
            continue
        rows.append(Mixed(plans, memory, mixed_step(model, plans, [each for each, _ in parts])))
        if len(rows) == tried:
            break
    if not rows:
        raise NoLayout(f"no layout of a batch of {batch} fits in {most / 1e9:.0f} GB of the "
                       f"smallest GPU and divides {' and '.join(str(gpus) for _, gpus in parts)}")
    return sorted(rows, key=lambda each: (each.seconds, each.memory.total))
