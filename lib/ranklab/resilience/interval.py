"""How often to save a checkpoint, and what share of the time is then useful work."""

import math

import numpy as np


def optimal_interval(checkpoint_seconds, mean_seconds):
    """Return the seconds of work between two checkpoints that lose the least time.

    checkpoint_seconds: the job stops for this long while it saves.
    mean_seconds: mean time between failures, which come at random, whatever the job does and
        however long ago the last one was.
    Both may be far below a second, so the result is not rounded.
    Raises: ValueError if one of them is not above 0.
    Paper: Daly, FGCS 22 (2006), the higher order: about 2 C / 3 less than Young's sqrt(2 C M), CACM
        17 (1974). At most 2% off the best if a checkpoint takes up to M, or 3 M and more
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
    """Return the expected share of the time that is useful work, in a long run.

    Failures come at random, also while the job saves or restarts. The work since the last whole
    checkpoint is lost, and each failure costs a restart.
    The result is exact. It is 0.0 if the share is too small for a float, because then the run never
    gets anything done.
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


def simulate(interval, checkpoint_seconds, gaps, restart_seconds):
    """Simulate a run failure by failure; return the share of the time that is useful work.

    Each gap begins with a restart, then whole rounds of work and checkpoint fit in it, and the rest
    is lost. A restart that is cut short is a gap without work.
    gaps: seconds between failures, such as random_gaps().
    """
    rounds = np.maximum(np.asarray(gaps) - restart_seconds, 0) // (interval + checkpoint_seconds)
    return float(rounds.sum() * interval / np.sum(gaps))


def random_gaps(mean_seconds, count, seed=0):
    """Draw the seconds between failures that come at random: exponential, the same for a seed."""
    return np.random.default_rng(seed).exponential(mean_seconds, count)
