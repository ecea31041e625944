"""Two schedules in the shape of a V: rank r has stages r and 2 * ranks - 1 - r, so that a
micro-batch goes down all ranks and up again, and its loss is computed on rank 0.

Both are lists of steps, (how often, pattern). In a pattern "Fd" is the next forward of the stage on
the way down, "Iu" the next I of the stage on the way up, "Wu" its next W, and "W" the W that has
waited longest on either stage.
"""

from collections import Counter

from ranklab.pipeline_parallel.actions import Action, check_counts


def zb_v_schedule(ranks, micro_batches):
    """A schedule without a bubble where F, I and W take equal time and micro_batches is at least
    2 * ranks - 1, with the activation memory of 1F1B, the same on all ranks.

    The time is counted without a flush: see bubble_fraction.
    paper  Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6
    """
    check_counts(ranks=ranks, micro_batches=micro_batches)
    most = max(micro_batches, 2 * ranks - 1)  # with fewer the order is that of `most`, with holes
    schedule = []
    for rank in range(ranks):
        after = ranks - rank
        steps = [(2 * after - 1, "Fd"), (rank, "Fu Fd"), (after, "Fu Iu Wu"),
                 (most + 1 - ranks - after, "Fd Id Wd Fu Iu Wu"), (after - 1, "Id Wd Fu Iu Wu"),
                 (rank, "Id Iu"), (after, "Id Wd"), (rank, "Wu"), (rank, "Wd")]
        actions = _numbered(steps, rank, 2 * ranks - 1 - rank)
        schedule.append(tuple(a for a in actions if a.micro_batch < micro_batches))
    return tuple(schedule)


def dualpipe_v(ranks, micro_batches):
    """DualPipeV's schedule: most forwards stand right before a backward of another micro-batch.

    On GPUs the two run as one, so that the messages of each hide behind the work of the other. This
    is how DeepSeek-V3 hides its experts' all-to-all. Here they run one after the other.
    paper  DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 3.2.1; cut in half as V
    error  ValueError with fewer than 2 * ranks micro-batches: they would not fill the V
    """
    check_counts(ranks=ranks, micro_batches=micro_batches)
    if micro_batches < 2 * ranks:
        raise ValueError(f"micro_batches={micro_batches} must be {2 * ranks} or more, two for each "
                         f"of the {ranks} ranks, for the DualPipe schedule")
    schedule = []
    for rank in range(ranks):
        after, half = ranks - rank - 1, (rank + 1) // 2
        steps = [(2 * after, "Fd"), (rank + 1, "Fd Fu"), (after, "Iu W Fu"),
                 (micro_batches - ranks - after, "Fd Bu Fu Bd"), (after, "Bu Fu Bd"),
                 # From here on the halves are apart, because other ranks wait for I.
                 (half, "Bu Bd"), (1 - rank % 2, "Bu Id"), (half, "Iu Id"),
                 (after, "W Id"), (rank + 1, "W")]
        schedule.append(tuple(_numbered(steps, rank, 2 * ranks - 1 - rank)))
    return tuple(schedule)


def _numbered(steps, down, up):
    """The actions of (times, pattern): of each stage, micro-batch after micro-batch."""
    words = [word for times, pattern in steps for word in pattern.split() * times]
    seen, halves, actions = Counter(), [], []
    for word in words:
        kind, stage = word[0], {"d": down, "u": up}.get(word[1:])
        if kind == "W":  # of the oldest I that has none yet
            half = next(action for action in halves if stage in (None, action.stage))
            halves.remove(half)
            actions.append(half._replace(kind="W"))
            continue
        actions.append(Action(kind, stage, seen[stage, kind == "F"]))
        seen[stage, kind == "F"] += 1
        if kind == "I":
            halves.append(actions[-1])
    return actions
