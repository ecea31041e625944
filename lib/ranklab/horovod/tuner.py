"""Which fusion threshold is the fastest? A search over measurements that are noisy.

Horovod's own autotuner (HOROVOD_AUTOTUNE=1) is a Bayesian optimisation by a Gaussian process, over
threshold and cycle time together.
"""

from statistics import median


def tune_fusion(seconds_of, low, high, calls):
    """The threshold, a whole number of bytes from low to high, with which a step is fastest; after
    at most `calls` calls of seconds_of(threshold), which is noisy.

    A coarse grid on a log scale, then a finer one around its best: half of the calls each, and the
    median at each threshold, because a straggler's step would spoil a mean.

    lab    05
    """
    measured, half = {}, calls // 2
    for _ in range(2 if half else 0):
        last = max(1, min(8, half - 1))
        grid = [round(low * (high / low) ** (i / last)) for i in range(last + 1)]
        new = [threshold for threshold in dict.fromkeys(grid) if threshold not in measured][:half]
        for threshold in new:
            times = [seconds_of(threshold) for _ in range(half // len(new))]
            measured[threshold] = median(times)
        known = sorted(measured)
        best = known.index(min(known, key=measured.get))
        low, high = known[max(0, best - 1)], known[min(best + 1, len(known) - 1)]
    return min(measured, key=measured.get, default=low)
