"""Check whether a schedule can train a model, and describe its faults in sentences."""

from collections import Counter

from ranklab.engine.report import count_ranks
from ranklab.pipeline_parallel.actions import KINDS, Action, places, walk


def problems(schedule, ranks, micro_batches):
    """List what is wrong with `schedule`, a sentence for each fault; an empty list if it is right.

    A right schedule has equally many stages on each rank. Each stage runs F, and then either B or I
    and W, exactly once for each micro-batch, and the ranks never wait for each other in a circle.
    A stage may run its backwards in any order: messages carry their own order (see with_messages),
    and gradients are added up, so the order changes only the rounding of the sum.
    Lab: 09
    """
    if len(schedule) != ranks:
        return [f"the schedule has {count_ranks(len(schedule))}, not {ranks}"]
    faults = (_strange(schedule, micro_batches)
              or _places(schedule) + _counts(schedule, micro_batches)
              or _order(schedule))
    return faults or _deadlock(schedule)


def _strange(schedule, micro_batches):
    def is_action(a):
        return (isinstance(a, Action) and a.kind in KINDS and a.stage >= 0
                and 0 <= a.micro_batch < micro_batches)

    return [f"rank {rank}: {a} is no action of a pipeline with {micro_batches} micro-batches"
            for rank, actions in enumerate(schedule) for a in actions if not is_action(a)]


def _places(schedule):
    faults, place = [], places(schedule)
    for rank, actions in enumerate(schedule):
        stages = {action.stage for action in actions}
        faults += [f"stage {stage} is on rank {rank} and on rank {place[stage]}"
                   for stage in sorted(stages) if place[stage] != rank]
    counts = Counter(place.values())
    if len(set(counts.values())) > 1 or len(counts) < len(schedule):
        numbers = ", ".join(str(counts[rank]) for rank in range(len(schedule)))
        faults.append(f"the ranks have {numbers} stages: they must have equally many")
    return faults


def _counts(schedule, micro_batches):
    times = Counter(action for actions in schedule for action in actions)
    stages = max((action.stage for action in times), default=-1) + 1
    faults = []
    for stage in range(stages):
        for m in range(micro_batches):
            F, B, I, W = (times[kind, stage, m] for kind in KINDS)
            if F != 1:
                faults.append(f"F{stage}.{m} is there {F} times, not once")
            if (B, I, W) not in ((1, 0, 0), (0, 1, 1)):
                faults.append(f"micro-batch {m} on stage {stage} has {B} B, {I} I and {W} W: "
                              "it must have one B, or one I and one W")
    return faults


def _order(schedule):
    """Check the order within a rank: F before B and I, and I before W."""
    faults = []
    for rank, actions in enumerate(schedule):
        at = {action: i for i, action in enumerate(actions)}
        for action, i in at.items():
            first = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            if first and at[action._replace(kind=first)] > i:
                faults.append(f"rank {rank} does {action} before {action._replace(kind=first)}")
    return faults


def _deadlock(schedule):
    try:
        list(walk(schedule))
    except ValueError as error:
        return [str(error)]
    return []
