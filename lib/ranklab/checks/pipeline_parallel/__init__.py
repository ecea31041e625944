"""The exercises and predictions of lab 09, in the order of the lab.

    schedules.py          schedules: whether they can run, and what they cost
    numbers.py            numbers computed from a schedule; where a model is cut
    refusals.py           invalid arguments
    pipeline_executor.py  StageExecutor, PipelineExecutor: they run schedules of all kinds
"""

from ranklab.checks.clinic import bugs
from ranklab.checks.pipeline_parallel.numbers import BUBBLE, IN_FLIGHT, SPLIT, STALE
from ranklab.checks.pipeline_parallel.pipeline_executor import EXECUTOR, STAGES
from ranklab.checks.pipeline_parallel.predictions import PREDICTIONS as NUMBERS
from ranklab.checks.pipeline_parallel.schedules import (
    GPIPE, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE,
)

__all__ = ["EXERCISES", "PREDICTIONS"]

BUGS = "staged_gpt",
EXERCISES = (
    GPIPE,
    BUBBLE,
    ONE_F_ONE_B,
    STAGES,
    EXECUTOR,
    INTERLEAVED,
    ZERO_BUBBLE,
    SPLIT,
    IN_FLIGHT,
    STALE,
    *bugs.exercises(*BUGS),
)
PREDICTIONS = (*NUMBERS, *bugs.predictions(*BUGS))
