"""GPipe and 1F1B: rank s has stage s, and all gradients are there before the weights change.

A stage does its backwards in order of micro-batches. One process that takes them one after the
other adds the gradients up in this order, too: so the sums are the same to the last bit, and not
only but for rounding.
"""

from ranklab.pipeline_parallel.actions import Action, check_counts


def gpipe_schedule(stages, micro_batches):
    """A schedule in which each rank does all its forwards, and then all its backwards, both in
    order of micro-batches.

    Simple, but every micro-batch's activations are in memory at once.
    paper  Huang et al. 2019, GPipe
    error  ValueError for less than one stage or micro-batch
    lab    09
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for stage in range(stages):
        forwards = [Action("F", stage, m) for m in range(micro_batches)]
        backwards = [Action("B", stage, m) for m in range(micro_batches)]
        schedule.append(tuple(forwards + backwards))
    return tuple(schedule)


def one_f_one_b_schedule(stages, micro_batches):
    """A schedule in which each rank does, after some forwards, one forward and one backward in
    turn, so that it never holds more micro-batches than there are stages after it, and one.

    The bubble is that of GPipe; memory no longer grows with the number of micro-batches. Forwards
    and backwards are both in order of micro-batches.
    paper  Narayanan et al. 2021, PipeDream-Flush
    error  ValueError for less than one stage or micro-batch
    lab    09
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        actions = [Action("F", stage, m) for m in range(warm_up)]
        for m in range(micro_batches - warm_up):
            actions += [Action("F", stage, m + warm_up), Action("B", stage, m)]
        actions += [Action("B", stage, m) for m in range(micro_batches - warm_up, micro_batches)]
        schedule.append(tuple(actions))
    return tuple(schedule)
