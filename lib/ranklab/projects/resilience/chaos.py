"""The chaos monkey: which fault comes when, by a seed; and the training that it sits in.

Its faults are real: signals to processes, a changed file, a write that the kernel refuses. Emulated
are a full disk, by a limit for the size of a file (EFBIG for ENOSPC), and a slow rank, by sleep.
"""

import errno
import math
import os
import random
import resource
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ranklab.checkpoint.files import complete, rank_file
from ranklab.projects.hybrid.training import HybridTrainer

KINDS = {  # fault -> what happens
    "killed": "SIGKILL in a step",
    "killed in a save": "SIGKILL in a save",
    "stopped": "SIGSTOP in a step",
    "left": "it never enters a collective",
    "corrupted": "bytes of its last checkpoint's file changed, then SIGKILL",
    "disk full": "its file grows too large in a save",
    "slow": "it waits for its data",
}
FULL_DISK = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
IN_SAVES = ("killed in a save", "disk full")
MARK = "corrupted-by-the-monkey"  # a file in a checkpoint
LATEST = 0.04  # seconds after the begin of a step or a save in which a signal comes
FULL = 20_000  # bytes of a file that are written before the "disk" is full
SLOW_STEPS, SLOW_SECONDS = 9, 0.1


class Fault(NamedTuple):
    """Strikes the rank once, in this step, or in the first save from then on."""

    kind: str
    step: int
    rank: int  # modulo the ranks that there are
    delay: float  # seconds
    lost: int  # ranks that are not back for the next launch


class Left(Exception):
    """This rank goes, and tells nobody."""


def plan_faults(seed, count, config, ranks):
    """`count` Faults in the order of their steps, always the same for a seed; kinds take turns."""
    draw, kinds = random.Random(seed), []
    while len(kinds) < count:
        kinds += draw.sample([*KINDS], len(KINDS))
    faults = []
    for kind in kinds[:count]:
        # a rank can lose a file when there is one, and the one before is wanted
        first = 2 * config.checkpoint_every if kind == "corrupted" else 1
        lost = int(kind in ("killed", "stopped", "corrupted") and draw.random() < 0.5)
        faults.append(Fault(kind, draw.randrange(min(first, config.steps - 2), config.steps - 1),
                            draw.randrange(ranks), draw.uniform(0, LATEST), lost))
    return sorted(faults, key=lambda fault: fault.step)


class ChaosTrainer(HybridTrainer):
    """HybridTrainer whose ranks beat after each step, and whose faults strike.

    beats   Beats, shared with the supervisor
    faults  of this run
    struck  a folder: a file for each fault that has struck, so that none comes twice
    """

    def __init__(self, *arguments, beats, faults, struck):
        super().__init__(*arguments)
        self.beats, self.slow_until = beats, 0  # until this step
        self.mine = [(struck / str(n), fault) for n, fault in enumerate(faults)
                     if fault.rank % self.parallel.ranks == self.parallel.rank]

    def fit(self, until=None):
        self.beats.begin(self.parallel.rank, self.steps_done)
        return super().fit(until)

    def step(self, batch=None):
        self.strike(in_save=False)
        before = time.thread_time()  # waiting for others takes none of it
        share = super().step(batch)
        seconds = time.thread_time() - before + self.waits[-1]
        self.beats.beat(self.parallel.rank, self.steps_done, seconds)
        return share

    def next_batch(self):
        if self.steps_done < self.slow_until:
            time.sleep(SLOW_SECONDS)
        return super().next_batch()

    def save(self):
        """As always; a save that is refused is left out, but not the last one."""
        full, before = self.strike(in_save=True), time.perf_counter()
        try:
            with files_of_at_most(FULL if full else None):
                super().save()
        except (OSError, RuntimeError) as error:  # all ranks have agreed on it
            is_full = any(os.strerror(number) in str(error) for number in FULL_DISK)
            if not is_full or self.steps_done == self.schedule.steps:
                raise
            before = math.inf
        self.beats.saves[self.parallel.rank, self.steps_done] = time.perf_counter() - before

    def strike(self, in_save):
        """What is due strikes; True where the disk is to be full."""
        due = [(file, fault) for file, fault in self.mine if fault.step <= self.steps_done
               and (fault.kind in IN_SAVES) == in_save and not file.exists()]
        for file, fault in due[:1]:  # one at a time
            file.write_text(str(time.monotonic()))
            if fault.kind == "left":
                raise Left
            if fault.kind == "slow":
                self.slow_until = self.steps_done + SLOW_STEPS
            if fault.kind == "corrupted":
                for place in complete(Path(self.loop.checkpoint))[-1:]:
                    corrupt(place / rank_file(self.parallel.rank))
                    (place / MARK).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind in ("killed", "killed in a save", "stopped"):
                number = signal.SIGSTOP if fault.kind == "stopped" else signal.SIGKILL
                timer = threading.Timer(fault.delay, os.kill, (os.getpid(), number))
                timer.daemon = True
                timer.start()
            return fault.kind == "disk full"


def corrupt(path, count=16):
    """So many bytes in the middle of the file are others."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        old = file.read(count)
        file.seek(-len(old), os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in old))


@contextmanager
def files_of_at_most(limit):
    """In the block the kernel refuses to let a file of this process grow beyond; None: no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
