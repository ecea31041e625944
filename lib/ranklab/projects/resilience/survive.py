"""survive: the supervisor. It starts ranks, notices that they are gone or hang, and goes on."""

import contextlib
import dataclasses
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ranklab.checkpoint.files import INDEX, Files, complete, saves
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.engine import RankError, launch
from ranklab.engine.report import MEMORY
from ranklab.hybrid import Hybrid, Layout
from ranklab.parallel import Piece
from ranklab.projects.command import LAUNCH_LIMIT
from ranklab.projects.hybrid.training import new_model
from ranklab.projects.resilience.beats import Beats, watched
from ranklab.projects.resilience.chaos import MARK, ChaosTrainer, Left

STALL = 1.0  # seconds in which all ranks sleep in communication
RESTARTS = 100


@dataclass
class Life:
    """From a launch to its end."""

    layout: Layout
    first: int  # the step of the checkpoint that it began with; 0: from the beginning
    last: int = 0  # the last step that a rank has done
    ended: str = ""  # why, in the engine's words; "": nothing failed
    faults: list = field(default_factory=list)  # that have struck
    noticed: float = 0.0  # seconds from the last fault to the end
    work: torch.Tensor | None = None  # (steps, ranks): seconds, without waiting for other ranks
    step_seconds: list = field(default_factory=list)
    saves: list = field(default_factory=list)  # seconds of each; below 0: a disk refused it


@dataclass
class Survived:
    """What a training has been through."""

    lives: list = field(default_factory=list)
    loss: float | None = None  # held out, after the last step
    state: dict | None = None  # {(name, kind): the whole tensor}, of the last checkpoint
    checked: set = field(default_factory=set)  # checkpoints whose files were all read
    damaged: int = 0  # of these, by their checksums
    torn: int = 0  # of these, by nobody's hand: there must be none
    seconds: float = 0.0

    def path(self):
        """[(Layout, the step up to which it counts)] of the steps that count."""
        path = []
        for life in self.lives:
            path = [each for each in path if each[1] < life.first]
            if not path or path[-1][0] != life.layout:
                path.append((life.layout, life.first))
        stops = [first for _, first in path[1:]] + [None]
        return [(layout, stop) for (layout, _), stop in zip(path, stops)]


def survive(shape, text, config, layouts, faults=(), heartbeat=3.0, timeout=LAUNCH_LIMIT,
            path=()):  # fmt: skip
    """The model is trained to the last step, whatever fails on the way; returns a Survived.

    layouts    the first that the ranks left suffice for is taken, or the last; ranks that are lost
               are back a launch later
    faults     Faults, which strike once each
    heartbeat  seconds without a step, times patience(), after which ranks are ended
    path       Survived.path(), followed instead
    error      RankError where even the last of RESTARTS failed
    """
    for layout in layouts:
        config.refuse_what_does_not_fit(shape, layout)
    found, started, path = Survived(), time.monotonic(), list(path)
    with tempfile.TemporaryDirectory(prefix="ranklab-chaos-") as folder:
        struck, saved = Path(folder, "struck"), Path(folder, "saved")
        struck.mkdir(), saved.mkdir()
        job = shape, text, dataclasses.replace(config, checkpoint=str(saved)), faults, struck
        left = layouts[0].ranks
        while found.loss is None:
            layout, stop = path.pop(0) if path else (fitting(layouts, left), None)
            life = live(found, job, layout, last_whole(saved, found), stop, heartbeat, timeout)
            left = layouts[0].ranks - sum(fault.lost for fault in life.faults)
        last_whole(saved, found)
        found.state = whole_state(complete(saved)[-1])
    found.seconds = time.monotonic() - started
    return found


def fitting(layouts, ranks):
    return next((layout for layout in layouts if layout.ranks <= ranks), layouts[-1])


def live(found, job, layout, first, stop, heartbeat, timeout):
    """One launch: to the end, to step `stop`, or until something fails. Returns its Life."""
    config, faults, struck = job[2:]
    life, before = Life(layout, first), {file.name for file in struck.iterdir()}
    found.lives.append(life)
    file = struck.with_name(f"beats-{len(found.lives)}")
    beats = Beats(file, layout.ranks, config.steps, "w+")
    try:
        with watched(beats, heartbeat):
            found.loss = launch(_work, *job, layout, str(file), stop, ranks=layout.ranks,
                                timeout=timeout, stall=STALL)[0]  # fmt: skip
    except RankError as error:
        if len(found.lives) > RESTARTS:
            raise
        life.ended = str(error).splitlines()[0].removesuffix(MEMORY)
    new = [file for file in struck.iterdir() if file.name not in before]
    life.faults = [faults[int(file.name)] for file in new]
    life.noticed = time.monotonic() - max((float(file.read_text()) for file in new), default=0)
    times, done = beats.times.max(axis=0), beats.times.any(axis=0).nonzero()[0]
    life.last = int(done[-1]) if len(done) else first
    life.step_seconds = [*(times[first + 1 : life.last + 1] - times[first : life.last])]
    life.work = torch.tensor(beats.work[:, first + 1 : life.last + 1].T)
    life.saves = [*beats.saves[0][beats.saves[0].nonzero()]]
    return life


def _work(shape, text, config, faults, struck, layout, beats, stop):
    """On each rank: the held-out loss; None where the last step is not done."""
    hybrid = Hybrid(layout.new_mesh(), layout)
    trainer = ChaosTrainer(new_model(shape, "meta"), text, config, hybrid, False, struck=struck,
                           beats=Beats(beats, layout.ranks, config.steps), faults=faults)
    if complete(Path(config.checkpoint)):
        trainer.resume()
    with contextlib.suppress(Left):
        trainer.fit(stop)
        if trainer.steps_done == config.steps:
            return trainer.history.held_out.get(config.steps) or trainer.evaluate()


# --- checkpoints ----------------------------------------------------------------------------------

def last_whole(folder, found):
    """The step of the last checkpoint that its checksums approve of; 0: there is none.

    What came after it is no longer there. No rank may be running.
    """
    for place in saves(folder).values():
        if not (place / INDEX).exists():  # a rank was killed as it wrote
            shutil.rmtree(place)
    step = 0
    for place in complete(folder):
        found.checked.add(place.name)
        try:
            files = Files(place)
            for rank in range(files.index["ranks"]):
                files.open(rank)
            step = files.index["step"]
        except ValueError:
            found.damaged += 1
            found.torn += not (place / MARK).exists()
            shutil.rmtree(place)
    return step


def whole_state(place):
    """{(name, kind): the whole tensor} of the checkpoint."""
    files, state = Files(place), {}
    for name, kinds in files.index["state"].items():
        for kind, has in kinds.items():
            whole = torch.empty(has["shape"], dtype=getattr(torch, has["dtype"]))
            piece = Piece(name, kind, tuple(has["shape"]), (0,) * whole.dim(), whole)
            reshard_checkpoint([piece], [files.overlapping(piece)])
            state[name, kind] = whole
    return state


def difference(state, other):
    """The largest between two of whole_state(); 0.0: they are equal bit for bit."""
    if state.keys() != other.keys():
        raise ValueError(f"one state has {len(state)} tensors, the other {len(other)}, or others")
    return max(0.0 if torch.equal(x, other[name]) else (x - other[name]).abs().max().item()
               for name, x in state.items())
