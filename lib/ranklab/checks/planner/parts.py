"""A GpuMemory or a Step beside what is right, part by part; and the mistake that gets the same."""

import math
from dataclasses import asdict

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake


def each_is_right(cases, slips, in_units, unit=1.0):
    """Yields the names of cases, in their order; the first that is wrong is a Mistake, which names
    the slip that is proved, or the first part that differs.

    cases  {name: (call, right)}: right() is due, right(slip) is what this slip gets
    slips  {slip: hint}
    """
    for name, (call, right) in cases.items():
        got, wanted = call(), right()
        expect(isinstance(got, type(wanted)), f"{name}: a {type(got).__name__} is returned",
               f"Return the {type(wanted).__name__} of one GPU.")
        if apart := _apart(got, wanted):
            slip = _proved([(call(), right) for call, right in cases.values()], got, right, slips)
            mine, due = (round(float(getattr(each, apart[0])) / unit, 9) for each in (got, wanted))
            raise Mistake(f"{name} is that of: {slip}" if slip else f"{name}: {apart[0]}, "
                          f"{in_units}: yours {mine:.6g}, right is {due:.6g}", slips.get(slip, ""))
        yield name


def _proved(cases, got, right, slips):
    """The slip that explains `got`, and most of the cases that are wrong, and shows in none that is
    right; "" where there is none. (There may be another mistake besides.)
    """
    wrong = [(mine, of) for mine, of in cases if _apart(mine, of())]
    fine = [(mine, of) for mine, of in cases if not _apart(mine, of())]
    found = {slip: sum(not _apart(mine, of(slip)) for mine, of in wrong) for slip in slips
             if not _apart(got, right(slip)) and not any(_apart(mine, of(slip))
                                                         for mine, of in fine)}
    best = max(found, key=found.get, default="")
    return best if found.get(best, 0) > len(wrong) / 2 else ""


def _apart(got, right):
    """Names of the parts that differ by more than rounding, also of the sums that they are of."""
    return [name for name, due in asdict(right).items() if not math.isclose(
        float(getattr(got, name)), due, rel_tol=1e-6, abs_tol=1e-9 * abs(right.total))]
