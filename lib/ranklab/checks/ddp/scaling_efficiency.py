"""The check of scaling_efficiency, against throughput per rank."""

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import is_near

FROM_ONE = (  # {ranks: seconds per step}
    {1: 0.8, 2: 0.5, 4: 0.25},
    {1: 1.0, 2: 1.0, 8: 1.25},
    {1: 0.9, 2: 0.4, 3: 0.37},  # more than perfect on two ranks, and no round numbers
)
OTHERS = (
    {8: 0.3, 2: 0.9, 5: 0.45, 4: 0.5},  # in no order; 5 is no multiple of 2
    {3: 2.0},
)
NO_MEASUREMENTS = {}, {0: 1.0, 2: 1.0}, {1: 1.0, 2: 0.0}, {1: 1.0, 2: -0.5}


def check_scaling_efficiency(fn):
    for kind in ("strong", "weak"):
        for seconds in FROM_ONE:
            _compare(fn, seconds, kind)
        yield f'right for "{kind}" scaling from one rank'
    for kind in ("strong", "weak"):
        for seconds in OTHERS:
            _compare(fn, seconds, kind)
    yield "right where nobody measured on one rank: against the fewest there are"
    _refuses(fn, {1: 1.0, 2: 1.0}, "string", "kind='string'", "which kinds there are")
    for seconds in NO_MEASUREMENTS:
        _refuses(fn, seconds, "strong", f"seconds={seconds}", "what a measurement needs")
    yield "a ValueError for a kind that it does not know, and for what is no measurement"
    ranks = list(fn(dict(OTHERS[0]), "weak"))
    if ranks != sorted(ranks):
        raise Mistake(f"the ranks come out as {ranks}",
                      "In the order of ranks, for tables and curves: go through sorted(seconds).")
    yield "in the order of ranks"


def _refuses(fn, seconds, kind, what, sentence):
    try:
        fn(dict(seconds), kind)
    except ValueError:
        return
    except Exception as error:
        raise Mistake(f"{what} raises {type(error).__name__}, not ValueError",
                      f"Say in a sentence {sentence}.") from None
    raise Mistake(f"{what} is accepted", "Raise a ValueError, as the first lines of the stub do: "
                  "a slip of the pen must not become an efficiency.")


def _compare(fn, seconds, kind):
    given = dict(seconds)
    try:
        got = fn(seconds, kind)
    except KeyError as error:
        raise Mistake(f"seconds of {sorted(given)} ranks raise KeyError: {error}",
                      "Nobody measured on one rank here: take the fewest ranks there are, "
                      "min(seconds), as the base.") from None
    if seconds != given:
        raise Mistake("`seconds` itself is changed", "Make a new dict.")
    if not isinstance(got, dict) or set(got) != set(given):
        raise Mistake(f"of {sorted(given)} ranks it returns {got!r}",
                      "Return a dict: {ranks: efficiency}, with all the ranks that were given.")
    ranks, times, values = torch.tensor([(R, given[R], got[R]) for R in sorted(given)],
                                        dtype=torch.float64).T
    right = _efficiency(ranks, times, kind)
    for R, value, wanted in zip(ranks, values, right):
        if not is_near(value, wanted):
            raise Mistake(f"{kind} scaling, {given}: the efficiency on {R:g} ranks is "
                          f"{wanted:.4g}, not {value:.4g}",
                          _hint(values, right, ranks, times, kind))


def _efficiency(ranks, times, kind):
    """The oracle: images/s of each rank, as a share of what it was on the fewest."""
    images = 32 * (1 if kind == "strong" else ranks) / times  # of all ranks together
    return images / ranks / (images[0] / ranks[0])


def _hint(got, right, ranks, times, kind):
    base, speed_up = int(ranks[0]), times[0] / times
    slips = [
        (100 * right, "That is per cent. Return the fraction: 1 is perfect."),
        (speed_up, "That is the speed-up. Efficiency is the speed-up per rank that was added."),
        (base * speed_up / ranks, "That is strong scaling. In weak scaling each rank keeps its "
                                  "batch, so perfect is the same time, whatever the ranks."),
        (speed_up / ranks, f"Perfect would be {base}/R of the time on {base} ranks, not 1/R of "
                           "it."),
        (1 / right, "Upside down: slower steps must give a smaller efficiency."),
        (right.clamp(max=1), "More than 1 can be right: what each rank has got smaller, and fits "
                             "a cache, say. Do not cut it off."),
    ]
    slips += [(right / right[i], f"The base is {R:g} here, but it is the fewest ranks: "
                                 f"min(seconds), which is {base}.") for i, R in enumerate(ranks)]
    for wrong, hint in slips:
        if is_near(got, wrong) and not is_near(wrong, right):
            return hint
    if (got - right).abs().max() < 0.006:
        return "That is rounded. Leave rounding to whoever prints it."
    if kind == "strong":
        return ("Strong: the same batch for all together, so R ranks should need base/R of the "
                "base's time. Efficiency = that time / the measured one.")
    return "Weak: the same batch on each rank, so the time should stay: base / measured."
