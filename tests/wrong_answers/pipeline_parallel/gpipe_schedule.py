"""Lab 09: what goes wrong in GPipe's schedule."""

from mutants import mutant

from ranklab.pipeline_parallel import Action, gpipe_schedule

BACK = 'backwards = [Action("B", stage, m) for m in range(micro_batches)]'


def _wrong(*edits, says, **named):
    return mutant(gpipe_schedule, *edits, says=says, **named)


WRONG = [
    _wrong(BACK, BACK.replace("range(micro_batches)", "reversed(range(micro_batches))"),
           says="the sums are equal to the last bit"),
    _wrong("tuple(forwards + backwards)", "tuple(backwards + forwards)",
           says="the F of a micro-batch before its B"),
    _wrong("tuple(forwards + backwards)", "tuple(a for pair in zip(forwards, backwards) for a in "
           "pair)", says="GPipe does all forwards first"),
    _wrong("tuple(forwards + backwards)", "tuple(forwards)", says="once for each micro-batch"),
    _wrong("check_counts(stages=stages, micro_batches=micro_batches)", "", says="is no error",
           called="no_check_of_the_numbers"),
    _wrong("check_counts(stages=stages, micro_batches=micro_batches)",
           "if min(stages, micro_batches) < 1:\n        raise ValueError", says="with a sentence"),
    _wrong("for stage in range(stages):\n", "for stage in reversed(range(stages)):\n",
           says="stages are on the ranks"),
    _wrong("check_counts(stages=stages, micro_batches=micro_batches)",
           "assert stages > 0 and micro_batches > 0", says="raises AssertionError"),
]


def gpipe_schedule__plain_tuples(stages, micro_batches):
    """Return a tuple with a tuple of actions for each rank"""
    return tuple(tuple((kind, stage, m) for kind in "FB" for m in range(micro_batches))
                 for stage in range(stages))


def gpipe_schedule__one_list_for_all(stages, micro_batches):
    """Return a tuple with a tuple of actions for each rank"""
    return [Action(kind, stage, m) for kind in "FB" for stage in range(stages)
            for m in range(micro_batches)]
