"""The parts of a GpuMemory or a Step, each a separate number."""

from ranklab.checks.prover import Told
from ranklab.checks.trial import told_apart

ROUNDING = 1e-9  # of the sum of all parts: less than that is the difference of two equal sums


def number_of(value):
    """Return a value as a float; None if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def parts_of(outcome, kind, tell, first=()):
    """Return {part: Told} of an instance of `kind` with numbers; of anything else, what it is.

    kind   GpuMemory or Step
    tell   (what is seen, what is right) -> a text: in_gb or in_seconds
    first  the parts that come before all others
    """
    if not isinstance(outcome, kind):
        return {"what it returns": f"a {type(outcome).__name__}"}
    names = dict.fromkeys((*first, *kind.__dataclass_fields__))
    numbers = {name: number_of(getattr(outcome, name)) for name in names}
    if odd := [name for name, number in numbers.items() if number is None]:
        return {"what it returns": f"a {kind.__name__} whose `{odd[0]}` is "
                                   f"a {type(getattr(outcome, odd[0])).__name__}, not a number"}
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
