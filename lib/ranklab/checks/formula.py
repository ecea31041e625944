"""Formula: a formula for the learner to derive, tested at random points.

    check(largest_data_parallel=lambda tokens, flops, bandwidth: ...)
"""

import inspect
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

POINTS, SEED = 24, 0
CLOSE = 1e-6  # of the right number: two ways to write one formula differ by rounding alone


@dataclass(frozen=True)
class Formula:
    """A formula as an answer: a function of numbers.

    arguments  {name: (lowest, highest)}, between which points are drawn, uniformly in the logarithm
    answer     the library's formula, called with the arguments in this order
    solution   the source of a lambda
    mistakes   {source of a wrong lambda: what it confuses}
    hint       the first hint: what to think of
    step       the second hint: an equation that contains the formula
    """

    name: str
    arguments: dict[str, tuple]
    answer: Callable
    solution: str
    hint: str
    step: str
    why: str = ""
    mistakes: dict[str, str] = field(default_factory=dict)

    @property
    def hints(self):
        return self.hint, self.step, self.solution

    @property
    def stub(self):
        return f"lambda {', '.join(self.arguments)}: ..."

    def points(self):
        """Draw the points with a fixed seed; they are the same in each call."""
        draw = random.Random(SEED)
        return [tuple(math.exp(draw.uniform(math.log(low), math.log(high)))
                      for low, high in self.arguments.values()) for _ in range(POINTS)]

    def fault_of(self, formula):
        """Return what is wrong with the learner's formula, as a sentence; "" if nothing is."""
        if not callable(formula):
            return f"a formula is wanted: {self.stub}"
        try:
            signature = inspect.signature(formula)
            signature.bind(*self.arguments)
        except (TypeError, ValueError):
            return f"it can't be called with {len(self.arguments)} numbers: {self.stub}"
        if {*signature.parameters} == {*self.arguments}:  # then their order is free
            formula = _by_name(formula, self.arguments)
        points = self.points()
        values = [_value(formula, point) for point in points]
        for point, value in zip(points, values):
            if not isinstance(value, float):
                return f"at {self._at(point)} it {value}"
        if confusion := self._confusion(points, values):
            return confusion
        expected = [self.answer(*point) for point in points]
        if _equal(values, expected):
            return ""
        difference = self._difference(formula, points, values, expected)
        return f'{difference}. hint("{self.name}") has more.'

    def _confusion(self, points, values):
        for source, confusion in self.mistakes.items():
            wrong = eval(source, {"math": math})
            if _equal(values, [wrong(*point) for point in points]):
                return confusion
        return ""

    def _difference(self, formula, points, values, expected):
        """Report a constant factor, else the first argument on which the two depend differently."""
        factor = values[0] / expected[0]
        if _equal(values, [factor * each for each in expected]):
            return f"it is {factor:.3g} times the right one at all {POINTS} points that were tried"
        rounded = " (it gives whole numbers: do not round)" * all(map(float.is_integer, values))
        for place, name in enumerate(self.arguments):
            for point, value, right in zip(points, values, expected):
                doubled = tuple(each * (1 + (i == place)) for i, each in enumerate(point))
                grown = _value(formula, doubled)
                growth = self.answer(*doubled) / right
                if isinstance(grown, float) and value and \
                        f"{grown / value:.3g}" != f"{growth:.3g}":
                    return (f"when {name} doubles, from {self._at(point)}, it grows by a factor of "
                            f"{grown / value:.3g}; the right factor is {growth:.3g}{rounded}")
        return f"at {self._at(points[0])} it is {values[0]:.4g}, and that is not right{rounded}"

    def _at(self, point):
        return ", ".join(f"{name}={value:.3g}" for name, value in zip(self.arguments, point))


def _by_name(formula, names):
    return lambda *numbers: formula(**dict(zip(names, numbers)))


def _value(formula, point):
    """Return the formula's value as a float, or what it does instead, as the end of a sentence."""
    try:
        value = formula(*point)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return f"gives {' '.join(repr(value).split())[:40]}, which is not a number"
    return number if math.isfinite(number) else f"gives {number}"


def _equal(values, references):
    return all(math.isclose(*pair, rel_tol=CLOSE) for pair in zip(values, references))
