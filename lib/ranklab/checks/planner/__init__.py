"""The exercises and predictions of lab 13, in the order of the lab.

    parts.py    what a GpuMemory or a Step shows
    memory.py   memory_per_gpu
    step.py     step_time
    cost.py     cost_per_token
    scaling.py  scaling_curve
    search.py   search_layouts: open, and judged by how fast its first layout is, so it has a check
                of its own
"""

from ranklab import planner
from ranklab.checks.exercise import Exercise
from ranklab.checks.planner.cost import COST
from ranklab.checks.planner.memory import MEMORY
from ranklab.checks.planner.predictions import PREDICTIONS
from ranklab.checks.planner.scaling import SCALING
from ranklab.checks.planner.search import check_search_layouts
from ranklab.checks.planner.step import STEP

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    MEMORY,
    STEP,
    COST,
    SCALING,
    Exercise(planner.search_layouts, check_search_layouts, hints=(
        "Which test rules out most plans, and is cheap?",
        "Ask for memory first, and ask step_time only about plans that fit. Begin with "
        "layouts(model, machine, gpus, sequence, batch, tool).",
        "The library leaves this out: take a fast plan that nearly fits, and raise `recomputed` "
        "from 0 until it does.",
    )),
)
