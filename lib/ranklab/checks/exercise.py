"""What a check is made of. checks/<idea>.py holds the exercises and predictions of one lab.

A check is a generator: it yields one sentence for each property that holds, and raises Mistake at
the first that does not. It compares with an oracle that is not the code under test.
"""

import contextlib
import contextvars
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ranklab.engine import HangError, RankError, launch, ship

LIMIT = 10  # seconds for one launch of a check
STALL = 1  # second, after which ranks that all wait for each other are told so

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

    nudge    the first hint: what to think of, not what to compute
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
    nudge: str = ""

    @property
    def hints(self):
        """A nudge, a usual slip, and the working last: one more each time the learner asks."""
        unit = f" {self.unit}" if self.unit else ""
        slips = [f"A usual slip is {slip:.6g}{unit}: {confusion}"
                 for slip, confusion in (self.slips or {}).items()][:1]
        working = f"{self.working} = {self.answer():g}{unit}"
        return tuple(filter(None, (self.nudge, *slips, working)))


def on_ranks(trial, *args, ranks, nodes=1, timeout=LIMIT):
    """The values of `trial(*args)` on all ranks; what the learner's code breaks is a Mistake."""
    exercise = _under_test.get()
    hidden = exercise and (exercise.answer.__module__, exercise.name)
    where = "on 1 rank" if ranks == 1 else f"on {ranks} ranks"
    try:
        call = ship.dumps_call(trial, args)
    except TypeError as error:
        raise Mistake(str(error), "It uses a name of the notebook that holds something that "
                      "can't travel: an open file, a lock, a generator.") from None
    try:
        return launch(_run_hidden, call, hidden, ranks=ranks, nodes=nodes, timeout=timeout,
                      stall=STALL)
    except HangError as hang:
        raise Mistake(f"{where} it does not end: {hang}",
                      "Each rank that waits, waits for a message that nobody sends.") from None
    except RankError as error:
        if exercise and error.failures.get(error.rank, "").startswith(LibrarysAnswer.__name__):
            raise LibrarysAnswer(exercise.name) from None
        raise Mistake(f"{where}, {error}") from None
    except RuntimeError as error:
        if sys.platform == "win32":  # launch says what to do; what was written is not to blame
            raise Mistake(str(error)) from None
        raise


def _run_hidden(call, hidden):
    answer = getattr(importlib.import_module(hidden[0]), hidden[1]) if hidden else None
    with hide(answer):
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


class LibrarysAnswer(Mistake):
    """The learner's code calls the very function that it is to replace."""

    def __init__(self, name):
        super().__init__(f"it calls the library's own {name}",
                         "Write the core yourself; the library's answer is what you rebuild here.")


@contextlib.contextmanager
def hide(answer):
    """Inside, every call of `answer` raises LibrarysAnswer, under whatever name it is reached.

    The code of the function is exchanged, or that of a class's methods: a notebook may hold the
    function under a name of its own, which no change of ranklab's modules would reach.
    """
    code_of = {function: function.__code__ for function in _functions(answer)}
    for function, code in code_of.items():
        # As many free variables as before, or Python refuses the exchange; none is looked at.
        function.__code__ = _refuse.__code__.replace(
            co_name=answer.__name__, co_freevars=code.co_freevars)
    try:
        yield
    finally:
        for function, code in code_of.items():
            function.__code__ = code


def _functions(answer):
    parts = vars(answer).values() if isinstance(answer, type) else [answer]
    parts = [inspect.unwrap(getattr(part, "__func__", part)) for part in parts if callable(part)
             or hasattr(part, "__func__")]
    return [part for part in parts if inspect.isfunction(part)]


def _refuse(*_, **__):
    # Runs with the globals of the hidden function, so it imports what it needs.
    import sys

    from ranklab.checks.exercise import LibrarysAnswer

    raise LibrarysAnswer(sys._getframe().f_code.co_name)
