"""What a function shows in a stage: on ranks, in groups of them, or in this process."""

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.prover.compare import (
    RAISED, Agree, AtMost, InAll, Must, Raised, Seen, Told, Traced, is_apart, is_right,
)
from ranklab.checks.trial import on_ranks
from ranklab.engine import device, ship

ALL = ()  # the grouping of all ranks
GROUPS = ((0,), (1, 2, 3)), ((0, 2), (1, 3))  # groups of four whose ranks are not 0 .. n-1


@dataclass(frozen=True)
class Ranks:
    """The group of a case, seen from this rank; `group` is None where it is all ranks."""

    members: tuple
    group: Any

    def __str__(self):
        where = f"of {len(self.members)}" if self.group is None else (
            f"in the group of rank{'s' * (self.size > 1)} {', '.join(map(str, self.members))}")
        return f"rank {dist.get_rank()} {where}"

    @property
    def size(self):
        return len(self.members)

    @property
    def index(self):
        """This rank's number in the group."""
        return self.members.index(dist.get_rank())

    def at(self, size):
        """Return the indices of this rank's part; the first ranks have more where it is uneven."""
        return torch.arange(size, device=device()).tensor_split(self.size)[self.index]

    @property
    def keywords(self):
        """For a call that names the group only where there is one."""
        return {"group": self.group} if self.group else {}


def view_of(grouping):
    """Make the groups, on all ranks; return the Ranks of this rank's, or None."""
    whole = tuple(range(dist.get_world_size()))
    pairs = [(members, dist.new_group(members)) for members in grouping] or [(whole, None)]
    return next((Ranks(*each) for each in pairs if dist.get_rank() in each[0]), None)


@dataclass(frozen=True, eq=False)
class Stage:
    """Some cases that are looked at together, and what is said when all of them are right.

    holds      a sentence; or {sentence: the names that it is about}, and all others are the first's
    see        (fn, case, Ranks) yields {name: value}, equally often for every fn; without ranks:
               (fn, case). It calls fn and nothing else that communicates, and yields outside of
               meters
    ranks      launches, by their numbers of ranks; (): in this process
    groups     groupings of the ranks, each a tuple of groups; ALL is one group, which has no name
    oracle     a function in fn's place that is right for another reason: by torch, in one process.
               Costs without a limit are the library's answer's; without an oracle all is
    note       what is special here, true of any answer: said where no mistake is proved
    through    the narrowest type on the way, and
    roundings  more of them: see trial.is_near()
    """

    holds: str | dict
    see: Callable
    cases: tuple
    ranks: tuple = ()
    groups: tuple = (ALL,)
    oracle: Callable | None = None
    note: str = ""
    through: Any = None
    roundings: int = 0
    launch: dict = field(default_factory=dict)

    @property
    def sentences(self):
        return [self.holds] if isinstance(self.holds, str) else [*self.holds]

    def place(self, name):
        """Return the number of the sentence that a name belongs to."""
        names_of = [] if isinstance(self.holds, str) else [*self.holds.values()]
        return next((i for i, names in enumerate(names_of) if name in names), 0)

    def case_name(self, number):
        """Return how the case of this number is called: they are counted through all groupings."""
        grouping, case = divmod(number, len(self.cases))
        groups = " and ".join(f"{[*members]}" for members in self.groups[grouping])
        return f"{self.cases[case]}" + f", in the groups {groups}" * bool(groups)


def observe(stage, ranks, answer, fn, right=None, stops=False):
    """Return (what is right, packed; {step: Seen} of each rank as `fn` shows it, or None where each
    rank has found its own to be right).

    ranks: 0: in this process
    right: as known from an earlier call
    stops: all ranks end with the first step in which anything differs: later it would break
    Raises: Mistake where `fn` breaks
    """
    if not ranks:
        right = right or [_due(stage, lambda one: dict(_walk(stage, one)), answer)]
        return right, [dict(_walk(stage, fn))]
    with tempfile.TemporaryDirectory(prefix="ranklab-") as folder:
        try:
            of_ranks = on_ranks(_on_rank, stage, answer, fn, right, stops, folder, ranks=ranks,
                                **stage.launch)
        except Mistake as mistake:
            mistake.case = _case_of(mistake, folder)
            raise
    due, results, are_right = zip(*of_ranks)
    return right or due, None if all(are_right) else [*map(ship.loads, results)]


def unpacked(right):
    """Return {step: Seen} of each rank that is right."""
    return [ship.loads(each) if isinstance(each, bytes) else each for each in right]


def _case_of(mistake, folder):
    """Return the number of the case in which it broke: of the rank that ended, or else of the one
    that has come least far.
    """
    numbers = {int(path.name): int(path.read_text() or 0) for path in Path(folder).iterdir()}
    return numbers.get(mistake.rank, min(numbers.values(), default=None))


def _due(stage, walk, answer):
    """Return {step: Seen} of what is right: the oracle's, and the answer's where that is silent."""
    if not stage.oracle:
        return walk(answer)
    due = walk(stage.oracle)
    if all(_is_settled(value) for entry in due.values() for value in entry.values.values()):
        return due
    own = walk(answer)
    return {step: entry._replace(values={
        name: value if _is_settled(value) else own[step].value(name)
        for name, value in entry.values.items()}) for step, entry in due.items()}


def _is_settled(value):
    return not (isinstance(value, AtMost | InAll) and value.limit is None)


def _walk(stage, fn):
    for number, case in enumerate(stage.cases):
        step = 0
        try:
            for step, values in enumerate(map(_kept, stage.see(fn, case))):
                yield (number, step), Seen(str(case), (0,), values)
                step += 1
        except Exception as error:
            yield (number, step), Seen(str(case), (0,), {RAISED: Raised.from_error(error)})


def _on_rank(stage, answer, fn, right, stops, folder):
    """Return (what is right on this rank, what `fn` shows: both packed, for few learners make it
    necessary to open them; whether that is right).
    """
    rank = dist.get_rank()
    views = {number: view for number, view in enumerate(map(view_of, stage.groups)) if view}
    due = ship.loads(right[rank]) if right else _due(
        stage, lambda one: dict(_walk_on_rank(stage, one, views)), answer)
    path = Path(folder, str(rank))
    results = dict(_walk_on_rank(stage, fn, views, due if stops else None, path.write_text))
    return None if right else ship.dumps(due), ship.dumps(results), is_right(stage, results, due)


def _walk_on_rank(stage, fn, views, right=None, at=lambda number: None):
    for (grouping, ranks), (case_number, case) in itertools.product(
            views.items(), enumerate(stage.cases)):
        number = grouping * len(stage.cases) + case_number
        at(str(number))
        for step, values in enumerate(map(_kept, stage.see(fn, case, ranks))):
            yield (number, step), Seen(f"{ranks}, {case}", ranks.members, values)
            if right and _differs_anywhere(stage, values, right[number, step].values):
                return


def _differs_anywhere(stage, values, right):
    differs = any(is_apart(stage, values.get(name), right[name]) for name in right)
    differs = torch.tensor(float(differs), device=device())
    dist.all_reduce(differs)
    return bool(differs)


def _kept(value):
    """Return a copy on the CPU: later calls may write into what is kept between calls."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items()}
    if isinstance(value, Told | Traced):
        return value._replace(value=_kept(value.value))
    if isinstance(value, Agree):
        return Agree(_kept(value.tensor))
    if isinstance(value, Must):
        return Must(_kept(value.value), _kept(value.be))
    return [_kept(each) for each in value] if type(value) in (list, tuple) else value
