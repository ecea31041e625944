"""Lab 05: what goes wrong when a threshold is chosen by noisy measurements."""

from statistics import mean, median

from mutants import mutant

from ranklab.horovod import tune_fusion as answer

GRID = "low * (high / low) ** (i / last)"
WRONG = [
    mutant(answer, GRID, "low * (high / low) ** ((i + 1) / (last + 2))", says="measure both",
           called="without_the_ends"),
    mutant(answer, GRID, "low + (high - low) * i / last", says="take equal ratios"),
    mutant(answer, "measured[threshold] = median(times)", "measured[threshold] = mean(times)",
           says="the median of several calls does not mind", mean=mean),
    mutant(answer, "range(half // len(new))", "range(half // len(new) + 3)",
           says="it measures more than calls="),
    mutant(answer, "round(low", "(low", says="Bytes are whole numbers|returns a float"),
    mutant(answer, "return min(measured, key=measured.get, default=low)",
           "return min(measured.values(), default=0.0)", says="and return the threshold"),
    mutant(answer, "key=measured.get, default=low", "key=measured.get",
           says="it raised ValueError|with 1 call"),
    mutant(answer, GRID, "2 * low * (high / low) ** (i / last)", says="it measures at"),
]


def tune_fusion__each_once(seconds_of, low, high, calls):
    """Each threshold is measured once"""
    grid = [round(low * (high / low) ** (i / 16)) for i in range(17)][:calls]
    return min(grid, key=seconds_of)


def tune_fusion__horovods_default(seconds_of, low, high, calls):
    """it measures nothing"""
    return max(low, min(high, 64 * 2**20))


def tune_fusion__uphill_from_the_middle(seconds_of, low, high, calls):
    """More calls, less noise|slower"""
    threshold = round((low * high) ** 0.5)
    here = seconds_of(threshold)
    for _ in range(calls - 1):
        nxt = min(high, 2 * threshold)
        there = seconds_of(nxt)
        if there >= here:
            break
        threshold, here = nxt, there
    return threshold


def tune_fusion__eight_thresholds(seconds_of, low, high, calls):
    """slower"""
    grid = [round(low * (high / low) ** (i / 7)) for i in range(8)][:calls]
    return min(grid, key=lambda threshold: median(
        seconds_of(threshold) for _ in range(calls // len(grid))))
