"""What a GpuMemory or a Step shows: its parts, each a number of its own."""

import math
from dataclasses import asdict

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.prover import Told
from ranklab.checks.trial import called_with, told_apart

ROUNDING = 1e-9  # of the sum of all parts: less than that is the difference of two equal sums


def parts_of(outcome, kind, tell, first=()):
    """Return {part: Told} of an instance of `kind`; of another thing its type alone.

    kind   GpuMemory or Step
    tell   what is seen, what is right -> a text: in_gb or in_seconds
    first  the parts that come before all others
    """
    if not isinstance(outcome, kind):
        return {"what it returns": f"a {type(outcome).__name__}"}
    names = dict.fromkeys((*first, *kind.__dataclass_fields__))
    numbers = {name: float(getattr(outcome, name)) for name in names}
    least = ROUNDING * sum(numbers.values())
    return {"what it returns": f"a {kind.__name__}"} | {
        f"`{name}`": Told(number if abs(number) > least else 0.0, tell)
        for name, number in numbers.items()}


def in_gb(got, right):
    return _told(got, right, 1e9, "GB")


def in_seconds(got, right):
    return _told(got, right, 1, "s")


def _told(got, right, unit, name):
    if right is None or got is None:
        return ""
    got, right = told_apart(got / unit, right / unit)
    return f"{got} {name}, not {right} {name}"


def each_is_right(cases, slips, in_units, unit=1.0):
    """Yields the names of cases in their order; the first wrong one is a Mistake. It names the slip
    that the numbers prove, or else the first part that differs.

    cases  {name: (call, right)}: right() is the right answer, right(slip) what this slip gets
    slips  {slip: hint}
    """
    for name, (call, right) in cases.items():
        with called_with(name):
            got = call()
        wanted = right()
        expect(isinstance(got, type(wanted)), f"{name}: a {type(got).__name__} is returned",
               f"Return the {type(wanted).__name__} of one GPU.")
        if apart := _apart(got, wanted):
            slip = _proved(_answers(cases), got, right, slips)
            mine, due = (round(float(getattr(each, apart[0])) / unit, 9) for each in (got, wanted))
            raise Mistake(f"{name} is that of: {slip}" if slip else f"{name}: {apart[0]}, "
                          f"{in_units}: yours {mine:.6g}, right is {due:.6g}", slips.get(slip, ""))
        yield name


def _answers(cases):
    """[(what the learner's function returns, right)] of all cases."""
    answers = []
    for name, (call, right) in cases.items():
        with called_with(name):
            answers.append((call(), right))
    return answers


def _proved(cases, got, right, slips):
    """The slip that explains `got` and most of the wrong cases, and would show in no right one; ""
    if there is none. (There may be a second mistake.)
    """
    wrong = [(mine, of) for mine, of in cases if _apart(mine, of())]
    fine = [(mine, of) for mine, of in cases if not _apart(mine, of())]
    found = {slip: sum(not _apart(mine, of(slip)) for mine, of in wrong) for slip in slips
             if not _apart(got, right(slip)) and not any(_apart(mine, of(slip))
                                                         for mine, of in fine)}
    best = max(found, key=found.get, default="")
    return best if found.get(best, 0) > len(wrong) / 2 else ""


def _apart(got, right):
    """The names of the parts that differ by more than rounding, that of the total included."""
    return [name for name, due in asdict(right).items() if not math.isclose(
        float(getattr(got, name)), due, rel_tol=1e-6, abs_tol=1e-9 * abs(right.total))]
