"""GPipe, 1F1B, interleaved 1F1B and ZB-H1: the weights change when all gradients are complete.

A stage runs its backwards in order of micro-batches. One process that runs the micro-batches one
after the other adds up the gradients in the same order, so the sums are equal to the last bit.
"""

from ranklab.pipeline_parallel.actions import Action, check_counts


def gpipe_schedule(stages, micro_batches):
    """Make a schedule in which each rank does all its forwards, then all its backwards.

    Both are in the order of the micro-batches, whose activations are all in memory at once.
    Raises: ValueError if there is less than one stage or micro-batch.
    Paper: Huang et al. 2019, GPipe
    Lab: 09
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for stage in range(stages):
        forwards = [Action("F", stage, m) for m in range(micro_batches)]
        backwards = [Action("B", stage, m) for m in range(micro_batches)]
        schedule.append(tuple(forwards + backwards))
    return tuple(schedule)


def one_f_one_b_schedule(stages, micro_batches):
    """Make a schedule of some forwards on each rank, then one forward and one backward in turn.

    Rank s never holds more than stages - s micro-batches.
    The bubble is as large as GPipe's, but memory does not grow with the number of micro-batches.
    Forwards and backwards are each in the order of the micro-batches.
    Raises: ValueError if there is less than one stage or micro-batch.
    Paper: Narayanan et al. 2021, PipeDream-Flush
    Lab: 09
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


def interleaved_schedule(ranks, micro_batches, virtual):
    """Make 1F1B over ranks * virtual stages, in rounds; rank r has stages r, r + ranks, ...

    In a round, `ranks` micro-batches pass a rank's first stage, then its second, and so on; in
    backward its last stage comes first. Each stage takes the micro-batches in order.
    Even if messages take time, ranks are idle only while the pipeline fills and drains.
    Cost: a message for each stage and micro-batch, `virtual` times as many as in 1F1B.
    Raises: ValueError if micro_batches is not a multiple of ranks, because a round would have
        gaps; or if one of the three is below 1.
    Paper: Narayanan et al. 2021, Megatron-LM, section 2.2
    Lab: 09
    """
    check_counts(ranks=ranks, micro_batches=micro_batches, virtual=virtual)
    if micro_batches % ranks:
        raise ValueError(f"micro_batches={micro_batches} must be a multiple of ranks={ranks} "
                         "for the interleaved schedule")
    total, schedule = micro_batches * virtual, []
    for rank in range(ranks):
        order = [(step // ranks % virtual, step // (ranks * virtual) * ranks + step % ranks)
                 for step in range(total)]  # (which stage of this rank, micro-batch)
        forwards = [Action("F", v * ranks + rank, m) for v, m in order]
        backwards = [Action("B", (virtual - 1 - v) * ranks + rank, m) for v, m in order]
        # Each rank nearer to the start is two steps ahead: one for the way there, one for back, so
        # that messages have time.
        warm_up = min((virtual - 1) * ranks + 2 * (ranks - rank - 1), total)
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards):
            actions += [forward, backward]
        schedule.append(tuple(actions + backwards[total - warm_up:]))
    return tuple(schedule)


def zero_bubble_schedule(stages, micro_batches):
    """Make 1F1B's schedule with an I for each B, and each W as late as memory allows.

    Rank s has stage s. It has s fewer micro-batches in flight than stage 0, so it can keep s more
    until their W: all ranks hold at most what rank 0 holds in 1F1B.
    A rank's last Ws run at the end, while other ranks still have an I to run.
    Paper: Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), ZB-H1
    Lab: 09
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        actions = [Action("F", stage, m) for m in range(warm_up)]
        for m in range(micro_batches):
            if m + warm_up < micro_batches:
                actions.append(Action("F", stage, m + warm_up))
            actions.append(Action("I", stage, m))
            if m >= stage:
                actions.append(Action("W", stage, m - stage))
        rest = range(max(0, micro_batches - stage), micro_batches)
        schedule.append(tuple(actions + [Action("W", stage, m) for m in rest]))
    return tuple(schedule)
