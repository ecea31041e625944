"""Four detectors, exercises in lab 16: each finds a disease in plain lists of numbers."""

import math


def first_difference(calls):
    """Return the number, counted from 0, of the first call that is not the same on all ranks.

    None if there is no such call.
    calls  {rank: [its calls, ...]} of a group; a shorter list is not a difference: its rank has
           not come as far yet, and the others are still compared
    Lab: 16
    """
    for number in range(max(map(len, calls.values()), default=0)):
        kinds = {rank_calls[number] for rank_calls in calls.values() if len(rank_calls) > number}
        if len(kinds) > 1:
            return number
    return None


def circle_of_waits(waits):
    """Return ranks that wait for one another in a circle: [rank, ...], each waits for the next one.

    The last waits for the first, and the smallest rank comes first. [] if there is no circle.

    waits  {rank: set of ranks that it waits for}; a rank that waits for no other may be left out
    Lab: 16
    """
    def walk(path):
        for rank in sorted(waits.get(path[-1], ())):
            if rank == path[0]:
                return path
            if rank > path[0] and rank not in path and (circle := walk([*path, rank])):
                return circle
        return []

    return next((circle for rank in sorted(waits) if (circle := walk([rank]))), [])


def own_limit(norms, tolerance=1e-3):
    """Return the norm to which ranks have clipped their own gradients, each by itself, or None.

    It is the largest finite norm, if two or more ranks have it, within `tolerance` times it, in the
    same step: in at least two steps, and in at least a tenth of all. (If all shards are clipped by
    one norm, the squares of the ranks' norms add up to its square, so no two ranks can have it.)
    norms  [[norm on rank 0, on rank 1, ...] of each step], of gradients that differ between ranks;
           inf and NaN are ignored, and [] is a run without steps
    Lab: 16
    """
    limit = max((norm for step in norms for norm in step if math.isfinite(norm)), default=0)
    at_limit = [sum(norm >= limit * (1 - tolerance) for norm in step) for step in norms]
    is_clipped = limit > 0 and sum(count >= 2 for count in at_limit) >= max(2, len(norms) / 10)
    return limit if is_clipped else None


def steps_behind(used, held, tolerance=1e-9):
    """Count by how many steps the model's weights are older than the optimizers' own.

    It is the smallest number that explains all but a tenth of the steps, not counting the first
    ones, whose counterpart would be before the run. None if no number of steps does.

    used  [sum of the weights in the forward of step 0, of step 1, ...]
    held  [sum of the weights that all optimizers held at that moment]; if nothing is stale, the
          two are equal to within `tolerance` times the larger one
    Lab: 16
    """
    for behind in range(len(used) // 2):
        pairs = [*zip(used[behind:], held)]
        misses = sum(not math.isclose(a, b, rel_tol=tolerance) for a, b in pairs)
        if misses <= len(pairs) / 10:
            return behind
    return None
