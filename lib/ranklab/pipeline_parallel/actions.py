"""The actions of a pipeline's ranks, and the text form of a schedule.

A schedule has a tuple for each rank: its actions, in the order in which the rank runs them. It is
pure data, so it can be printed, checked, drawn and timed before any process exists.
"""

from collections import deque
from typing import NamedTuple

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One piece of work; "F2.5" is the forward of stage 2 on micro-batch 5.

    kind: F forward; B whole backward; or B in two halves: I is the gradient of the stage's input,
        for which the previous stage waits; W is the gradient of its weights: no rank waits for it
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    __repr__ = __str__  # so that a schedule in the last line of a cell is readable


def places(schedule):
    """Return {stage: the rank that has it}, in order of stages."""
    return dict(sorted((a.stage, rank) for rank, actions in enumerate(schedule) for a in actions))


def result(action):
    """Return the action that stands for this result: B for an I, as both give the input's gradient.
    """
    return action._replace(kind="B") if action.kind == "I" else action


def dependencies(action, stages):
    """List the results that `action` needs before it can start, in a pipeline of `stages`."""
    kind, stage, micro_batch = action
    if kind == "W":
        return [Action("B", stage, micro_batch)]
    if kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage > 0 else []
    forward = Action("F", stage, micro_batch)
    return [forward, Action("B", stage + 1, micro_batch)] if stage < stages - 1 else [forward]


def walk(schedule):
    """Yield (rank, action) in an order that is possible for all ranks, and keeps each rank's order.

    Raises: ValueError if no rank can go on; it names the ranks and what they wait for.
    """
    stages = len(places(schedule))
    queues, results = [deque(actions) for actions in schedule], set()
    while any(queues):
        rest = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue and results.issuperset(dependencies(queue[0], stages)):
                results.add(result(queue[0]))
                yield rank, queue.popleft()
        if sum(map(len, queues)) == rest:
            raise ValueError(_deadlock(queues, results, stages))


def _deadlock(queues, results, stages):
    waits = []
    for rank, queue in enumerate(queues):
        if queue:
            absent = [str(d) for d in dependencies(queue[0], stages) if d not in results]
            waits.append(f"rank {rank} waits for {' and '.join(absent)} to do {queue[0]}")
    return "no rank can go on: " + "; ".join(waits)


def parse_schedule(text):
    """Read a schedule from `text`: one line for each rank, such as "F0 F1 B0 B1".

    "F5" is micro-batch 5 on the stage with the number of the line; "F2.5" names stage 2.
    Raises: ValueError for a word that is not an action.
    """
    lines = [line.split() for line in text.strip().splitlines()]
    return tuple(tuple(_action(word, rank) for word in words) for rank, words in enumerate(lines))


def _action(word, rank):
    stage, _, micro_batch = word[1:].rpartition(".")
    numbers = (stage or str(rank), micro_batch)
    if word[0] not in KINDS or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"{word!r} on rank {rank} is no action: F5 or F2.5, and so B, I, W")
    return Action(word[0], *map(int, numbers))


def schedule_text(schedule):
    """Write `schedule` in parse_schedule's form; name stages only if they differ from the ranks."""
    plain = all(stage == rank for stage, rank in places(schedule).items())
    return "\n".join(" ".join(f"{a.kind}{a.micro_batch}" if plain else str(a) for a in actions)
                     for actions in schedule)


def check_counts(**counts):
    """Raise ValueError, with its name and value, for a count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be 1 or more")
