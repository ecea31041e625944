"""The exercises and predictions of lab 14, in the order of the lab."""

from ranklab.checks.resilience.policy import TIMES
from ranklab.checks.resilience.predictions import PREDICTIONS

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = TIMES
