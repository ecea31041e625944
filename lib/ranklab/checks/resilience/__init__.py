"""The exercises and predictions of lab 14, in the order of the lab."""

from ranklab.checks.resilience.policy import TIMES
from ranklab.checks.resilience.predictions import PREDICTIONS
from ranklab.checks.resilience.state import STATE

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = TIMES[:2] + STATE + TIMES[2:]
