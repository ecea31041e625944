"""What a check is made of. checks/<idea>.py holds the exercises and predictions of one lab.

A check is a generator: it yields one sentence for each property that holds, and raises Mistake at
the first that does not. It compares with an oracle that is not the code under test.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


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


def shown(number, digits=6):
    """1,048,576 and not 1.04858e+06."""
    is_long = 1e5 <= abs(number) < 1e15 and (number == round(number) or digits < 10)
    return f"{number:,.0f}" if is_long else f"{number:.{digits}g}"


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
        slips = [f"A usual slip is {shown(slip)}{unit}: {confusion}"
                 for slip, confusion in (self.slips or {}).items()][:1]
        answer = shown(self.answer())
        working = f"{self.working} = " if self.working != answer else ""
        return tuple(filter(None, (self.nudge, *slips, f"{working}{answer}{unit}")))
