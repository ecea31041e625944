"""The messages of one call of a function that communicates with its neighbours in a ring."""

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ranklab.checks.collectives.inputs import watched
from ranklab.checks.prover import ALL, GROUPS, AtMost

LIMIT = 5  # seconds of a launch
GROUPINGS = ALL, *GROUPS[::-1]  # pairs first: there all ranks meet what is wrong at the same time
DROPPED, MESSAGES = "handles that nobody waited for", "messages sent"
CLOSES = ("The ring closes: the last rank sends to (rank + 1) % size, which is rank 0, and rank 0 "
          "receives.")
NEXT = "After the last rank comes rank 0 again: (rank + 1) % size."
PREVIOUS = "Before rank 0 comes the last rank: (rank - 1) % size."
IN_GROUP = ("A group numbers its ranks from 0: use dist.get_rank(group), "
            "dist.get_world_size(group), and group=group in every message.")
NUMBERS = ("Number the neighbours within the group: group_dst= and group_src= (group_peer= in a "
           "P2POp). dst=, src= and peer= are ranks in the whole world.")
WAIT = ("isend and irecv return handles. Keep every handle and wait for it: until then, you must "
        "not read or reuse the buffer.")


def sent_by(call):
    """Return (the call's result, its Traffic, {name: what must hold for any ring})."""
    with OthersExist():
        value, traffic, dropped = watched(call)
    return value, traffic, {DROPPED: AtMost(dropped, 0),
                            MESSAGES: AtMost(traffic.sent_messages, 1)}


class OthersExist(TorchDispatchMode):
    """A mode in which a message to the rank itself, or to a missing rank, raises ValueError: gloo
    would read invalid memory.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("c10d::send", "c10d::recv_"):
            group, peer = dist.ProcessGroup.unbox(args[1]), args[2]
            if not 0 <= peer < group.size():
                raise ValueError(f"there is no rank {peer}: the ranks are 0 .. {group.size() - 1}")
            if peer == group.rank():
                raise ValueError(f"a message from rank {peer} to itself")
        return func(*args, **(kwargs or {}))
