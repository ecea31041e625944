"""What a check is made of. checks/<idea>.py holds the exercises and predictions of one lab.

A check is a generator: it yields one sentence for each property that holds, and raises Mistake at
the first that does not. It compares with an oracle that is not the code under test.
"""

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ranklab.engine import HangError, RankError, launch, ship

LIMIT = 10  # seconds for one launch of a check

_under_test = contextvars.ContextVar("the Exercise that is being checked", default=None)


class Mistake(Exception):
    """A property does not hold: what is seen, and a hint about this very mistake."""

    def __init__(self, what, hint=""):
        super().__init__(what)
        self.what = what
        self.hint = hint


@dataclass(frozen=True)
class Exercise:
    """A function or class for the learner to write; `answer` is the library's, of the same name."""

    answer: Callable
    check: Callable[[Callable], Iterator[str]]
    hints: tuple[str, str, str]

    @property
    def name(self):
        return self.answer.__name__


@dataclass(frozen=True)
class Prediction:
    """A number for the learner to predict before the code runs.

    working  how one gets it, as an expression: what a solution shows
    answer   the same number from the library, so that it can't rot
    slips    usual wrong numbers, each with what it confuses
    """

    name: str
    working: str
    answer: Callable[[], float]
    unit: str = ""
    slips: dict[float, str] | None = None
    why: str = ""
    tolerance: float = 0.01


def on_ranks(trial, *args, ranks, nodes=1, timeout=LIMIT):
    """The values of `trial(*args)` on all ranks; what the learner's code breaks is a Mistake."""
    call = ship.dumps_call(trial, args)
    exercise = _under_test.get()
    hidden = exercise and (exercise.answer.__module__, exercise.name)
    try:
        return launch(_run_hidden, call, hidden, ranks=ranks, nodes=nodes, timeout=timeout)
    except HangError as hang:
        raise Mistake(f"on {ranks} ranks it does not end: {hang}",
                      "Each rank that waits, waits for a message that nobody sends.") from None
    except RankError as error:
        raise Mistake(f"on {ranks} ranks, {error}") from None


def _run_hidden(call, hidden):
    if hidden:
        __import__(hidden[0])
        with hide(getattr(sys.modules[hidden[0]], hidden[1])):
            trial, args = ship.loads(call)
            return trial(*args)
    trial, args = ship.loads(call)
    return trial(*args)


@contextlib.contextmanager
def under_test(exercise):
    """Inside, `on_ranks` hides the library's answer from the ranks, and here it is hidden too."""
    token = _under_test.set(exercise)
    try:
        with hide(exercise.answer):
            yield
    finally:
        _under_test.reset(token)


@contextlib.contextmanager
def hide(answer):
    """Inside, no module of ranklab holds `answer`: a call of it is a Mistake, not a solution."""

    def library_answer(*_, **__):
        raise Mistake(f"it calls the library's own {answer.__name__}",
                      "Write the core yourself; the library's answer is what you rebuild here.")

    places = [(module, name) for module in list(sys.modules.values())
              if getattr(module, "__name__", "").startswith("ranklab.")
              for name, value in list(vars(module).items()) if value is answer]
    for module, name in places:
        setattr(module, name, library_answer)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, answer)
