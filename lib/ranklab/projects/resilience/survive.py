"""survive: the supervisor. It starts ranks, notices when they die or hang, and restarts them."""

import contextlib
import dataclasses
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ranklab.checkpoint.files import INDEX, Files, complete, saves
from ranklab.engine import RankError, launch
from ranklab.engine.report import MEMORY
from ranklab.hybrid import Hybrid, Layout
from ranklab.projects.command import LAUNCH_LIMIT
from ranklab.projects.resilience.chaos import MARK, ChaosTrainer, Left
from ranklab.projects.training import new_model
from ranklab.resilience.heartbeat import Heartbeats, watched

STALL = 1.0  # seconds during which all ranks sleep in communication
SPARE = 3  # failures that we accept beyond the planned faults


@dataclass
class Life:
    """One launch, to its end. The arrays come from Heartbeats, for steps first to last."""

    layout: Layout
    first: int  # the step of the checkpoint that it began with; 0: from the beginning
    last: int  # the last step that a rank has done
    ended: str  # why, in the engine's words; "": nothing failed
    noticed: float  # seconds from the last fault to the end
    faults: list  # those that have struck
    times: np.ndarray
    work: np.ndarray
    saves: np.ndarray


@dataclass
class Survived:
    """The history of a training run."""

    lives: list = field(default_factory=list)
    loss: float | None = None  # held out, after the last step
    state: dict = field(default_factory=dict)  # {box: tensor}, of the last checkpoint
    checked: int = 0  # checkpoints whose files were all compared with their checksums
    damaged: int = 0  # of these
    torn: int = 0  # of these, but not by the monkey: there must be none
    seconds: float = 0.0

    def path(self):
        """Return [(Layout, the step up to which it counts)]; None: to the end."""
        path = []
        for life in self.lives:
            path = [each for each in path if each[1] < life.first]
            if not path or path[-1][0] != life.layout:
                path.append((life.layout, life.first))
        stops = [first for _, first in path[1:]] + [None]
        return [(layout, stop) for (layout, _), stop in zip(path, stops)]


def survive(shape, text, config, layouts, faults=(), timeout=LAUNCH_LIMIT, path=(), heartbeat=3):
    """Train to the last step, whatever fails on the way; return a Survived.

    layouts    the first that fits on the remaining ranks is used, or else the last; a lost
               rank is back one launch later
    faults     Faults that strike
    path       from a Survived: these layouts are used instead, at the same steps
    heartbeat  seconds without a step, times patience(), after which the ranks are killed
    Raises RankError if ranks fail SPARE times more often than there are faults.
    """
    for layout in layouts:
        config.refuse_what_does_not_fit(shape, layout)
    run, started, path, capacity = Survived(), time.monotonic(), list(path), layouts[0].ranks
    with tempfile.TemporaryDirectory(prefix="ranklab-chaos-") as folder:
        marks, checkpoints = Path(folder, "struck"), Path(folder, "saved")
        marks.mkdir(), checkpoints.mkdir()
        job = shape, text, dataclasses.replace(config, checkpoint=str(checkpoints)), faults, marks
        while run.loss is None:
            fitting = [layout for layout in layouts if layout.ranks <= capacity] or layouts[-1:]
            layout, stop = path.pop(0) if path else (fitting[0], None)
            life = live(run, job, layout, last_whole(checkpoints, run), stop, timeout, heartbeat)
            capacity = layouts[0].ranks - sum(fault.lost for fault in life.faults)
        last_whole(checkpoints, run)
        run.state = last_state(checkpoints)
    run.seconds = time.monotonic() - started
    return run


def live(run, job, layout, first, stop, timeout, heartbeat):
    """Launch once, until the end, step `stop` or a failure; return a Life."""
    config, faults, marks = job[2:]
    before, reason = {*marks.iterdir()}, ""
    file = str(marks.with_name(f"beats-{len(run.lives)}"))
    beats = Heartbeats(file, layout.ranks, config.steps, "w+")
    try:
        with watched(beats, heartbeat):
            run.loss = launch(_work, *job, layout, file, stop, ranks=layout.ranks,
                              timeout=timeout, stall=STALL)[0]  # fmt: skip
    except RankError as error:
        if len(run.lives) >= len(faults) + SPARE:
            raise
        reason = str(error).splitlines()[0].removesuffix(MEMORY)
    new = sorted((float(file.read_text()), file) for file in {*marks.iterdir()} - before)
    noticed = time.monotonic() - (new[-1][0] if new else 0)
    last = max(beats.times.any(axis=0).nonzero()[0], default=first)
    arrays = [each[:, first : last + 1].copy() for each in (beats.times, beats.work, beats.saves)]
    run.lives.append(Life(layout, first, int(last), reason, noticed,
                          [faults[int(file.name)] for _, file in new], *arrays))
    return run.lives[-1]


def _work(shape, text, config, faults, marks, layout, beats, stop):
    """Train on each rank; return the held-out loss, or None if the last step is not done."""
    hybrid, beats = Hybrid(layout.new_mesh(), layout), Heartbeats(beats, layout.ranks, config.steps)
    trainer = ChaosTrainer(new_model(shape, "meta"), text, config, hybrid, False,
                           beats=beats, faults=faults, marks=marks)
    if complete(Path(config.checkpoint)):
        trainer.resume()
    with contextlib.suppress(Left):
        trainer.fit(stop)
        if trainer.steps_done == config.steps:
            return trainer.history.held_out.get(config.steps) or trainer.evaluate()


def last_state(folder):
    """Return {box: tensor} of the last checkpoint: weights and optimizer state."""
    files, state = Files(complete(folder)[-1]), {}
    for rank in range(files.index["ranks"]):
        state |= files.open(rank)["boxes"]
    return state


def differing(state, expected):
    """Return the names of tensors that only one of the states has, or that differ in any bit."""
    return [name for name in state.keys() | expected.keys() if name not in state
            or name not in expected or not torch.equal(state[name], expected[name])]


def last_whole(folder, run):
    """Return the step of the last checkpoint with correct checksums; 0 if there is none.

    Damaged and unfinished checkpoints are deleted, so no rank may be running.
    """
    step = 0
    for place in saves(folder).values():
        if not (place / INDEX).exists():  # a rank was killed as it wrote
            shutil.rmtree(place)
            continue
        run.checked += 1
        try:
            files = Files(place)
            for rank in range(files.index["ranks"]):
                files.open(rank)
            step = files.index["step"]
        except ValueError:
            run.damaged += 1
            run.torn += not (place / MARK).exists()
            shutil.rmtree(place)
    return step
