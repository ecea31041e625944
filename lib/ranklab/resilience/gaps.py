"""Failures drawn at random, and a run through them."""

import numpy as np


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
