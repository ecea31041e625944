"""CASES: all incidents of the clinic."""

from ranklab.clinic import hangs, later, sharded, wrong

CASES = (*hangs.CASES, *wrong.CASES, *sharded.CASES, *later.CASES)
