"""Judge the library's answers of one lab as a learner's, in a process of its own; or build the
table of one exercise again, and say whether its bytes are those that are there.

    ATEN_CPU_CAPABILITY=default python on_kernels.py 10_context_parallel
    ATEN_CPU_CAPABILITY=default python on_kernels.py ring_attention

A process, because torch, MKL and oneDNN choose their kernels once, when they first compute.
"""

import difflib
import sys

from ranklab.checks.prover import tables
from ranklab.checks.prover.slips import edited
from ranklab.course import labs
from ranklab.course.check import PASSED, judge


def main(name):
    if name in labs.STEMS:
        differences = refused(name)
    else:
        proof = labs.find_exercise(name)
        old, new = tables.path_of(proof).read_text(), tables.text_of(proof)
        differences = [*difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="")]
    print(*differences, sep="\n")
    return bool(differences)


def refused(stem):
    verdicts = [judge(exercise, edited(exercise.answer))
                for exercise in labs.checks_of(stem).EXERCISES]
    return [str(verdict) for verdict in verdicts if verdict.state != PASSED]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
