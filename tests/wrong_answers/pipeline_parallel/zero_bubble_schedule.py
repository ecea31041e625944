"""Lab 09: what goes wrong in a schedule of F, I and W."""

from mutants import mutant

from ranklab.pipeline_parallel import one_f_one_b_schedule, zero_bubble_schedule

WARM_UP = "warm_up = min(stages - stage - 1, micro_batches)"
IN_TURN = """            if m >= stage:
                actions.append(Action("W", stage, m - stage))
"""


def _wrong(*edits, says, **named):
    return mutant(zero_bubble_schedule, *edits, says=says, **named)


WRONG = [
    _wrong(IN_TURN, "", "range(max(0, micro_batches - stage), micro_batches)",
           "range(micro_batches)", says="do a W before the next F"),
    _wrong(WARM_UP, "warm_up = min(2 * (stages - stage) - 1, micro_batches)",
           says="at most min\\(P, M\\) micro-batches", called="zb_h2_needs_more_memory"),
    _wrong(WARM_UP, "warm_up = 0", says="Do each I as soon as it can be done"),
    _wrong(WARM_UP, "warm_up = min(stage, micro_batches)", says="deadlock"),
    _wrong(WARM_UP, "warm_up = stages - stage - 1", says="no longer than that"),
    _wrong(WARM_UP, "if micro_batches < stages:\n            return one_f_one_b_schedule(stages, "
           f"micro_batches)\n        {WARM_UP}", says="Cut each into I and W",
           one_f_one_b_schedule=one_f_one_b_schedule),
    _wrong("return tuple(schedule)", "return tuple(tuple(a for a in actions if a.kind != 'W') for "
           "actions in schedule)", says="must have one B, or one I and one W"),
    _wrong("range(max(0, micro_batches - stage), micro_batches)",
           "range(micro_batches - stage, micro_batches)", called="fewer_micro_batches_than_stages",
           says="is no action"),
    _wrong("check_counts(stages=stages, micro_batches=micro_batches)", "", says="is no error"),
    _wrong('            actions.append(Action("I", stage, m))\n', "", IN_TURN.splitlines(True)[0],
           '            actions.append(Action("W", stage, m))\n            actions.append('
           'Action("I", stage, m))\n            if False:\n',
           "for m in rest]", "for m in ()]", says="and I before W", called="w_before_i"),
]


def zero_bubble_schedule__whole_backwards(stages, micro_batches):
    """Cut each into I and W"""
    return one_f_one_b_schedule(stages, micro_batches)
