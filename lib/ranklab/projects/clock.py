"""Timing on ranks: all start together, and the device has finished when the clock is read."""

import time

import torch
import torch.distributed as dist

from ranklab.engine import device


def best_seconds(call, repeats=9):
    """Return the shortest time of `call()` on this rank: other load on the machine only adds.

    Collective: every rank must call it, because all start together.
    """
    times = []
    for _ in range(repeats + 1):
        wait_for_all()
        start = time.perf_counter()
        call()
        finish()
        times.append(time.perf_counter() - start)
    return min(times)


def in_turns(calls, rounds, warm_up=4):
    """Time the calls in rounds of one call each, so that a busy moment affects all of them.

    Each round begins with a different call.
    calls: {name: function}
    warm_up: untimed rounds before the timed ones
    Returns: {name: seconds of each call, until the slowest rank is done}
    """
    seconds, names = {name: [] for name in calls}, list(calls)
    for number in range(warm_up + rounds):
        names = [*names[1:], names[0]]  # the first call finds colder caches
        for name in names:
            wait_for_all()
            started = time.perf_counter()
            calls[name]()
            wait_for_all()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def finish():
    """Wait until all work queued on this rank's device is done."""
    if device().type == "cuda":
        torch.cuda.synchronize()  # a kernel's launch returns before the kernel is done


def wait_for_all():
    """Wait until every rank is here and this rank's device has nothing left to do."""
    dist.barrier()
    finish()
