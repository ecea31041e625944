"""A deadlock seen early: ranks that all sleep in communication will sleep forever.

It is reported only when nothing else is possible. For a while, at every look, the main thread of
each rank sleeps (state S in /proc: it is not starved, stopped, or at a disk), and no rank uses the
CPU or writes, as gloo must to send. Then each rank is asked, and answers that it waits for other
ranks and for nothing else (waiting.py). After half of that time all of this holds once more,
because a message may have come while the ranks were asked.

A rank that makes a group is an exception: until its peers come, its main thread reads the store's
file a hundred times a second, and on a busy machine it is awake at every other look. Once it has
slept in one such call more often than making a group takes, its main thread is not looked at.
"""

import contextlib
import glob
import os
from pathlib import Path

LOOKS = 8  # at least, in a row
IDLE_TICKS = 1  # of 10 ms: gloo's threads look a hundred times a second whether they must end
READS = 100  # of the store in one call; to connect the pairs of a group takes a few for each peer


class Watch:
    """Looks at processes again and again."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._since = self._work = None
        self._awake = set()
        self._looks = 0
        self._sleeps = {}  # (process, its call) -> how often it had slept before

    def all_asleep(self, pids, now, in_store=None):
        """Return True once they have slept for `seconds`; then start from 0 again.

        in_store: by process: the number of the call in which it waits at the store now
        """
        reading = {pid for pid, call in (in_store or {}).items() if self._reads(pid, call)}
        looks = [_look(pid, pid in reading) for pid in pids]
        if None in looks:
            self._looks = 0
            return False
        work, awake = [done for done, _ in looks], set().union(*(threads for _, threads in looks))
        # gloo's threads wake to look around, so one may be awake at a look. One that has not slept
        # until the next waits for its turn on a busy machine, perhaps with a message in its hands.
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
        """Return whether nothing but reading the store is left to this call of a process."""
        sleeps = _sleeps(pid, pid)
        return sleeps - self._sleeps.setdefault((pid, call), sleeps) >= READS


def _look(pid, reads_store=False):
    """Return ((CPU time, writes), {(thread that is awake, how often it has slept)}) of a process.

    None if its main thread is awake.
    reads_store: the main thread does not count
    """
    ticks, awake, writes = 0, set(), _counter(f"/proc/{pid}/io", "syscw")
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            if reads_store and thread == str(pid):
                continue
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            state, *fields = stat.rpartition(")")[2].split()
            if state != "S":  # where nobody counts writes, it may have had its turn and sent
                awake.add((thread, None if writes is None else _sleeps(pid, thread)))
            ticks += int(fields[10]) + int(fields[11])  # in user code, in the system
    except OSError:  # it has just ended, or this is no Linux
        return None
    return None if str(pid) in dict(awake) else ((ticks, writes), awake)


def _sleeps(pid, thread):
    """Count how often a thread of a process has gone to sleep by itself."""
    return _counter(f"/proc/{pid}/task/{thread}/status", "voluntary_ctxt_switches") or 0


def _counter(file, name):
    """Return the number after `name` in a file of /proc; None where it can't be read."""
    with contextlib.suppress(OSError):  # it has just ended, or another may not look
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return None


def seconds_in_queue(pid):
    """Return how long the threads of a process, together, were ready to run without a core."""
    nanoseconds = 0
    for thread in glob.glob(f"/proc/{pid}/task/*/schedstat"):  # gloo's carry the messages
        with contextlib.suppress(OSError):  # it has just ended
            nanoseconds += int(Path(thread).read_text().split()[1])
    return nanoseconds / 1e9  # 0 where the system does not tell


def can_be_seen(on_gpus):
    """Return False where ranks have GPUs: one that waits for its GPU sleeps, and all is well."""
    return os.path.isdir("/proc/self/task") and not on_gpus
