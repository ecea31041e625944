"""mixed_step: a step on several kinds of GPUs; each kind has its own data ranks."""

import math
from dataclasses import replace
from typing import NamedTuple

from ranklab.planner.memory import GpuMemory, memory_per_gpu
from ranklab.planner.search import RESERVE, NoLayout, room
from ranklab.planner.space import ADVISED, kernels, layouts
from ranklab.planner.step import step_time


def mixed_plans(model, plan, parts, batch):
    """Return [Plan]: one for each (machine, GPUs) of `parts`. The whole batch is divided among the
    kinds so that all end at about the same time.

    plan   the settings that all kinds share: tp, pp, cp, micro-batch; virtual stages take rounds
           of pp
    Raises ValueError if tp x pp x cp does not divide the GPUs of a kind, or if the batch is too
    small or can't be filled.
    """
    replica = plan.tp * plan.pp * plan.cp
    if uneven := [gpus for _, gpus in parts if gpus % replica]:
        raise ValueError(f"tp x pp x cp = {replica} must divide the {uneven[0]} GPUs of a kind")
    ranks = [gpus // replica for _, gpus in parts]
    plans = [replace(plan, dp=dp, micro_batches=1, attention=kernels(machine))
             for dp, (machine, _) in zip(ranks, parts)]
    round_ = plan.pp if plan.virtual > 1 else 1
    if batch % plan.micro_batch or batch // plan.micro_batch < round_ * sum(ranks):
        raise ValueError(f"a batch of {batch} has not {round_} micro-batches of {plan.micro_batch} "
                         f"for each of {sum(ranks)} data ranks")

    def seconds(kind, M):
        return step_time(model, replace(plans[kind], micro_batches=M), parts[kind][0]).total

    # nine tenths are divided by speed; then each round goes to the kind that will finish it first
    slowness = [seconds(kind, 2 * plan.pp) - seconds(kind, plan.pp) for kind in range(len(parts))]
    fair = batch / plan.micro_batch / sum(dp / slow for dp, slow in zip(ranks, slowness))
    pieces = [max(1, int(0.9 * fair / slow) // round_) * round_ for slow in slowness]
    remainder = batch // plan.micro_batch - sum(M * dp for M, dp in zip(pieces, ranks))
    while remainder:
        open_kinds = [kind for kind in range(len(parts)) if round_ * ranks[kind] <= remainder]
        if not open_kinds:
            raise ValueError(f"micro-batches of {plan.micro_batch} can't fill a batch of {batch} "
                             f"over {', '.join(map(str, ranks))} data ranks")
        kind = min(open_kinds, key=lambda kind: seconds(kind, pieces[kind] + round_))
        pieces[kind] += round_
        remainder -= round_ * ranks[kind]
    return [replace(plan, micro_batches=M) for plan, M in zip(plans, pieces)]


def mixed_step(model, plans, machines):
    """Return the seconds of a step: the slowest kind's, with gradients over the slowest network.
    """
    network = min(machine.network for machine in machines)
    data_ranks = sum(plan.dp for plan in plans)
    longest = 0.0
    for plan, machine in zip(plans, machines):
        step = step_time(model, plan, machine)
        together = replace(plan, dp=data_ranks)
        data = step_time(model, together, replace(machine, network=network)).data
        longest = max(longest, step.total - step.data + data)
    return longest


class Mixed(NamedTuple):
    """A Plan for each kind of GPU, the memory of each, and seconds of a step."""

    plans: list
    memory: GpuMemory
    seconds: float


def search_mixed(model, parts, sequence, batch, tools=ADVISED, tried=20, reserve=RESERVE):
    """Return [Mixed], the fastest first: of the layouts that fit on all kinds of GPUs, the `tried`
    layouts that are fastest on the slowest kind.

    parts    [(machine, GPUs)]
    reserve  the share of a GPU's memory that stays free
    Raises NoLayout if there is none.
    """
    gpus, common = sum(gpus for _, gpus in parts), math.gcd(*(gpus for _, gpus in parts))
    machines = [machine for machine, _ in parts]
    slowest = min(machines, key=lambda machine: machine.bf16)
    smallest_room = min(room(machine, reserve) for machine in machines)
    tensor = min(machine.node for machine in machines)
    share = max(1, round(batch / gpus)) * common  # about the share of the batch of these GPUs
    candidates = []
    for plan in (plan for tool in tools
                 for plan in layouts(model, slowest, common, sequence, share, tool)):
        memory = memory_per_gpu(model, replace(plan, dp=plan.dp * gpus // common), slowest)
        if memory.total <= smallest_room and plan.tp <= tensor:
            candidates.append((step_time(model, plan, slowest).total, memory, plan))
    rows = []
    for _, memory, plan in sorted(candidates, key=lambda row: row[0]):
        try:
            plans = mixed_plans(model, plan, parts, batch)
        except ValueError:
            continue
        rows.append(Mixed(plans, memory, mixed_step(model, plans, machines)))
        if len(rows) == tried:
            break
    if not rows:
        raise NoLayout(f"no layout of a batch of {batch} fits in {smallest_room / 1e9:.0f} GB of "
                       f"the smallest GPU and divides {' and '.join(str(n) for _, n in parts)}")
    return sorted(rows, key=lambda row: (row.seconds, row.memory.total))
