"""The exercises and predictions of lab 16, in the order of the lab.

    runs.py      how each mended program is run and compared; read it first
    hangs.py, slow.py, wrong.py, sharded.py, later.py     the checks of the programs there
    detectors.py those of the four detectors
    causes.py    the predictions: which cause is it, and what speaks against the others?
"""

import functools
from dataclasses import replace

from ranklab.checks.beside import expect
from ranklab.checks.clinic.causes import CASE, PREDICTIONS
from ranklab.checks.clinic.detectors import DETECTORS
from ranklab.checks.clinic.hangs import HANGS
from ranklab.checks.clinic.later import LATER
from ranklab.checks.clinic.sharded import SHARDED
from ranklab.checks.clinic.wrong import WRONG

__all__ = ["EXERCISES", "PREDICTIONS"]


def _to_mend(exercise):
    """The exercise; its program as it was found is refused at once, and its cause is not told."""
    case = CASE.get(exercise.name)
    if case is None:
        return exercise

    @functools.wraps(exercise.check)
    def check(program):
        expect(not case.is_as_found(program), "it is as it was found, and does what is told of it",
               "Find the cause first. Then mend the program in its cell.")
        yield from exercise.check(program)

    return replace(exercise, check=check)


EXERCISES = tuple(map(_to_mend, (
    *HANGS[:1], *DETECTORS[:1], *HANGS[1:2], *DETECTORS[1:2], *HANGS[2:3], *WRONG[-1:], *LATER[:1],
    *HANGS[3:], *WRONG[:-1], *SHARDED, *DETECTORS[2:], *LATER[1:])))
