"""The exercises and predictions of lab 13, in the order of the lab.

    parts.py    what a GpuMemory or a Step shows
    cost.py     cost_per_token
    rough.py    rough_step_seconds: its score is the error on published runs, so it has a check of
                its own
    memory.py   memory_per_gpu
    step.py     step_time
    scaling.py  scaling_curve
    search.py   search_layouts: open, and judged by how fast its first layout is, so it has a check
                of its own
"""

from ranklab.checks.planner.cost import COST
from ranklab.checks.planner.memory import MEMORY
from ranklab.checks.planner.predictions import PREDICTIONS
from ranklab.checks.planner.rough import ROUGH
from ranklab.checks.planner.scaling import SCALING
from ranklab.checks.planner.search import SEARCH
from ranklab.checks.planner.step import STEP

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    COST,
    ROUGH,
    MEMORY,
    STEP,
    SCALING,
    SEARCH,
)
