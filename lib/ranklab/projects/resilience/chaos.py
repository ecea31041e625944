"""The chaos monkey: a seed decides which fault comes when. And the training run that it disturbs.

Its faults are real: signals to processes, a changed file, a write that the kernel refuses. Two are
emulated: a full disk, by a limit on the size of files (EFBIG, not ENOSPC), and a slow rank, by
sleep.
"""

import math
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ranklab.checkpoint.files import complete, rank_file
from ranklab.engine.report import Failure
from ranklab.projects.hybrid.training import HybridTrainer

IN_STEPS = ("killed", "stopped", "left", "corrupted", "slow")  # SIGKILL, SIGSTOP, it returns, bytes
IN_SAVES = ("killed in a save", "disk full")                   # of its checkpoint change, it sleeps
KINDS = IN_STEPS + IN_SAVES
SIGNALS = {"killed": signal.SIGKILL, "killed in a save": signal.SIGKILL, "stopped": signal.SIGSTOP}
MARK = "corrupted-by-the-monkey"  # a file in a checkpoint
FULL = 4096  # bytes of a file that a full disk takes
SLOW_STEPS, SLOW_SECONDS = 9, 0.1


class Fault(NamedTuple):
    """A fault that strikes once: in the first step, or the first save, after `step` steps."""

    kind: str
    step: int
    rank: int  # modulo the number of ranks in this launch
    delay: float = 0.0  # seconds until a signal comes
    lost: int = 0  # ranks that are missing in the next launch


class Left(Exception):
    """This rank leaves without telling anyone."""


def plan_faults(seed, count, config, ranks):
    """Plan `count` Faults, in the order of their steps; the kinds take turns.

    A seed always gives the same faults.
    """
    draw, kinds, faults = random.Random(seed), [], []
    while len(kinds) < count:
        kinds += draw.sample(KINDS, len(KINDS))
    for kind in kinds[:count]:
        first = 2 * config.checkpoint_every if kind == "corrupted" else 1  # two checkpoints
        lost = int(kind in ("killed", "stopped", "corrupted") and draw.random() < 0.5)
        faults.append(Fault(kind, draw.randrange(min(first, config.steps - 2), config.steps - 1),
                            draw.randrange(ranks), draw.uniform(0, 0.04), lost))
    return sorted(faults, key=lambda fault: fault.step)


class ChaosTrainer(HybridTrainer):
    """A HybridTrainer whose ranks send a heartbeat after each step, and whose faults strike.

    beats   Heartbeats
    faults  of the whole run
    marks   a folder with a file for each fault that has struck, so that none strikes twice
    """

    def __init__(self, *arguments, beats, faults, marks):
        super().__init__(*arguments)
        self.beats, self.slow_until = beats, 0  # until this step
        self.own_faults = [(marks / str(n), fault) for n, fault in enumerate(faults)
                           if fault.rank % self.parallel.ranks == self.parallel.rank]

    def fit(self, until=None):
        self.beats.begin(self.parallel.rank, self.steps_done)
        return super().fit(until)

    def step(self, batch=None):
        self.strike(IN_STEPS)
        before = time.thread_time()  # waiting for others doesn't count
        share = super().step(batch)
        seconds = time.thread_time() - before + self.waits[-1]
        self.beats.beat(self.parallel.rank, self.steps_done, seconds)
        return share

    def next_batch(self):
        time.sleep(SLOW_SECONDS if self.steps_done < self.slow_until else 0)
        return super().next_batch()

    def save(self):
        """Save a checkpoint; skip a save that a full disk refuses, unless it is the last one."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        is_full, before = self.strike(IN_SAVES) == "disk full", time.perf_counter()
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL if is_full else soft, hard))
        try:
            super().save()
        except (OSError, RuntimeError) as error:
            is_agreed = not Failure.from_error(error).is_lost_peer()  # all ranks have this error
            if not is_agreed or self.steps_done == self.schedule.steps:
                raise
            before = math.inf
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        self.beats.saves[self.parallel.rank, self.steps_done] = time.perf_counter() - before

    def strike(self, kinds):
        """Trigger the first of these faults that is due; return its kind, or None."""
        file, fault = next(((file, fault) for file, fault in self.own_faults if fault.kind in kinds
                            and fault.step <= self.steps_done and not file.exists()), (None, None))
        if fault is None:
            return None
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
        if fault.kind in SIGNALS:
            number = SIGNALS[fault.kind]
            threading.Timer(fault.delay, os.kill, (os.getpid(), number)).start()
        return fault.kind


def corrupt(path, count=16):
    """Change `count` bytes in the middle of the file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        old = file.read(count)
        file.seek(-len(old), os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in old))
