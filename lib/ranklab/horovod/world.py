"""What a rank knows about itself, and what Horovod reports of its work.

Horovod's functions take no handle: a process is in one Horovod world, or in none. So this module,
unlike any other here, keeps what init() (start.py) made.
"""

import os
from contextlib import contextmanager

from ranklab.horovod.background import Counts


class World:
    """What init() made in this process."""

    background = None
    made_group = False  # the process group is ours to destroy


WORLD = World()


def is_initialized():
    """True between init() and shutdown()."""
    return WORLD.background is not None


def background():
    """This rank's Background.

    error  ValueError before init()
    """
    if WORLD.background is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return WORLD.background


def rank():
    return background().rank


def size():
    return background().ranks


def local_rank():
    return int(os.environ.get("LOCAL_RANK", rank()))


def local_size():
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


def cross_size():
    """The number of nodes."""
    return size() // local_size()


def start_timeline(file_path):
    """From now on rank 0 keeps what happens to each tensor, for the trace `file_path`."""
    if rank() == 0:
        background().recorder.start(file_path)


def stop_timeline():
    """The trace is written. (shutdown() and the end of the process do it too.)"""
    background().recorder.stop()


@contextmanager
def counted():
    """Inside, `as counts`: what this rank's background thread sends (ours, not Horovod's).

    counts.data is a Traffic of the tensors, counts.tensors how many they were.
    """
    counts = background().counts = Counts()
    try:
        yield counts
    finally:
        background().counts = None
