"""Whether a schedule can train a model: what is wrong with it, in sentences."""

from collections import Counter

from ranklab.engine.report import count_ranks
from ranklab.pipeline_parallel.actions import KINDS, Action, places, walk


def problems(schedule, ranks, micro_batches):
    """What is wrong with `schedule`, one sentence for each; an empty list if it is right.

    A right schedule has equally many stages on each rank. Each stage does F, and then either B or I
    and W, exactly once for each micro-batch, and the ranks never wait for each other in a circle.
    A stage may do its backwards in any order: messages carry their own order (see with_messages),
    and gradients are added up, so only the rounding of the sum depends on it.
    lab    09
    """
    if len(schedule) != ranks:
        return [f"the schedule has {count_ranks(len(schedule))}, not {ranks}"]
    found = (_strange(schedule, micro_batches)
             or _places(schedule) + _counts(schedule, micro_batches)
             or _order(schedule))
    return found or _deadlock(schedule)


def _strange(schedule, micro_batches):
    def is_action(a):
        return (isinstance(a, Action) and a.kind in KINDS and a.stage >= 0
                and 0 <= a.micro_batch < micro_batches)

    return [f"rank {rank}: {a} is no action of a pipeline with {micro_batches} micro-batches"
            for rank, actions in enumerate(schedule) for a in actions if not is_action(a)]


def _places(schedule):
    found, place = [], places(schedule)
    for rank, actions in enumerate(schedule):
        stages = {action.stage for action in actions}
        found += [f"stage {stage} is on rank {rank} and on rank {place[stage]}"
                  for stage in sorted(stages) if place[stage] != rank]
    each = Counter(place.values())
    if len(set(each.values())) > 1 or len(each) < len(schedule):
        numbers = ", ".join(str(each[rank]) for rank in range(len(schedule)))
        found.append(f"the ranks have {numbers} stages: they must have equally many")
    return found


def _counts(schedule, micro_batches):
    times = Counter(action for actions in schedule for action in actions)
    stages = max((action.stage for action in times), default=-1) + 1
    found = []
    for stage in range(stages):
        for m in range(micro_batches):
            F, B, I, W = (times[kind, stage, m] for kind in KINDS)
            if F != 1:
                found.append(f"F{stage}.{m} is there {F} times, not once")
            if (B, I, W) not in ((1, 0, 0), (0, 1, 1)):
                found.append(f"micro-batch {m} on stage {stage} has {B} B, {I} I and {W} W: "
                             "it must have one B, or one I and one W")
    return found


def _order(schedule):
    """Within a rank: F before B and I, and I before W."""
    found = []
    for rank, actions in enumerate(schedule):
        at = {action: i for i, action in enumerate(actions)}
        for action, i in at.items():
            first = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            if first and at[action._replace(kind=first)] > i:
                found.append(f"rank {rank} does {action} before {action._replace(kind=first)}")
    return found


def _deadlock(schedule):
    try:
        list(walk(schedule))
    except ValueError as error:
        return [str(error)]
    return []
