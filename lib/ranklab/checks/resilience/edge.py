"""Where a function changes its mind: a number that tells mistakes apart that give the same answer.
"""


def edge(holds, low, high, rounds=30):
    """Return the number between `low` and `high` at which holds(number) changes; None where it does
    not, or raises.
    """
    try:
        first = holds(low)
        if holds(high) == first:
            return None
        for _ in range(rounds):
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) == first else (low, middle)
    except Exception:
        return None
    return high
