"""CASES: all incidents of the clinic; CASE has them by name."""

from ranklab.clinic import hangs, later, sharded, wrong

CASES = (*hangs.CASES, *wrong.CASES, *sharded.CASES, *later.CASES)
CASE = {case.name: case for case in CASES}
