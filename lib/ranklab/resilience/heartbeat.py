"""Heartbeats: ranks record each step in a shared file; silent ranks are killed.

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
STOPPED = 1.0  # seconds without a beat after which a stopped process is killed: it is not just slow


class Heartbeats:
    """Numbers in the file `path`: a row for each rank, a column for each step.

    times  time.monotonic() when the rank finished the step; 0: not finished yet
    work   seconds of work for the step, without waiting for others
    saves  seconds of the save after the step; -inf: the save was refused
    """

    def __init__(self, path, ranks, steps, mode="r+"):
        numbers = np.memmap(path, np.float64, mode, shape=(4, ranks, steps + 1))
        self.times, self.work, self.saves, self.pids = numbers

    def begin(self, rank, step):
        """Record that the rank is up, and has already done `step` steps."""
        self.pids[rank, 0], self.times[rank, step] = os.getpid(), time.monotonic()

    def beat(self, rank, step, seconds):
        """Record that the rank has done the step, with `seconds` of work."""
        self.times[rank, step], self.work[rank, step] = time.monotonic(), seconds

    def silent(self, limit):
        """Return the ids of the processes to kill.

        There are none while ranks start, or if any rank sent a beat in the last second. After that,
        the processes stopped by a SIGSTOP; after `limit` seconds without a beat, all processes.
        """
        latest = self.times.max(axis=1)
        seconds = time.monotonic() - latest.max()
        if not latest.all() or seconds <= STOPPED:
            return []
        pids = [int(pid) for pid in self.pids[:, 0]]
        return [pid for pid in pids if is_stopped(pid)] or (pids if seconds > limit else [])


def is_stopped(pid):
    """Return whether the process is stopped by a SIGSTOP; False without Linux's /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@contextlib.contextmanager
def watched(beats, limit):
    """Inside the block, kill ranks that send no beat for `limit` * patience() seconds."""
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
