"""The exercises and predictions of lab 13, in the order of the lab."""

from ranklab import planner
from ranklab.checks.exercise import Exercise
from ranklab.checks.planner.cost import COST
from ranklab.checks.planner.memory import MEMORY
from ranklab.checks.planner.predictions import PREDICTIONS
from ranklab.checks.planner.scale import check_scaling_curve
from ranklab.checks.planner.search import check_search_layouts
from ranklab.checks.planner.step import STEP

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    MEMORY,
    STEP,
    COST,
    Exercise(planner.scaling_curve, check_scaling_curve, hints=(
        "Which field of the plan changes with the number of GPUs, and which other one must follow?",
        "dp = GPUs / (tp x pp x cp). Weak: micro_batches stay. Strong: there are plan.batch / "
        "(dp * micro_batch) of them.",
        "each = replace(plan, dp=dp, micro_batches=pieces); speed = step_time(model, each, "
        "machine).tokens_per_second(each); efficiency = speed / gpus / (first / counts[0])",
    )),
    Exercise(planner.search_layouts, check_search_layouts, hints=(
        "Which test rules out most plans, and is cheap?",
        "Ask for memory first, and ask step_time only about plans that fit. Begin with "
        "layouts(model, machine, gpus, sequence, batch, tool).",
        "The library leaves this out: take a fast plan that nearly fits, and raise `recomputed` "
        "from 0 until it does.",
    )),
)
