"""The clinic's exercises and predictions by name, for the labs that use them.

A program of the clinic is an exercise of lab 16, or a bug of the lab whose idea it breaks.
"""

import functools
from dataclasses import replace

from ranklab.checks.clinic.causes import PREDICTIONS
from ranklab.checks.clinic.detectors import DETECTORS
from ranklab.checks.clinic.hangs import HANGS
from ranklab.checks.clinic.run_state import RUN_STATE
from ranklab.checks.clinic.sharding import SHARDING
from ranklab.checks.clinic.silent_errors import SILENT_ERRORS
from ranklab.checks.looks import expect
from ranklab.clinic.all_cases import CASE


def exercises(*names):
    """Return the exercises of these programs and detectors, in this order."""
    return tuple(_to_fix(WRITTEN[name]) for name in names)


def predictions(*names):
    """Return the predictions of the causes of these programs, in this order."""
    return tuple(CAUSES[f"clinic_{name}_cause"] for name in names)


def _to_fix(exercise):
    """Return the exercise: the unchanged program is refused at once, without naming its cause."""
    case = CASE.get(exercise.name)
    if case is None:
        return exercise

    @functools.wraps(exercise.check)
    def check(program):
        expect(not case.is_as_found(program), "this is still the program as you found it",
               "Find the cause first. Then fix the program in the cell above, and run that cell.")
        yield from exercise.check(program)

    return replace(exercise, check=check)


WRITTEN = {item.name: item for item in (*HANGS, *DETECTORS, *SILENT_ERRORS, *SHARDING, *RUN_STATE)}
CAUSES = {item.name: item for item in PREDICTIONS}
