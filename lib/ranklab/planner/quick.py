"""quick_search: nearly the best layouts, for tables of many choices."""

from dataclasses import replace

from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.search import RESERVE, Found, NoLayout, refusal, room
from ranklab.planner.space import ADVISED, RECOMPUTE, divisions, variants
from ranklab.planner.step import step_time

TRIED = 8  # divisions


def quick_search(model, machine, gpus, sequence, batch, tools=ADVISED, reserve=RESERVE):
    """[Found], the fastest first: search_layouts for the TRIED best ways to divide the GPUs.

    A division is ranked by its step with micro-batches of one sequence and the least recompute.
    error  NoLayout if none fits, as in search_layouts
    """
    large = []

    def fitting(plans):
        for plan in plans:
            memory = memory_per_gpu(model, plan, machine)
            if memory.total <= room(machine, reserve):
                yield Found(plan, memory, step_time(model, plan, machine))
            else:
                large.append((memory.total, plan))

    firsts = [next(fitting(replace(division, recompute=each) for each in RECOMPUTE[tool]), None)
              for tool in tools
              for division in divisions(model, machine, gpus, sequence, batch, tool)]
    best = sorted(filter(None, firsts), key=seconds)[:TRIED]
    if not best:
        least = min(large, key=lambda each: each[0], default=None)
        raise NoLayout(refusal(least, machine, gpus, batch, reserve))
    return sorted((each for first in best for each in fitting(variants(model, first.plan))),
                  key=seconds)


def seconds(found):
    return found.step.total
