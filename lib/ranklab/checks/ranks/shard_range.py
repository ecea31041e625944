"""shard_range: nothing lost, nothing twice, fair, contiguous."""

import operator

import numpy as np

from ranklab.checks.exercise import Mistake
from ranklab.engine.report import count_ranks

SIZES = (1, 2, 3, 4, 8)


def check_shard_range(shard_range):
    for n in (5, 7, 8, 10, 24, 1001, 1, 0):
        for size in reversed(SIZES):
            parts = [_as_list(shard_range(n, rank, size)) for rank in range(size)]
            _compare_parts(parts, n, f"n={n} on {count_ranks(size)}")
    yield "range(n) for n = 0, 1, 5, 7, ... on 1, 2, 3, 4, 8 ranks: nothing lost, nothing twice"
    yield "lengths differ by at most one, the longer parts first, each part contiguous"


def _as_list(part):
    if part is None:
        raise Mistake("it returned None", "The last line must be: return range(start, end).")
    if isinstance(part, tuple) and len(part) == 2:
        raise Mistake(f"it returned the tuple {part}",
                      "Return the part itself: range(start, end).")
    if hasattr(part, "__next__"):  # walked through once, it is empty; and len() fails
        raise Mistake(f"it returned a {type(part).__name__}",
                      "A part has a length and can be read twice: return range(start, end).")
    items = list(part)
    try:
        return [operator.index(item) for item in items]
    except TypeError as error:
        raise Mistake(f"the items are not whole numbers: {error}",
                      "n / size is a float in Python, and a float can't index a list: "
                      "n // size.") from None


def _compare_parts(parts, n, case):
    right = [part.tolist() for part in np.array_split(np.arange(n), len(parts))]
    if parts == right:
        return
    given = [i for part in parts for i in part]
    lengths = [len(part) for part in parts]
    if twice := sorted({i for i in given if given.count(i) > 1}):
        raise Mistake(f"{case}: {_some(twice)} is handed out twice",
                      "Each part must start where the part of the rank before it ends.")
    lost, beyond = sorted(set(range(n)) - set(given)), sorted(set(given) - set(range(n)))
    if lost and beyond:
        raise Mistake(f"{case}: nobody has {_some(lost)}, but {_some(beyond)} is handed out",
                      f"The parts are shifted: range({n}) starts at 0 and ends before {n}.")
    if lost:
        raise Mistake(f"{case}: nobody has {_some(lost)}",
                      "n // size rounds down, and the left-over n % size items get lost. "
                      "The first n % size ranks take one more each.")
    if beyond:
        raise Mistake(f"{case}: {_some(beyond)} is handed out, but range({n}) ends before",
                      "Cut the last part at n, or better: count the left-over items exactly.")
    if any(part and part != list(range(part[0], part[-1] + 1)) for part in parts):
        raise Mistake(f"{case}: rank 0 has {_some(parts[0])}, which is not contiguous",
                      "A stride (rank, rank + size, ...) is a fair split, too, but files and "
                      "tensors are read in blocks: make each part one block.")
    if max(lengths) - min(lengths) > 1:
        raise Mistake(f"{case}: the parts have lengths {lengths}",
                      "Lengths may differ by one at most; the rank with most work sets the pace. "
                      "Neither rounding up nor giving all the rest to one rank is fair.")
    raise Mistake(f"{case}: the parts have lengths {lengths}; wanted {list(map(len, right))}",
                  "The longer parts belong to the first ranks, in rank order.")


def _some(items):
    """The first few of `items`, as text."""
    return ", ".join(map(str, items[:4])) + (", ..." if len(items) > 4 else "")
