"""The messages of a schedule: which rank sends what to which, and when."""

import functools
from typing import NamedTuple

from ranklab.pipeline_parallel.actions import places
from ranklab.pipeline_parallel.simulate import simulate


class Message(NamedTuple):
    """One end of a message, "SF1.3>2": micro-batch 3's output of stage 1 goes to rank 2.

    kind   SF sends the output of `stage`, RF receives its input; SB sends the gradient of its
           input, RB receives the gradient of its output. `stage` is always one of the rank's own
    peer   the rank at the other end
    """

    kind: str
    stage: int
    micro_batch: int
    peer: int

    def __str__(self):
        sign = ">" if self.kind[0] == "S" else "<"
        return f"{self.kind}{self.stage}.{self.micro_batch}{sign}{self.peer}"

    __repr__ = __str__


def with_messages(schedule):
    """Add a Message to `schedule` at both ends of each dependency between two ranks.

    All actions are put in one order, by a simulation. After each F, B or I comes its message, and
    each rank's list is its own part of this order. This guarantees:
    - any two ranks list the messages between them in the same order. NCCL needs that, because it
      runs them one by one, and with a device_id all messages of a group
    - all ranks finish, even if each end of a message waits for the other end, because the first
      entry left in the common order can always run
    - all ranks also finish if both ends only start the message (isend, irecv), and the receiver
      waits right before the action that needs it. Run it like this: a rank that waits in each
      message loses time for computing
    Raises: ValueError if no rank can go on.
    """
    return _with_messages(tuple(map(tuple, schedule)))


@functools.lru_cache(maxsize=16)  # a training run needs the same schedule in each step
def _with_messages(schedule):
    place = places(schedule)
    lists = [[] for _ in schedule]
    for rank, action, _, _ in simulate(schedule):
        lists[rank].append(action)
        kind, stage, micro_batch = action
        to = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or place.get(to, rank) == rank:
            continue  # no stage needs it, or only one on this rank
        way, peer = "F" if kind == "F" else "B", place[to]
        lists[rank].append(Message("S" + way, stage, micro_batch, peer))
        lists[peer].append(Message("R" + way, to, micro_batch, rank))
    return tuple(map(tuple, lists))
