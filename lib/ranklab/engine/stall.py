"""Detect a deadlock early: ranks that all sleep in communication will sleep forever.

It is reported only if nothing else is possible. For a while, at every look, the main thread of
each rank sleeps (state S in /proc: it is not starved, stopped, or waiting for a disk), and no rank
uses the CPU or writes, as gloo must do to send. Then each rank is asked, and answers that it waits
only for other ranks (waiting.py). All of this must hold again after half of that time, because a
message may have arrived while the ranks were asked.

A rank that makes a group is an exception: until its peers arrive, its main thread reads the store's
file a hundred times a second, and on a busy machine it is awake at every other look. Once it has
slept in such a call more often than making a group takes, its main thread is ignored.

Where ranks have GPUs nothing is detected early: a rank that waits for its GPU sleeps as well.
"""

import contextlib
import glob
import os
from pathlib import Path

LOOKS = 8  # at least, in a row
IDLE_TICKS = 1  # of 10 ms: gloo's threads check a hundred times a second whether they must end
READS = 100  # of the store in one call; connecting a group's pairs takes a few for each peer


class Watch:
    """Look at processes repeatedly."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._since = self._work = None
        self._awake = set()
        self._looks = 0
        self._sleeps = {}  # (process, its call) -> how often it had slept before

    def all_asleep(self, pids, now, in_store=None):
        """Return True once the processes have slept for `seconds`; then start from 0 again.

        in_store: {process: the number of the call in which it now waits at the store}
        """
        reading = {pid for pid, call in (in_store or {}).items() if self._reads(pid, call)}
        looks = [_look(pid, pid in reading) for pid in pids]
        if None in looks:
            self._looks = 0
            return False
        work, awake = [done for done, _ in looks], set().union(*(threads for _, threads in looks))
        # gloo's threads wake up regularly, so one may be awake at a look. One that has not slept
        # by the next look waits for a core on a busy machine, perhaps with a message to handle.
        has_starved, self._awake = bool(awake & self._awake), awake
        has_worked = self._looks and any(
            n > n0 + IDLE_TICKS or writes != writes0
            for (n, writes), (n0, writes0) in zip(work, self._work))
        if not self._looks or has_worked or has_starved:
            self._since, self._work, self._looks = now, work, 0
        self._looks += 1
        if self._looks < LOOKS or now - self._since < self._seconds:
            return False
        self._looks = 0
        return True

    def _reads(self, pid, call):
        """Return whether this call of a process now does nothing but read the store."""
        sleeps = _sleeps(pid, pid)
        return sleeps - self._sleeps.setdefault((pid, call), sleeps) >= READS


def _look(pid, reads_store=False):
    """Return ((CPU time, writes), {(thread that is awake, how often it has slept)}) of a process.

    None if its main thread is awake.
    reads_store: ignore the main thread
    """
    ticks, awake, writes = 0, set(), _counter(f"/proc/{pid}/io", "syscw")
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            if reads_store and thread == str(pid):
                continue
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            state, *fields = stat.rpartition(")")[2].split()
            if state != "S":  # if writes can't be counted, it may have run and sent since
                awake.add((thread, None if writes is None else _sleeps(pid, thread)))
            ticks += int(fields[10]) + int(fields[11])  # user time, system time
    except OSError:  # it has just ended, or this is not Linux
        return None
    return None if str(pid) in dict(awake) else ((ticks, writes), awake)


def _sleeps(pid, thread):
    """Return how often a thread of a process has gone to sleep voluntarily."""
    return _counter(f"/proc/{pid}/task/{thread}/status", "voluntary_ctxt_switches") or 0


def _counter(file, name):
    """Return the number after `name` in a file of /proc; None if it can't be read."""
    with contextlib.suppress(OSError):  # it has just ended, or reading it is not permitted
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return None


def seconds_in_queue(pid):
    """Return the total time that the threads of a process were ready to run but had no core."""
    nanoseconds = 0
    for thread in glob.glob(f"/proc/{pid}/task/*/schedstat"):  # gloo's threads carry the messages
        with contextlib.suppress(OSError):  # it has just ended
            nanoseconds += int(Path(thread).read_text().split()[1])
    return nanoseconds / 1e9  # 0 if the system does not report it


def can_be_seen(on_gpus):
    """Return False if ranks have GPUs: a rank that waits for its GPU sleeps without a deadlock."""
    return os.path.isdir("/proc/self/task") and not on_gpus
