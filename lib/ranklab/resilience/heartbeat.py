"""Heartbeats: ranks write each step into a file that they share; silent ranks are ended.

nvidia-resiliency-ext's ft_launcher and torchft's lighthouse do this over sockets (labs/jobs/).
"""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

from ranklab.engine.surroundings import patience

LOOK = 0.05  # seconds between two looks
STOPPED = 1.0  # seconds without a beat after which a stopped process is ended: it is not just slow


class Heartbeats:
    """Numbers in the file `path`: a row for each rank, a column for each step.

    times  when the rank had done the step, by time.monotonic(); 0: it has not done it
    work   seconds of work for the step, without waiting for others
    saves  seconds of the save after the step; -inf: the save was refused
    """

    def __init__(self, path, ranks, steps, mode="r+"):
        numbers = np.memmap(path, np.float64, mode, shape=(4, ranks, steps + 1))
        self.times, self.work, self.saves, self.pids = numbers

    def begin(self, rank, step):
        """Write that the rank is up, and has already done `step` steps."""
        self.pids[rank, 0], self.times[rank, step] = os.getpid(), time.monotonic()

    def beat(self, rank, step, seconds):
        """Write that the rank has done the step, with `seconds` of work."""
        self.times[rank, step], self.work[rank, step] = time.monotonic(), seconds

    def silent(self, limit):
        """Return the ids of the processes to end.

        None while ranks start, or if a rank has beaten in the last second. After that, the
        processes that a SIGSTOP has stopped; after `limit` seconds without a beat, all.
        """
        latest = self.times.max(axis=1)
        seconds = time.monotonic() - latest.max()
        if not latest.all() or seconds <= STOPPED:
            return []
        pids = [int(pid) for pid in self.pids[:, 0]]
        return [pid for pid in pids if is_stopped(pid)] or (pids if seconds > limit else [])


def is_stopped(pid):
    """Return whether a SIGSTOP has stopped the process; False without Linux's /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@contextlib.contextmanager
def watched(beats, limit):
    """Kill, in the block, ranks that do not beat for `limit` seconds, times patience()."""
    over = threading.Event()

    def watch():
        silent = []
        while not (silent or over.wait(LOOK)):
            silent = beats.silent(limit * patience())
        for pid in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
