"""Two schedules in the shape of a V: rank r has stages r and 2 * ranks - 1 - r, so that a
micro-batch goes down all ranks and up again, and its loss is computed on rank 0.

Both are lists of steps, (repetitions, pattern). In a pattern "Fd" is the next forward of the stage
on the way down, "Iu" the next I of the stage on the way up, "Wu" its next W, and "W" the W that has
waited longest on either stage.
"""

from collections import Counter

from ranklab.pipeline_parallel.actions import Action, check_counts


def zb_v_schedule(ranks, micro_batches):
    """Make a schedule without a bubble, with the activation memory of 1F1B, equal on all ranks.

    It has no bubble if F, I and W take equal time and micro_batches is at least 2 * ranks - 1.
    This counts the time without a flush: see bubble_fraction.
    Paper: Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6
    """
    check_counts(ranks=ranks, micro_batches=micro_batches)
    total = max(micro_batches, 2 * ranks - 1)  # with fewer: the order of `total`, with holes
    schedule = []
    for rank in range(ranks):
        rest = ranks - rank
        steps = [(2 * rest - 1, "Fd"), (rank, "Fu Fd"), (rest, "Fu Iu Wu"),
                 (total + 1 - ranks - rest, "Fd Id Wd Fu Iu Wu"), (rest - 1, "Id Wd Fu Iu Wu"),
                 (rank, "Id Iu"), (rest, "Id Wd"), (rank, "Wu"), (rank, "Wd")]
        actions = _numbered(steps, rank, 2 * ranks - 1 - rank)
        schedule.append(tuple(a for a in actions if a.micro_batch < micro_batches))
    return tuple(schedule)


def dualpipe_v(ranks, micro_batches):
    """Make DualPipeV's schedule: most forwards come right before another micro-batch's backward.

    On GPUs the two run together, so that the messages of each hide behind the work of the other.
    This is how DeepSeek-V3 hides its experts' all-to-all. Here they run one after the other.
    Raises: ValueError for fewer than 2 * ranks micro-batches: they would not fill the V.
    Paper: DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 3.2.1; cut in half as V
    """
    check_counts(ranks=ranks, micro_batches=micro_batches)
    if micro_batches < 2 * ranks:
        raise ValueError(f"micro_batches={micro_batches} must be {2 * ranks} or more, two for each "
                         f"of the {ranks} ranks, for the DualPipe schedule")
    schedule = []
    for rank in range(ranks):
        rest, half = ranks - rank - 1, (rank + 1) // 2
        steps = [(2 * rest, "Fd"), (rank + 1, "Fd Fu"), (rest, "Iu W Fu"),
                 (micro_batches - ranks - rest, "Fd Bu Fu Bd"), (rest, "Bu Fu Bd"),
                 # From here on the halves are separate, because other ranks wait for I.
                 (half, "Bu Bd"), (1 - rank % 2, "Bu Id"), (half, "Iu Id"),
                 (rest, "W Id"), (rank + 1, "W")]
        schedule.append(tuple(_numbered(steps, rank, 2 * ranks - 1 - rank)))
    return tuple(schedule)


def _numbered(steps, down_stage, up_stage):
    """Expand (times, pattern) to actions; number each stage's micro-batches in order."""
    words = [word for times, pattern in steps for word in pattern.split() * times]
    counts, halves, actions = Counter(), [], []
    for word in words:
        kind, stage = word[0], {"d": down_stage, "u": up_stage}.get(word[1:])
        if kind == "W":  # for the oldest I that has no W yet
            half = next(action for action in halves if stage in (None, action.stage))
            halves.remove(half)
            actions.append(half._replace(kind="W"))
            continue
        actions.append(Action(kind, stage, counts[stage, kind == "F"]))
        counts[stage, kind == "F"] += 1
        if kind == "I":
            halves.append(actions[-1])
    return actions
