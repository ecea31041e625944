"""search_layouts: all layouts that fit, the fastest first; or a sentence on why none does.
quick_search: nearly the best ones, for tables of many choices.
room: the bytes of a GPU that a plan may use.
distinct: the layouts worth a look, one of each kind.
"""

from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from ranklab.planner.memory import GpuMemory, memory_per_gpu
from ranklab.planner.plan import Plan
from ranklab.planner.space import ADVISED, RECOMPUTE, divisions, layouts, variants
from ranklab.planner.step import Step, step_time

RESERVE = 0.1  # of a GPU's memory: predictions of memory are off by more than 9% for one in ten
# published runs (python -m ranklab.projects.planner score)
KINDS = (("tool", "tp", "pp"),  # fields that distinguish layouts, first and then
         ("tool", "tp", "pp", "cp", "ep", "zero", "shard", "offload", "recompute", "outermost"))
QUICK_DIVISIONS = 8  # ways to divide the GPUs that quick_search looks at closely


class Found(NamedTuple):
    """A Plan with its memory and its step."""

    plan: Plan
    memory: GpuMemory
    step: Step


class NoLayout(ValueError):
    """No layout fits."""


def room(machine, reserve=RESERVE):
    """Return the bytes of a GPU that a plan may use if a share of the memory stays free."""
    return (1 - reserve) * machine.memory_bytes


def search_layouts(model, machine, gpus, sequence, batch, tools=ADVISED, watch=iter,
                   reserve=RESERVE):
    """Return [Found]: every layout of these tools that fits in a GPU, the fastest first.

    batch    sequences per step, over all GPUs
    watch    shows progress: for plan in watch(plans)
    reserve  the fraction of machine.memory_bytes that stays free: a plan fits if it needs at most
             the rest
    Raises: NoLayout, a ValueError, if no layout fits: the message gives the GB that the smallest
        one needs. Also if the tools have no layout at all for these GPUs and this batch.
    Lab: 13
    """
    candidates, least = [], None
    for plan in watch([plan for tool in tools
                       for plan in layouts(model, machine, gpus, sequence, batch, tool)]):
        memory = memory_per_gpu(model, plan, machine)
        if memory.total <= room(machine, reserve):
            candidates.append(Found(plan, memory, step_time(model, plan, machine)))
        elif least is None or memory.total < least[0]:
            least = memory.total, plan
    if not candidates:
        raise NoLayout(refusal(least, machine, gpus, batch, reserve))
    return sorted(candidates, key=lambda each: each.step.total)


def quick_search(model, machine, gpus, sequence, batch, tools=ADVISED, reserve=RESERVE):
    """Return [Found], the fastest first: search_layouts for the QUICK_DIVISIONS best ways to divide
    the GPUs, in about a tenth of the time.

    A division is ranked by its step with micro-batches of one sequence and the least recompute.
    Raises NoLayout if none fits, as search_layouts does.
    """
    too_large = []

    def fitting(plans):
        for plan in plans:
            memory = memory_per_gpu(model, plan, machine)
            if memory.total <= room(machine, reserve):
                yield Found(plan, memory, step_time(model, plan, machine))
            else:
                too_large.append((memory.total, plan))

    firsts = [next(fitting(replace(division, recompute=kind) for kind in RECOMPUTE[tool]), None)
              for tool in tools
              for division in divisions(model, machine, gpus, sequence, batch, tool)]
    best = sorted(filter(None, firsts), key=step_seconds)[:QUICK_DIVISIONS]
    if not best:
        least = min(too_large, key=lambda pair: pair[0], default=None)
        raise NoLayout(refusal(least, machine, gpus, batch, reserve))
    return sorted((layout for first in best for layout in fitting(variants(model, first.plan))),
                  key=step_seconds)


def step_seconds(layout):
    return layout.step.total


def fastest(*args, **options):
    """Return the first Found of search_layouts."""
    return search_layouts(*args, **options)[0]


def refusal(least, machine, gpus, batch, reserve=RESERVE):
    """Return a sentence on why there is no layout.

    least  (bytes, Plan) of the smallest one; None if there is none at all
    """
    if least is None:
        return (f"a batch of {batch} sequences can't be laid out on {gpus} GPUs: no layout divides "
                "it, or the model")
    nbytes, plan = least
    free = f", {reserve:.0%} of it left free" if reserve else ""
    return (f"no layout fits in the {machine.memory_bytes / 1e9:.0f} GB of a GPU{free}: the "
            f"smallest, {plan.words()} on {gpus} GPUs, needs {nbytes / 1e9:.1f} GB")


def distinct(candidates, top=5):
    """Return [Found]: `top` layouts of different kinds, the fastest first, and the best one of each
    tool.

    The layouts of a kind have the same tool, tp and pp; the fastest of them is shown. If there
    are too few kinds, more fields distinguish them.
    """
    selection = []
    for names in KINDS:
        kind, groups = attrgetter(*names), {}
        for layout in candidates:
            groups.setdefault(kind(layout.plan), []).append(layout)
        for best in sorted((min(group, key=rank) for group in groups.values()), key=rank):
            plans = [layout.plan for layout in selection]
            is_new = kind(best.plan) not in map(kind, plans)
            if is_new and (len(selection) < top
                           or best.plan.tool not in {plan.tool for plan in plans}):
                selection.append(best)
    return sorted(selection, key=rank)


def rank(layout):
    """Return the sort key of a layout: the fastest first, then the one with the least memory.
    """
    return layout.step.total, layout.memory.total
