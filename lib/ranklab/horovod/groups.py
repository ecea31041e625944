"""The process groups that the background thread works in: how they are made, and left."""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ranklab.engine import device
from ranklab.engine.rank import GROUP_GRACE


def control_group(settings):
    """A group of all ranks, for the negotiation: its messages are on the CPU."""
    return dist.new_group(backend="gloo", timeout=_limit(settings))


def data_group(settings, ranks=None):
    """A group of `ranks` (None: all), for tensors on the CPU and on this rank's GPU.

    The program's own group may know NCCL alone; objects and lengths are on the CPU.
    """
    both = {"cuda": "cpu:gloo,cuda:nccl", "gpu": "cpu:gloo,gpu:gloo"}  # gpu: a rehearsal
    backend = both.get(device().type)  # None: the program's
    return dist.new_group(ranks, timeout=_limit(settings), backend=backend)


def leave(groups, abort=False):
    """The list `groups` is empty, and this rank has no part in any of them; no others refer to it.

    A group's sockets, threads and files live as long as somebody refers to it. When they close, a
    peer that waits for this rank has an error at once. With `abort` it does not wait for what is
    under way (NCCL; gloo never does).
    """
    while groups:
        with suppress(Exception):  # the program may have destroyed all groups before
            if abort:
                groups[-1].abort()
            dist.destroy_process_group(groups[-1])
        groups.pop()


def _limit(settings):
    """Longer than a tensor waits for a rank that lacks it: that report says more."""
    return timedelta(seconds=settings.stall_shutdown + GROUP_GRACE)
