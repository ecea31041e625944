"""The check of scaling_efficiency, against throughput per rank."""

import math

from ranklab.course.exercise import Mistake

CASES = (  # {ranks: seconds per step}
    {1: 0.8, 2: 0.5, 4: 0.25},
    {1: 1.0, 2: 1.0, 8: 1.25},
    {8: 0.3, 2: 0.9, 4: 0.5},  # not measured on one rank, and in no order
    {3: 2.0},
)


def efficiency_of(seconds, kind):
    """The oracle: images/s of each rank, as a share of what it was on the fewest."""
    images = {ranks: 32 * (1 if kind == "strong" else ranks) for ranks in seconds}  # in a step
    each = {ranks: images[ranks] / seconds[ranks] / ranks for ranks in seconds}
    return {ranks: each[ranks] / each[min(seconds)] for ranks in seconds}


def check_scaling_efficiency(fn):
    for kind in ("strong", "weak"):
        for seconds in CASES[:2]:
            _compare(fn, seconds, kind)
        yield f'right for "{kind}" scaling from one rank'
    for kind in ("strong", "weak"):
        for seconds in CASES[2:]:
            _compare(fn, seconds, kind)
    yield "right where nobody measured on one rank: against the fewest there are"
    try:
        fn({1: 1.0, 2: 1.0}, "string")
    except ValueError:
        yield "a ValueError for a kind that it does not know"
    except Exception as error:
        raise Mistake(f"kind='string' raises {type(error).__name__}, not ValueError",
                      "Say in a sentence which kinds there are.") from None
    else:
        raise Mistake("kind='string' is accepted", "Raise a ValueError: a slip of the pen must not "
                      "become an efficiency.")


def _compare(fn, seconds, kind):
    given, right = dict(seconds), efficiency_of(seconds, kind)
    try:
        got = fn(seconds, kind)
    except KeyError as error:
        raise Mistake(f"seconds of {sorted(given)} ranks raise KeyError: {error}",
                      "Nobody measured on one rank here: take the fewest ranks there are, "
                      "min(seconds), as the base.") from None
    if seconds != given:
        raise Mistake("`seconds` itself is changed", "Make a new dict.")
    if not isinstance(got, dict) or set(got) != set(right):
        raise Mistake(f"of {sorted(given)} ranks it returns {got!r}",
                      "Return a dict: {ranks: efficiency}, with all the ranks that were given.")
    for ranks, value in right.items():
        if not math.isclose(got[ranks], value, rel_tol=1e-9):
            what = (f"{kind} scaling, {given}: the efficiency on {ranks} ranks is {value:.4g}, "
                    f"not {got[ranks]:.4g}")
            raise Mistake(what, _hint(got, right, given, kind))


def _hint(got, right, seconds, kind):
    base = min(seconds)

    def is_all(value_of):
        return all(math.isclose(got[r], value_of(r), rel_tol=1e-6) for r in right)

    if is_all(lambda r: 100 * right[r]):
        return "That is per cent. Return the fraction: 1 is perfect."
    if is_all(lambda r: seconds[base] / seconds[r]):
        if kind == "strong":
            return "That is the speed-up. Efficiency is the speed-up per rank that was added."
    if is_all(lambda r: base * seconds[base] / (r * seconds[r])):
        return ("That is strong scaling. In weak scaling each rank keeps its batch, so perfect is "
                "the same time, whatever the ranks.")
    if is_all(lambda r: seconds[base] / (r * seconds[r])):
        return f"Perfect would be {base}/R of the time on {base} ranks, not 1/R of it."
    if is_all(lambda r: 1 / right[r]):
        return "Upside down: slower steps must give a smaller efficiency."
    if kind == "strong":
        return ("Strong: the same batch for all together, so R ranks should need base/R of the "
                "base's time. Efficiency = that time / the measured one.")
    return "Weak: the same batch on each rank, so the time should stay: base / measured."
