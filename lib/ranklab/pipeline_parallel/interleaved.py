"""Interleaved 1F1B: each rank has several thin stages, so that a micro-batch reaches the last rank
sooner, and the bubble shrinks.
"""

from ranklab.pipeline_parallel.actions import Action, check_counts


def interleaved_schedule(ranks, micro_batches, virtual):
    """A schedule of ranks * virtual stages, 1F1B in rounds; rank r has stages r, r + ranks, ...

    A round is `ranks` micro-batches: they pass the rank's first stage, then its second, and so on;
    backward it is the last stage first. Each stage takes the micro-batches in their order. A
    message for each stage and micro-batch: `virtual` times those of 1F1B. Where messages take
    time, ranks are idle at the ends alone.
    paper  Narayanan et al. 2021, Megatron-LM, section 2.2
    error  ValueError where micro_batches is not a multiple of ranks: a round would have holes; or
           where one of the three is below 1
    lab    09
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
