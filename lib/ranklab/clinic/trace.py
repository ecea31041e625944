"""What a run shows of itself: each rank writes lines of JSON into a folder, and they are read back.

observer.py writes a line when something happens, so a rank that is killed in a hang has said what
it did. This file says what the lines are. Numbers of tensors are Digests (digests.py).
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
    """A collective of this rank, or a message."""

    number: int  # in its group, from 0; of messages -1
    group: str  # the name by which all its ranks know it
    kind: str  # "all_reduce", ...
    op: str  # "SUM", ...; "" where it has none
    root: int | None
    line: str  # of the program: "train.py:31"
    step: int  # optimizer steps before it
    backwards: int  # since the last of these
    in_backward: bool
    tensor: str  # "gradient 3", "weight 3": of the optimizers' parameters; or ""
    digest: Digest  # of what this rank gives
    norm: float  # of its gradients at that moment, where what it gives is one number
    words: dict  # strings over which a loop around it goes: {"name": "wiki"}


class Loss(NamedTuple):
    """A mean or sum over targets, as backward came to it."""

    count: float  # targets that are not left out
    weight: float  # of each of them, in what backward began with
    targets: int  # their bits


class Step(NamedTuple):
    """A step of an optimizer. Lists with digests have one for each parameter."""

    number: int
    optimizer: int  # the number of the one that takes it
    calls: int  # collectives of all ranks before it
    backwards: int  # since the step before
    flops: int  # of products that it has computed since; not in validation
    rate: float  # the largest learning rate
    names: list  # of the parameters
    weights: list  # Digest, before the step
    local: list  # of each backward, Digest.dot of the gradients that it came to, or None
    reached: list  # of each backward, the number of parameters of all optimizers
    final: list  # Digest or None, of gradients as the optimizer takes them
    factors: list  # numbers that a sum of reduce_scatter was multiplied by; None: not known
    finite: bool  # the weights after it
    losses: list  # Loss
    values: list  # of losses, from which backward began; without their sign
    rows: list  # bits of examples that entered the model
    largest: float  # number that entered the model
    masks: list  # (bits of a mask of dropout, bits of what it was applied to)
    sums: list  # of the weights that the model used, of those that optimizers held; or []
    norms: list  # of the same
    halves: list  # (name, numbers, norm) of the model's in 16 bits that no optimizer holds
    memory: int  # bytes that live
    pending: list  # lines of reductions that nobody has waited for
    outside: int  # parameters of the model that have a gradient and no optimizer
    embeddings: list  # numbers of the parameters that embed
    clip: float  # by which torch's clipping multiplied the gradients
    unscale: float  # by which torch's GradScaler did
    begins: list  # the line at which each backward began
    anew: bool  # the optimizer has no state yet


@dataclass
class Rank:
    """All that one rank has shown."""

    number: int
    groups: dict = field(default_factory=dict)  # name -> its ranks
    calls: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    norms: list = field(default_factory=list)  # (number, bits, norm): batch norm's means, in eval()
    loads: list = field(default_factory=list)  # (steps so far, its step, bits, has moments)
    restores: list = field(default_factory=list)  # steps before an optimizer's load_state_dict
    changes: list = field(default_factory=list)  # (tensor, its reduction's line, the change's line)
    saves: list = field(default_factory=list)
    passes: list = field(default_factory=list)  # (sampler, epoch, whether it shuffles)
    waits: str = ""  # the line at which it waits, or waited when it was ended
    fate: str = ""  # "returned", "raised ...", or "": it was ended
    half: bool = False  # it computed in float16
    process: tuple = ()  # its host, its id, when it began
    failures: list = field(default_factory=list)  # what its observer could not do
    launched: bool = False  # by ranklab's launch

    def in_group(self, name):
        """List the collectives that this rank called in the group `name`, in order."""
        return [call for call in self.calls if call.group == name and call.number >= 0]


def by_optimizer(ranks):
    """Yield the same ranks for each optimizer, with its steps alone.

    Where some ranks have more optimizers than others, the optimizers belong together that begin
    after the same number of collectives of all ranks.
    """
    parts = [_by_optimizer(r.steps) for r in ranks]
    if len(set(map(len, parts))) == 1:
        parts = [dict(enumerate(steps_of.values())) for steps_of in parts]
    for key in sorted(set().union(*parts)):
        yield [replace(r, steps=steps_of.get(key, [])) for r, steps_of in zip(ranks, parts)]


def _by_optimizer(steps):
    parts, named = {}, {}
    for step in steps:
        parts.setdefault(step.optimizer, []).append(step)
    for part in parts.values():
        turn = sum(calls == part[0].calls for calls, _ in named)
        named[part[0].calls, turn] = part
    return named


def launches(folder):
    """Return the folders of a run's launches, in order."""
    files = {path.parent: path.stat().st_mtime_ns
             for path in sorted(Path(folder).glob("**/rank*.0.jsonl"))}
    return sorted(files, key=files.get)


def read(folder):
    """Return [Rank, ...] by number, from what they wrote into this folder."""
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
            except ValueError:  # it was killed as it wrote
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
    "failure": lambda rank, what: rank.failures.append(what),
    "launched": lambda rank: setattr(rank, "launched", True),
    "process": lambda rank, *content: setattr(rank, "process", content),
    "fate": lambda rank, word: setattr(rank, "fate", word),
}


class Lines:
    """The file of a rank. After MOST_BYTES the next begins; the first and the two newest stay."""

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
