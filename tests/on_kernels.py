"""Judge the library's answers of one lab as a learner's, in a process of its own.

    ATEN_CPU_CAPABILITY=default python on_kernels.py 10_context_parallel

A process, because torch, MKL and oneDNN choose their kernels once, when they first compute.
"""

import sys

from ranklab.checks.prover.slips import edited
from ranklab.course import labs
from ranklab.course.check import PASSED, judge


def main(stem):
    refused = []
    for exercise in labs.checks_of(stem).EXERCISES:
        verdict = judge(exercise, edited(exercise.answer))
        if verdict.state != PASSED:
            refused.append(str(verdict))
    print(*refused, sep="\n")
    return len(refused)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
