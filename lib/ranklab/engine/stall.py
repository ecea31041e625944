"""A deadlock seen early: ranks that all sleep in communication will sleep forever.

It is reported only when nothing else is possible. For a while, at every look, the main thread of
each rank sleeps (state S in /proc: it is not starved, stopped, or at a disk), and no rank uses the
CPU. Then each rank is asked, and answers that it waits for other ranks and for nothing else
(waiting.py). After half of that time all of this holds once more, because a message may have come
while the ranks were asked.
"""

import contextlib
import glob
import os
from pathlib import Path

LOOKS = 8  # at least, in a row
IDLE_TICKS = 1  # of 10 ms: gloo's threads look a hundred times a second whether they must end


class Watch:
    """Looks at processes again and again."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._since = self._ticks = None
        self._awake = set()
        self._looks = 0

    def all_asleep(self, pids, now):
        """Return True once they have slept for `seconds`; then start from 0 again."""
        looks = [_look(pid) for pid in pids]
        if None in looks:
            self._looks = 0
            return False
        ticks, awake = [n for n, _ in looks], set().union(*(threads for _, threads in looks))
        # gloo's threads wake to look around, so one may be awake at a look. One that is awake at
        # two in a row waits for its turn on a busy machine, perhaps with a message in its hands.
        has_starved, self._awake = bool(awake & self._awake), awake
        has_worked = self._looks and any(n > n0 + IDLE_TICKS for n, n0 in zip(ticks, self._ticks))
        if not self._looks or has_worked or has_starved:
            self._since, self._ticks, self._looks = now, ticks, 0
        self._looks += 1
        if self._looks < LOOKS or now - self._since < self._seconds:
            return False
        self._looks = 0
        return True


def _look(pid):
    """(CPU time, threads that don't sleep) of a process whose main thread sleeps; else None."""
    ticks, awake = 0, set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            state, *fields = stat.rpartition(")")[2].split()
            if state != "S":
                awake.add(thread)
            ticks += int(fields[10]) + int(fields[11])  # in user code, in the system
    except OSError:  # it has just ended, or this is no Linux
        return None
    return None if str(pid) in awake else (ticks, awake)


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
