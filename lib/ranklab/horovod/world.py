"""init() and shutdown(), and the state in between: rank, size and configuration.

Horovod's functions take no handle: a process is in one Horovod world, or in none. So this module,
unlike any other here, keeps the state made by init().
"""

import atexit
import os
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta

import torch.distributed as dist

from ranklab.engine import device
from ranklab.engine.in_place import make_group
from ranklab.engine.rank import GROUP_GRACE
from ranklab.horovod.background import Background, Counts

END_LIMIT = 5.0  # seconds in which the threads of all ranks agree to end
END_LIMIT_AT_EXIT = 1.0
# For tensors on the CPU and on a GPU. The program's own group may have only NCCL. gpu: a rehearsal.
BOTH = {"cuda": "cpu:gloo,cuda:nccl", "gpu": "cpu:gloo,gpu:gloo"}
VARIABLES = {
    "fusion_threshold": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "stall_check": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_shutdown": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}


@dataclass(frozen=True)
class Config:
    """Settings of the background thread; init() gives every rank the Config of rank 0.

    fusion_threshold  bytes in one fusion buffer; 0 turns fusion off
    cycle_time_ms     pause between two negotiations, in which tensors accumulate
    stall_check       seconds until a tensor that some ranks lack is reported
    stall_shutdown    seconds until it is an error on every rank (Horovod's own default is never)
    """

    fusion_threshold: int = 128 * 2**20
    cycle_time_ms: float = 1.0
    stall_check: float = 10.0
    stall_shutdown: float = 300.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")

    @classmethod
    def from_environment(cls, **arguments):
        """Make a Config from the arguments, else Horovod's environment variables, else defaults."""
        values = {}
        for field in fields(cls):
            variable = VARIABLES[field.name]
            if text := os.environ.get(variable):
                try:
                    values[field.name] = field.type(text)
                except ValueError:
                    raise ValueError(f"{variable}={text} is no number") from None
        values |= {name: value for name, value in arguments.items() if value is not None}
        return cls(**values)


class World:
    """The state made by init() in this process."""

    background = None
    made_group = False  # the process group is ours to destroy


WORLD = World()


def init(*, fusion_threshold=None, cycle_time_ms=None, stall_check=None, stall_shutdown=None):
    """Start this rank's background thread; then rank(), size() and all other functions work.

    Uses the existing process group; without one, makes one of torchrun's ranks or of this process
    only. All ranks must call it. The arguments are ours: see Config, and VARIABLES for Horovod's
    own. Rank 0's arguments apply to all ranks, because ranks that fuse differently would not
    match. With HOROVOD_TIMELINE=FILE a timeline begins at once.

    Cost: broadcasts the Config, and makes two process groups.
    Raises: ValueError for a value that is out of range.
    """
    if is_initialized():
        return
    configs = [Config.from_environment(fusion_threshold=fusion_threshold, stall_check=stall_check,
                                       cycle_time_ms=cycle_time_ms, stall_shutdown=stall_shutdown)]
    if not dist.is_initialized():
        make_group()
        WORLD.made_group = True
    dist.broadcast_object_list(configs, src=0)
    # Longer than the limit for a tensor that a rank lacks, whose report is more helpful.
    limit = timedelta(seconds=configs[0].stall_shutdown + GROUP_GRACE)
    # Separate groups, or its collectives would be mixed with the program's.
    control = dist.new_group(backend="gloo", timeout=limit)  # the negotiation is on the CPU
    data = dist.new_group(backend=BOTH.get(device().type), timeout=limit)
    WORLD.background = Background(configs[0], control, data, device())
    atexit.register(_shut_down, END_LIMIT_AT_EXIT)
    path = os.environ.get("HOROVOD_TIMELINE")
    if path and path != "DYNAMIC":  # DYNAMIC: start_timeline() gives the time and file
        start_timeline(path)


def shutdown():
    """End the background threads of all ranks; each pending tensor becomes an error.

    Once one rank calls it, no other rank can use Horovod any more, as in Horovod itself. Destroys
    the groups that init() made.
    """
    _shut_down(END_LIMIT)


def _shut_down(limit):
    if WORLD.background is None:
        return
    WORLD.background.stop(limit)
    WORLD.background = None
    atexit.unregister(_shut_down)
    if WORLD.made_group and dist.is_initialized():
        dist.destroy_process_group()
    WORLD.made_group = False


def is_initialized():
    """Return True between init() and shutdown()."""
    return WORLD.background is not None


def background():
    """Return this rank's Background.

    Raises: ValueError before init().
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
    """Return the number of nodes."""
    return size() // local_size()


def cross_rank():
    """Return the number of this rank's node."""
    return rank() // local_size()


def start_timeline(file_path):
    """Start recording on rank 0 what happens to each tensor, for the trace `file_path`."""
    if rank() == 0:
        background().recorder.start(file_path)


def stop_timeline():
    """Write the trace. (shutdown() and the end of the process also do this.)"""
    background().recorder.stop()


@contextmanager
def counted():
    """Count what this rank's background thread sends inside the block, `as counts`.

    counts.data is a Traffic of the tensors, counts.tensors their number. Horovod has no such
    function.
    """
    counts = background().counts = Counts()
    try:
        yield counts
    finally:
        background().counts = None
