"""CASES: all incidents of the clinic; CASE: the same by name."""

from ranklab.clinic import hangs, run_state, sharding, silent_errors

CASES = (*hangs.CASES, *silent_errors.CASES, *sharding.CASES, *run_state.CASES)
CASE = {case.name: case for case in CASES}
