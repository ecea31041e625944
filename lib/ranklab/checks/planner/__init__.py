"""The exercises and predictions of lab 13, in the order of the lab.

    parts.py    the parts of a GpuMemory or a Step
    cost.py     cost_per_token
    rough.py    rough_step_seconds: its score is the error on published runs, so it has its own
                check
    memory.py   memory_per_gpu
    step.py     step_time
    scaling.py  scaling_curve
    fp8.py      fp8_speedup (Further)
    search.py   search_layouts: open, and judged by the speed of its first layout, so it has its
                own check
"""

from ranklab.checks.planner.cost import COST
from ranklab.checks.planner.fp8 import FP8_SPEEDUP
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
    FP8_SPEEDUP,
)
