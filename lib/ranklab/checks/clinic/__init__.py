"""The exercises and predictions of lab 16, in the order of the lab; the checks of all programs.

    runs.py      how each fixed program is run and compared; read it first
    hangs.py, slowdowns.py, silent_errors.py, sharding.py, run_state.py
                 the checks of the programs in clinic/, in files of the same names
    detectors.py the checks of the four detectors
    causes.py    the predictions: which cause is it, and what speaks against the others?
    bugs.py      exercises and predictions by name, for the labs that use them
"""

from ranklab.checks.clinic.bugs import exercises, predictions
from ranklab.checks.clinic.causes import FLIGHT

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = exercises(
    "train_with_owners", "first_difference", "train_on_a_grid", "circle_of_waits",
    "train_until_good", "moving_curve", "half_digits", "long_steps", "own_limit", "steps_behind",
    "validated_digits", "stored_digits")
PREDICTIONS = (*predictions(
    "train_with_owners", "train_on_a_grid", "train_until_good", "moving_curve", "half_digits",
    "long_steps", "validated_digits", "stored_digits"), FLIGHT)
