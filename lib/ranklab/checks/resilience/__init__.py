"""The exercises and predictions of lab 14, in the order of the lab."""

from ranklab.checks.resilience.state import STATE

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = STATE
PREDICTIONS = ()
