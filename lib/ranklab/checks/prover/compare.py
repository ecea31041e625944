"""What a function shows, what is right, and where they differ."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ranklab.checks.trial import is_near
from ranklab.engine.report import Failure

RAISED = "what it raised"


class AtMost(NamedTuple):
    """A number of which less is right, too: bytes, messages, calls.

    limit  by a formula; without it, what the library's answer needs
    says   how it is told, with a place for each of the two: "sends {:.1f} MB; {:.1f} is enough"
    """

    number: float
    limit: float | None = None
    says: str = ""


class InAll(NamedTuple):
    """A number of this rank that is added up over the group; only the sum must not exceed the right
    one.
    """

    number: float
    limit: float | None = None


class Must(NamedTuple):
    """A value and what it must be, whatever the case: [], where no such call may be made."""

    value: Any
    be: Any


class Agree(NamedTuple):
    """A tensor that must be the same on all ranks of the group, to the bit."""

    tensor: Any


class Told(NamedTuple):
    """A value that has its own way of being told.

    tell  what is seen, what is right -> a text such as "a sum that lacks rank 2", or ""
    """

    value: Any
    tell: Callable


class Traced(NamedTuple):
    """A value that tells little; only in a stage without ranks, for the function is called again.

    trace  what is seen, what is right -> what else the function does there: called where they
           differ, to tell mistakes apart, and not judged
    """

    value: Any
    trace: Callable


@dataclass(frozen=True)
class Raised:
    """An exception of the function. Another message is right, another class is not."""

    kind: str
    headline: str
    text: str

    @classmethod
    def from_error(cls, error):
        failure = Failure.from_error(error)
        return cls(failure.kind, failure.headline(), str(failure))


class Seen(NamedTuple):
    """What one rank shows in one step of a case.

    where    "rank 0 of 4, 24 elements"
    members  the ranks of its group
    values   {name: value}; {RAISED: Raised} where the case ended with one
    """

    where: str
    members: tuple
    values: dict

    @property
    def error(self):
        return self.values.get(RAISED)

    def value(self, name):
        return self.error or self.values.get(name)


def differences(stage, results, right):
    """Return {(step, name): ranks} that are not right, in the order in which they are told.

    results, right  {step: Seen} of each rank; a step that was not reached is not compared
    """
    apart = {}
    for step in dict.fromkeys(step for of_rank in right for step in of_rank):
        members = [rank for rank, of_rank in enumerate(right) if step in of_rank]
        if not all(_reached(results[rank], step) for rank in members):
            continue
        for name in dict.fromkeys(name for rank in members for name in right[rank][step].values):
            ranks = [rank for rank in members
                     if _is_wrong(stage, results, right, rank, step, name)]
            if ranks:
                apart[step, name] = ranks
    return dict(sorted(apart.items(), key=lambda item: (stage.place(item[0][1]), item[0][0])))


def _reached(of_rank, step):
    return step in of_rank or _error(of_rank, step)


def _error(of_rank, step):
    """Return the Seen with which the case of this step ended early, or None."""
    case, number = step
    return next((of_rank[case, n] for n in range(number, -1, -1)
                 if (case, n) in of_rank and of_rank[case, n].error), None)


def value_at(of_rank, step, name):
    """Return what a rank shows there; the error with which the case ended, if it did."""
    return (of_rank.get(step) or _error(of_rank, step)).value(name)


def _is_wrong(stage, results, right, rank, step, name):
    if name not in right[rank][step].values:
        return False
    got, due = value_at(results[rank], step, name), right[rank][step].values[name]
    if isinstance(due, Agree | InAll) and isinstance(got, type(due)):
        members = right[rank][step].members
        of_group = [value_at(results[member], step, name) for member in members]
        if not all(isinstance(each, type(due)) for each in of_group):
            return False  # another rank is told
        if isinstance(due, Agree):
            return not _are_equal_tensors(got.tensor, of_group[0].tensor)
        limits = [_limit(each, right[member][step].values[name])
                  for each, member in zip(of_group, members)]
        return _exceeds(sum(each.number for each in of_group), sum(limits))
    return is_apart(stage, got, due)


def _are_equal_tensors(x, y):
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and (
        x.dtype == y.dtype and torch.equal(x, y))


def is_right(stage, results, right):
    """Return whether a rank shows what is right; False where that depends on other ranks, too."""
    return results.keys() == right.keys() and not any(
        isinstance(due, Agree | InAll) or is_apart(stage, results[step].value(name), due)
        for step, entry in right.items() for name, due in entry.values.items())


def is_apart(stage, got, due):
    """Return whether `got` is not right, by what one rank knows."""
    if isinstance(due, Raised):
        return not (isinstance(got, Raised) and got.kind == due.kind)
    if isinstance(due, Must):
        return not isinstance(got, Must) or not _is_same(plain(got.value), plain(got.be))
    if isinstance(due, AtMost):
        return not isinstance(got, AtMost) or _exceeds(got.number, _limit(got, due))
    if isinstance(due, Agree | InAll):
        return not isinstance(got, type(due))
    return not is_alike(stage, got, due)


def _is_same(x, y):
    try:
        return bool(x == y)
    except (ValueError, RuntimeError):  # an array is neither true nor false, and no list
        return False


def _exceeds(number, limit):
    return not (number <= limit or math.isclose(number, limit, rel_tol=1e-9))  # NaN does


def _limit(got, due):
    return due.number if got.limit is None else got.limit


def is_alike(stage, x, y):
    """Return whether two values are the same but for rounding."""
    x, y = plain(x), plain(y)
    if isinstance(y, torch.Tensor) or _is_number(x) and _is_number(y):
        return x is y or _is_nan(x) and _is_nan(y) or is_near(
            x, y, stage.through, stage.roundings)
    if isinstance(x, dict) and isinstance(y, dict):
        return [*x] == [*y] and all(is_alike(stage, x[key], y[key]) for key in x)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return len(x) == len(y) and all(
            is_alike(stage, *each) for each in zip(x, y))
    if isinstance(x, Raised) and isinstance(y, Raised):
        return x.headline == y.headline
    return type(x) is type(y) and x == y


def plain(value):
    """Return a value without its way of being told, and without its trace."""
    return plain(value.value) if isinstance(value, Told | Traced) else value


def _is_number(value):
    return isinstance(value, float | int)


def _is_nan(value):
    return isinstance(value, float) and value != value
