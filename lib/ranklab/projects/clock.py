"""Times on ranks: all begin together, and the device has finished when the clock is read."""

import time

import torch
import torch.distributed as dist

from ranklab.engine import device


def best_seconds(call, repeats=9):
    """The shortest time of `call()` on this rank: whatever else the machine does can only add."""
    times = []
    for _ in range(repeats + 1):
        wait_for_all()
        start = time.perf_counter()
        call()
        finish()
        times.append(time.perf_counter() - start)
    return min(times)


def finish():
    """All that was started on this rank's device is done."""
    if device().type == "cuda":
        torch.cuda.synchronize()  # a kernel's launch returns before the kernel is done


def wait_for_all():
    """Every rank is here, and its device has nothing left to do."""
    dist.barrier()
    finish()
