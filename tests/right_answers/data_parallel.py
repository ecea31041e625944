"""Lab 03: right answers that differ from the library's. Each must pass."""

import functools


def plan_buckets__from_the_end_by_recursion(ready, nbytes, alpha, beta):
    @functools.cache
    def best(j):  # (end, buckets) of the first j
        if j == 0:
            return 0.0, ()
        found = (float("inf"), ())
        size = 0
        for i in range(j - 1, -1, -1):
            size += nbytes[i]
            end, buckets = best(i)
            end = max(end, ready[j - 1]) + alpha + size * beta
            if end < found[0]:
                found = end, (*buckets, i)
        return found

    for j in range(len(ready)):  # not deep
        best(j)
    starts = best(len(ready))[1]
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(ready)])]


def plan_buckets__by_deadlines(ready, nbytes, alpha, beta):
    """Halves the time in which all must have arrived; each bucket starts as late as it may."""
    if not ready:
        return []

    def plan(deadline):
        buckets, stop = [], len(ready)
        while stop:  # as much as can still be sent when its last gradient is ready
            start, size = stop, 0
            while start and ready[stop - 1] + alpha + (size + nbytes[start - 1]) * beta <= deadline:
                start -= 1
                size += nbytes[start]
            if start == stop:
                return None
            buckets.insert(0, list(range(start, stop)))
            deadline, stop = deadline - alpha - size * beta, start
        return buckets

    low = ready[-1]
    high = low + alpha + sum(nbytes) * beta + 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if plan(middle) else (middle, high)
    return plan(high)
