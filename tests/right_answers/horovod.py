"""Lab 05: right answers that differ from the library's. Each must pass."""

import math
from statistics import median

import numpy as np


def tune_fusion__medians_on_a_grid(seconds_of, low, high, calls):
    count = min(calls, 1 + math.ceil(math.log2(high / low)))
    grid = [round(low * (high / low) ** (i / max(1, count - 1))) for i in range(count)]
    return min(grid, key=lambda threshold: median(
        seconds_of(threshold) for _ in range(calls // count)))


def tune_fusion__golden_section(seconds_of, low, high, calls):
    each, seconds = min(11, calls), {}

    def at(x):
        threshold = min(max(low, round(2**x)), high)
        if threshold not in seconds and each * (len(seconds) + 1) <= calls:
            seconds[threshold] = median(seconds_of(threshold) for _ in range(each))
        return seconds.get(threshold, math.inf)

    a, b, golden = math.log2(low), math.log2(high), (5**0.5 - 1) / 2
    at(a), at(b)
    while b - a > 0.4:
        c, d = b - golden * (b - a), a + golden * (b - a)
        a, b = (a, d) if at(c) < at(d) else (c, b)
    return min(seconds, key=seconds.get)


def tune_fusion__halving(seconds_of, low, high, calls):
    """The better half is measured again, each time with more calls."""
    count = max(1, min(13, calls // 5))
    seen = {round(low * (high / low) ** (i / max(1, count - 1))): [] for i in range(count)}
    left, rounds = list(seen), len(seen).bit_length()
    for _ in range(rounds):
        for threshold in left:
            seen[threshold] += [seconds_of(threshold)
                                for _ in range(max(1, calls // rounds // len(seen)))]
        left = sorted(left, key=lambda threshold: median(seen[threshold]))[:-(-len(left) // 2)]
    return left[0]


def tune_fusion__smooth_in_numpy(seconds_of, low, high, calls):
    """Neighbours share their noise; with few calls it measures nothing."""
    if calls < 300 or low == high:
        return np.int64(low)
    grid = np.unique(np.geomspace(low, high, 30).round().astype(np.int64)).clip(low, high)
    seconds = [np.median([seconds_of(threshold) for _ in range(10)]) for threshold in grid]
    padded = np.pad(seconds, 1, mode="edge")
    return grid[np.argmin((padded[:-2] + padded[1:-1] + padded[2:]) / 3)]
