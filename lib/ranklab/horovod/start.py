"""init() and shutdown()."""

import atexit
import os
from datetime import timedelta

import torch.distributed as dist

from ranklab.engine import device
from ranklab.engine.in_place import make_group
from ranklab.engine.rank import GROUP_GRACE
from ranklab.horovod.background import Background
from ranklab.horovod.settings import Settings
from ranklab.horovod.world import WORLD, is_initialized, start_timeline

END_LIMIT = 5.0  # seconds in which the threads of all ranks agree to end
END_LIMIT_AT_EXIT = 1.0
# Tensors on the CPU and on a GPU. The program's own group may know NCCL alone. gpu: a rehearsal.
BOTH = {"cuda": "cpu:gloo,cuda:nccl", "gpu": "cpu:gloo,gpu:gloo"}


def init(*, fusion_threshold=None, cycle_time_ms=None, stall_check=None, stall_shutdown=None):
    """Every rank has a background thread, and rank(), size() and all other functions work.

    Uses the process group that is up; else makes one, of torchrun's ranks or of this process
    alone. All ranks must call it. The arguments are ours: see Settings for them, and for the
    environment variables. Rank 0's hold for all: ranks that fuse in different ways would not fit
    together. With HOROVOD_TIMELINE=FILE a timeline begins at once.

    cost   broadcasts the settings, and makes two process groups
    error  a setting that is out of range
    """
    if is_initialized():
        return
    settings = Settings.from_environment(
        fusion_threshold=fusion_threshold, cycle_time_ms=cycle_time_ms,
        stall_check=stall_check, stall_shutdown=stall_shutdown)
    if not dist.is_initialized():
        make_group()
        WORLD.made_group = True
    of_rank_0 = [settings]
    dist.broadcast_object_list(of_rank_0, src=0)
    settings, = of_rank_0
    # Longer than a tensor waits for a rank that lacks it: that report says more.
    limit = timedelta(seconds=settings.stall_shutdown + GROUP_GRACE)
    # Groups of its own, or its collectives would get between those of the program.
    control = dist.new_group(backend="gloo", timeout=limit)  # the negotiation is on the CPU
    data = dist.new_group(backend=BOTH.get(device().type), timeout=limit)
    WORLD.background = Background(settings, control, data, device())
    atexit.register(_shut_down, END_LIMIT_AT_EXIT)
    path = os.environ.get("HOROVOD_TIMELINE")
    if path and path != "DYNAMIC":  # Horovod's word for: start_timeline() will say when and where
        start_timeline(path)


def shutdown():
    """The background threads of all ranks have ended; a tensor that still waits becomes an error.

    Once one rank calls it, no other can use Horovod any more, as in Horovod. The groups that
    init() made are destroyed.
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
