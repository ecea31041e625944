"""The record of a run: each rank writes lines of JSON into a folder, from which they are read.

observer.py writes a line at each event, so even a rank killed in a hang has recorded what it did.
This file defines the lines. Tensors are recorded as Digests (digests.py).
"""

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ranklab.clinic.digests import Digest

MOST_BYTES = 1 << 24  # of a file; the first and the two newest are kept


class Call(NamedTuple):
    """A collective or a message of this rank."""

    number: int  # in its group, from 0; of messages -1
    group: str  # the name, the same on all its ranks
    kind: str  # "all_reduce", ...
    op: str  # "SUM", ...; "" if it has none
    root: int | None
    line: str  # of the program: "train.py:31"
    step: int  # optimizer steps before it
    backwards: int  # since the last of these
    in_backward: bool
    tensor: str  # "gradient 3", "weight 3": of the optimizers' parameters; or ""
    digest: Digest  # of this rank's input
    norm: float  # of its gradients at that moment, if its input is one number
    words: dict  # string variables of the loops around it: {"name": "wiki"}


class Loss(NamedTuple):
    """A mean or sum over targets, recorded in backward."""

    count: float  # targets that are not ignored
    weight: float  # of each of them, in the loss from which backward began
    targets: int  # their bits


class Step(NamedTuple):
    """A step of an optimizer. Lists of digests have one for each parameter."""

    number: int
    optimizer: int  # the number of the optimizer
    calls: int  # collectives of all ranks before it
    backwards: int  # since the step before
    flops: int  # of products computed since then, without validation
    rate: float  # the largest learning rate
    names: list  # of the parameters
    weights: list  # Digest, before the step
    local: list  # for each backward, Digest.dot of the gradients that it computed, or None
    reached: list  # for each backward, the number of parameters, of all optimizers, that it reached
    final: list  # Digest or None, of the gradients used by the optimizer
    factors: list  # factors on the sums of reduce_scatter; None: not known
    finite: bool  # the weights after it
    losses: list  # Loss
    values: list  # of losses from which backward began, without their sign
    rows: list  # bits of examples that entered the model
    largest: float  # number that entered the model
    masks: list  # (bits of a dropout mask, bits of the tensor it was applied to)
    sums: list  # of the weights used by the model, and of those that optimizers hold, rounded to
                # the model's dtype if it has 16 bits; or []
    norms: list  # of the same weights, not rounded
    twins: list  # (name, numbers, norm) of the model's weights that no optimizer holds
    memory: int  # bytes in use
    pending: list  # lines of reductions that have not been waited for
    outside: int  # parameters of the model that have a gradient and no optimizer
    embeddings: list  # indices of the embedding parameters
    clip: float  # factor of torch's clipping on the gradients
    unscale: float  # factor of torch's GradScaler on the gradients
    begins: list  # the line at which each backward began
    begun: list  # wrappers.state_of after this step, if the optimizer had no state before it


@dataclass
class Rank:
    """The whole record of one rank."""

    number: int
    groups: dict = field(default_factory=dict)  # name -> its ranks
    calls: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    norms: list = field(default_factory=list)  # (number, bits, norm): batch norm's means, in eval()
    loads: list = field(default_factory=list)  # wrappers.Version
    restores: list = field(default_factory=list)  # steps before an optimizer's load_state_dict
    changes: list = field(default_factory=list)  # (tensor, its reduction's line, the change's line)
    saves: list = field(default_factory=list)
    passes: list = field(default_factory=list)  # (sampler, epoch, whether it shuffles)
    waits: str = ""  # the line at which it waits, or waited when it was killed
    fate: str = ""  # "returned", "raised ...", or "": it was killed
    half: bool = False  # it computed in float16
    process: tuple = ()  # its host, its id, when it began
    failures: list = field(default_factory=list)  # errors of its observer
    launched: bool = False  # by ranklab's launch

    def in_group(self, name):
        """List the collectives that this rank called in the group `name`, in order."""
        return [call for call in self.calls if call.group == name and call.number >= 0]


def by_optimizer(ranks):
    """Yield the same ranks for each optimizer, with only its steps.

    If some ranks have more optimizers than others, those optimizers are matched that begin after
    the same number of collectives of all ranks.
    """
    parts = [_by_optimizer(r.steps) for r in ranks]
    if len(set(map(len, parts))) == 1:
        parts = [dict(enumerate(steps_of.values())) for steps_of in parts]
    for key in sorted(set().union(*parts)):
        yield [replace(r, steps=steps_of.get(key, [])) for r, steps_of in zip(ranks, parts)]


def _by_optimizer(steps):
    parts, groups = {}, {}
    for step in steps:
        parts.setdefault(step.optimizer, []).append(step)
    for part in parts.values():
        turn = sum(calls == part[0].calls for calls, _ in groups)
        groups[part[0].calls, turn] = part
    return groups


def launches(folder):
    """Return the folders of a run's launches, in order of time."""
    files = {path.parent: path.stat().st_mtime_ns
             for path in sorted(Path(folder).glob("**/rank*.0.jsonl"))}
    return sorted(files, key=files.get)


def read(folder):
    """Return [Rank, ...], sorted by number, from the lines in this folder."""
    files = defaultdict(list)
    for path in Path(folder).glob("rank*.*.jsonl"):
        files[int(path.name.split(".")[0][4:])].append(path)
    return [_rank(number, paths) for number, paths in sorted(files.items())]


def _rank(number, paths):
    rank = Rank(number)
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        for line in path.read_text().splitlines():
            try:
                kind, *content = json.loads(line)
            except ValueError:  # it was killed while writing
                continue
            READERS[kind](rank, *content)
    return rank


def _step(rank, *content):
    step = Step(*content)
    digests = {name: [row and Digest(*row) for row in getattr(step, name)]
             for name in ("weights", "final")}
    rank.steps.append(step._replace(**digests, losses=[Loss(*row) for row in step.losses]))


def _call(rank, *content):
    call = Call(*content)
    rank.calls.append(call._replace(digest=Digest(*call.digest)))


READERS = {
    "group": lambda rank, name, ranks: rank.groups.update({name: tuple(ranks)}),
    "call": _call,
    "step": _step,
    "norm": lambda rank, *content: rank.norms.append(content),
    "load": lambda rank, *content: rank.loads.append(content),
    "save": lambda rank, *content: rank.saves.append(content),
    "restore": lambda rank, steps: rank.restores.append(steps),
    "change": lambda rank, *content: rank.changes.append(content),
    "pass": lambda rank, *content: rank.passes.append(content),
    "wait": lambda rank, line: setattr(rank, "waits", line),
    "back": lambda rank: setattr(rank, "waits", ""),
    "half": lambda rank: setattr(rank, "half", True),
    "failure": lambda rank, text: rank.failures.append(text),
    "launched": lambda rank: setattr(rank, "launched", True),
    "process": lambda rank, *content: setattr(rank, "process", content),
    "fate": lambda rank, word: setattr(rank, "fate", word),
}


class Lines:
    """The file of a rank. After MOST_BYTES it starts a new one; the first and the two newest stay.
    """

    def __init__(self, folder, rank):
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._path = str(Path(folder, f"rank{rank}.%d.jsonl"))
        self._turns = itertools.chain([0], itertools.cycle([1, 2]))
        self._file, self._left = None, 0

    def write(self, *content):
        line = json.dumps(content).encode() + b"\n"
        if self._left < len(line):
            self._file = open(self._path % next(self._turns), "wb", buffering=0)
            self._left = MOST_BYTES
        self._file.write(line)
        self._left -= len(line)
