"""Failures drawn at random, and a simulated run with them."""

import numpy as np


def simulate(interval, checkpoint_seconds, gaps, restart_seconds):
    """Simulate a run failure by failure; return the share of the time spent on useful work.

    Each gap begins with a restart, followed by as many whole rounds of work and checkpoint as fit;
    the rest is lost. If a failure interrupts the restart, the gap has no work.
    gaps: seconds between failures, such as random_gaps().
    """
    rounds = np.maximum(np.asarray(gaps) - restart_seconds, 0) // (interval + checkpoint_seconds)
    return float(rounds.sum() * interval / np.sum(gaps))


def random_gaps(mean_seconds, count, seed=0):
    """Draw the seconds between random failures, which are exponential; a seed repeats them."""
    return np.random.default_rng(seed).exponential(mean_seconds, count)
