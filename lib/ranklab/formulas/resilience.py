"""How often to save, what share of time is then useful work, and how often failures occur."""

import math

GPU_HOURS = 54 * 24 * 16384 / 419  # GPU-hours per unexpected interruption; Llama 3, table 5
# Meta's research clusters, 150 million A100 hours (arXiv 2410.21680): hours between the failures of
# a job, measured at 1,024 GPUs and projected by the paper's own model for more.
RESEARCH_HOURS = {1024: 7.9, 16384: 1.8, 131072: 14 / 60}
NODE_RATE = 6.5e-3  # failures per node-day of 8 A100s on RSC-1 (the same paper; 2.34e-3 on RSC-2)
OPT_HOURS = 12 * 124  # node-hours per lost machine; OPT-175B: 124 nodes, 2 lost a day


def optimal_interval(checkpoint_seconds, mean_seconds):
    """Return the seconds of work between two checkpoints that waste the least time.

    checkpoint_seconds: the time for which the job stops to save.
    mean_seconds: mean time between failures, which come at random, whatever the job does and
        however long ago the last one was.
    Both may be far below a second, so the result is not rounded.
    Raises: ValueError if one of them is not above 0.
    Paper: Daly, FGCS 22 (2006), the higher order: about 2 C / 3 less than Young's sqrt(2 C M), CACM
        17 (1974). At most 2% worse than the best if a checkpoint takes at most M, or at least 3 M.
    Lab: 14
    """
    if min(checkpoint_seconds, mean_seconds) <= 0:
        raise ValueError(f"a checkpoint of {checkpoint_seconds} s and a failure each "
                         f"{mean_seconds} s: both must be above 0")
    if checkpoint_seconds >= 2 * mean_seconds:
        return mean_seconds
    x = math.sqrt(checkpoint_seconds / (2 * mean_seconds))
    young = math.sqrt(2 * checkpoint_seconds * mean_seconds)
    return young * (1 + x / 3 + x**2 / 9) - checkpoint_seconds


def goodput(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """Return the expected fraction of the time that is useful work, in a long run.

    Failures come at random, even while the job saves or restarts. The work since the last complete
    checkpoint is lost, and each failure costs a restart.
    The result is exact. It is 0.0 if the fraction is too small for a float, because such a run
    never gets anything done.
    interval: seconds of work between two checkpoints.
    Raises: ValueError if interval or mean_seconds is not above 0.
    Paper: Daly, FGCS 22 (2006), the complete cost function
    Lab: 14
    """
    if min(interval, mean_seconds) <= 0:
        raise ValueError(f"{interval} s between checkpoints and {mean_seconds} s between failures: "
                         "both must be above 0")
    work, round_, restart = (seconds / mean_seconds for seconds in (
        interval, interval + checkpoint_seconds, restart_seconds))
    # A round takes e^restart (e^round - 1) mean times: written so that nothing overflows.
    return work * math.exp(-restart - round_) / -math.expm1(-round_)



def expected_ettr(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """Return Meta's expected effective training time ratio, goodput() to first order.

    Right while a failure is rare in an interval; below 0 if restarts take longer than a run lasts.
    Paper: Kokolis et al., HPCA 2025 (arXiv 2410.21680), without time in the queue
    Lab: 14
    """
    lost = (restart_seconds + interval / 2) / mean_seconds
    return (1 - lost) / (1 + checkpoint_seconds / interval)


def poisson_tail(count, mean):
    """Return the probability of at least `count` events where `mean` are expected, at random.

    Lab: 14
    """
    below, term = 0.0, math.exp(-mean)  # the probability of fewer; of exactly i
    for i in range(count):
        below += term
        term *= mean / (i + 1)
    return max(1 - below, 0.0)


def spares_needed(mean, risk=0.01):
    """Return the fewest spares that are all in use with a probability of at most `risk`.

    mean: failures that are expected in the time of a repair.
    """
    spares = 0
    while poisson_tail(spares + 1, mean) > risk:
        spares += 1
    return spares
