"""Heartbeats: ranks note each step in a file, and the supervisor ends ranks that note none."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

from ranklab.engine.surroundings import patience

LOOK = 0.05  # seconds between two looks


class Beats:
    """Numbers in a file that all processes share: a row for each rank, a column for each step."""

    def __init__(self, path, ranks, steps, mode="r+"):
        numbers = np.memmap(path, np.float64, mode, shape=(4, ranks, steps + 1))
        self.times, self.work, self.saves, self.pids = numbers

    def begin(self, rank, step):
        self.pids[rank, 0] = os.getpid()
        self.times[rank, step] = time.monotonic()

    def beat(self, rank, step, seconds):
        """seconds  of work in this step, without waiting for other ranks"""
        self.times[rank, step], self.work[rank, step] = time.monotonic(), seconds

    def silent(self, limit):
        """The processes to end: none as long as one of them has beaten lately; the stopped ones,
        or all where each still runs.
        """
        latest = self.times.max(axis=1)
        if not latest.all() or time.monotonic() - latest.max() <= limit:
            return []
        pids = [int(pid) for pid in self.pids[:, 0]]
        return [pid for pid in pids if is_stopped(pid)] or pids


def is_stopped(pid):
    """True where a SIGSTOP has come to the process; False where there is no /proc to say so."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@contextlib.contextmanager
def watched(beats, limit):
    """In the block ranks that do not beat for `limit` seconds, times patience(), are killed."""
    over = threading.Event()

    def watch():
        while not over.wait(LOOK):
            for pid in (silent := beats.silent(limit * patience())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if silent:
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
