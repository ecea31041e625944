"""search_layouts: all layouts that fit, the fastest first; or a sentence that says why none does.
room: the bytes of a GPU that a plan may take.
distinct: the layouts among them that are worth a look.
"""

from operator import attrgetter
from typing import NamedTuple

from ranklab.planner.memory import GpuMemory, memory_per_gpu
from ranklab.planner.plan import Plan
from ranklab.planner.space import ADVISED, layouts
from ranklab.planner.step import Step, step_time

RESERVE = 0.1  # of a GPU's memory: predictions of memory are off by more than 9% for one in ten
# published runs (python -m ranklab.projects.planner score)
KINDS = (("tool", "tp", "pp"),  # what tells layouts apart first, and then
         ("tool", "tp", "pp", "cp", "ep", "zero", "shard", "offload", "recompute", "outermost"))


class Found(NamedTuple):
    """A Plan with its memory and its step."""

    plan: Plan
    memory: GpuMemory
    step: Step


def room(machine, reserve=RESERVE):
    """The bytes of a GPU that a plan may take, if a share of the memory stays free."""
    return (1 - reserve) * machine.memory_bytes


def search_layouts(model, machine, gpus, sequence, batch, tools=ADVISED, watch=iter,
                   reserve=RESERVE):
    """Return [Found]: every layout of these tools that fits in a GPU, the fastest first.

    batch    sequences of a step, over all GPUs
    watch    shows progress: for plan in watch(plans)
    reserve  the share of machine.memory_bytes that stays free: a plan fits if it needs at most the
             rest
    error    NoLayout, a ValueError, if no layout fits; it says how many GB the smallest one needs.
             Also where the tools have no layout at all for these GPUs and this batch
    lab      13
    """
    found, least = [], None
    for plan in watch([plan for tool in tools
                       for plan in layouts(model, machine, gpus, sequence, batch, tool)]):
        memory = memory_per_gpu(model, plan, machine)
        if memory.total <= room(machine, reserve):
            found.append(Found(plan, memory, step_time(model, plan, machine)))
        elif least is None or memory.total < least[0]:
            least = memory.total, plan
    if not found:
        raise NoLayout(refusal(least, machine, gpus, batch, reserve))
    return sorted(found, key=lambda each: each.step.total)


def fastest(*asked, **how):
    """The first Found of search_layouts."""
    return search_layouts(*asked, **how)[0]


def distinct(found, top=5):
    """[Found]: `top` layouts of different kinds, the fastest first, and the best one of each tool.

    The layouts of a kind have the same tool, tp and pp, and the fastest of them is shown. If there
    are too few kinds, more fields tell them apart.
    """
    shown = []
    for names in KINDS:
        kind, groups = attrgetter(*names), {}
        for each in found:
            groups.setdefault(kind(each.plan), []).append(each)
        for row in sorted((min(group, key=rank) for group in groups.values()), key=rank):
            known = [each.plan for each in shown]
            is_new = kind(row.plan) not in map(kind, known)
            if is_new and (len(shown) < top
                           or row.plan.tool not in {plan.tool for plan in known}):
                shown.append(row)
    return sorted(shown, key=rank)


def rank(found):
    """The sort key of layouts: the fastest first, and of equals the one with the least memory."""
    return found.step.total, found.memory.total


class NoLayout(ValueError):
    """No layout fits."""


def refusal(least, machine, gpus, batch, reserve=RESERVE):
    """Why there is no layout: a sentence."""
    if least is None:
        return (f"a batch of {batch} sequences can't be laid out on {gpus} GPUs: no layout divides "
                "it, or the model")
    nbytes, plan = least
    free = f", {reserve:.0%} of it left free" if reserve else ""
    return (f"no layout fits in the {machine.memory_bytes / 1e9:.0f} GB of a GPU{free}: the "
            f"smallest, {plan.words()} on {gpus} GPUs, needs {nbytes / 1e9:.1f} GB")
