"""The exercises and predictions of lab 16, in the order of the lab.

    runs.py      how each mended program is run and compared; read it first
    hangs.py, slowdowns.py, silent_errors.py, sharding.py, run_state.py
                 the checks of the programs in clinic/, in files of the same names
    detectors.py the checks of the four detectors
    causes.py    the predictions: which cause is it, and what speaks against the others?
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

__all__ = ["EXERCISES", "PREDICTIONS"]


def _to_mend(exercise):
    """The exercise; its program as it was found is refused at once, and its cause is not told."""
    case = CASE.get(exercise.name)
    if case is None:
        return exercise

    @functools.wraps(exercise.check)
    def check(program):
        expect(not case.is_as_found(program), "this is still the program as you found it",
               "Find the cause first. Then mend it in the cell above, and run that cell.")
        yield from exercise.check(program)

    return replace(exercise, check=check)


WRITTEN = {item.name: item for item in (*HANGS, *DETECTORS, *SILENT_ERRORS, *SHARDING, *RUN_STATE)}
EXERCISES = tuple(_to_mend(WRITTEN[name]) for name in """
    train_with_owners first_difference train_on_a_grid circle_of_waits train_until_good moving_curve
    half_digits train_large_batch train_on_functions long_steps saved_model no_faster worse_together
    two_scores wide_layer staged_gpt gathered_model moved_gpt flat_model own_limit steps_behind
    validated_digits stored_digits resumed_digits split_digits""".split())
