"""ZB-H1: the backward in two halves. No rank waits for the gradient of weights, so it can fill
the time in which its own rank would wait.
"""

from ranklab.pipeline_parallel.actions import Action, check_counts


def zero_bubble_schedule(stages, micro_batches):
    """A schedule in the order of 1F1B, with I for each B, and each W as late as memory allows;
    rank s has stage s.

    Stage s has s fewer micro-batches on their way than stage 0, so it can keep s others until
    their W: all ranks hold at most what rank 0 holds in 1F1B. What waits longest is done at the
    end, while the other ranks' last I are still to come.
    paper  Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), ZB-H1
    lab    09
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
        late = range(max(0, micro_batches - stage), micro_batches)
        schedule.append(tuple(actions + [Action("W", stage, m) for m in late]))
    return tuple(schedule)
