"""Lab 14: right answers of another kind. Each must pass."""

import math
from decimal import Decimal

import numpy as np

from ranklab.resilience.cluster import Decision


def optimal_interval__exact(checkpoint_seconds, mean_seconds):
    """The zero of the derivative, by Newton's method: Lambert's W."""
    if not (checkpoint_seconds > 0 and mean_seconds > 0):
        raise ValueError("seconds must be above 0")
    t = 0.5
    for _ in range(60):
        t -= (math.log(1 - t) + t + checkpoint_seconds / mean_seconds) / (1 - 1 / (1 - t))
        t = min(max(t, 1e-9), 1 - 1e-15)
    return t * mean_seconds


def optimal_interval__by_trying(checkpoint_seconds, mean_seconds):
    if checkpoint_seconds <= 0 or mean_seconds <= 0:
        raise ValueError("no")
    T = mean_seconds * np.geomspace(1e-4, 1.2, 4000)
    return float(T[((T + checkpoint_seconds) / mean_seconds - np.log(T)
                    + np.log(-np.expm1(-(T + checkpoint_seconds) / mean_seconds))).argmin()])


def optimal_interval__by_thirds(checkpoint_seconds, mean_seconds):
    """The maximum of the expected share of useful work, in ever shorter parts of an axis."""
    if min(checkpoint_seconds, mean_seconds) <= 0:
        raise ValueError("both must be above 0")

    def share(t):  # t, c: in mean times
        c = checkpoint_seconds / mean_seconds
        return math.log(t) - t - c - math.log(-math.expm1(-t - c))

    low, high = 1e-7, 1.5
    for _ in range(100):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (a, high) if share(a) < share(b) else (low, b)
    return np.float64(mean_seconds * low)


def goodput__in_decimals(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """28 digits, whose exponents have room for any number of failures."""
    T, C, M, R = (Decimal(x) for x in (interval, checkpoint_seconds, mean_seconds, restart_seconds))
    if T <= 0 or M <= 0:
        raise ValueError(f"{T} s of work, {M} s between failures")
    return float(T / M / ((R / M).exp() * (((T + C) / M).exp() - 1)))


def goodput__by_logarithms(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    if interval <= 0 or mean_seconds <= 0:
        raise ValueError(f"{interval}, {mean_seconds}")
    L = (interval + checkpoint_seconds) / mean_seconds
    return math.exp(math.log(interval / mean_seconds) - restart_seconds / mean_seconds - L
                    - math.log1p(-math.exp(-L)))


def goodput__or_nothing(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    if interval <= 0 or mean_seconds <= 0:
        raise ValueError
    try:
        return interval / mean_seconds / math.exp(restart_seconds / mean_seconds) / (
            math.exp((interval + checkpoint_seconds) / mean_seconds) - 1)
    except OverflowError:
        return 0.0


def recovery_policy__by_rules(state):
    """A spare costs a node, and idles a replica where it lacks; waits for what is back soon."""
    job, possible = state.job, state.up // state.job.replica * state.job.replica
    possible = min(possible, job.nodes)
    away = (job.broken * job.repair_seconds + (1 - job.broken) * job.reboot_seconds)
    away /= job.mean_seconds
    spares, more = 0, 1 - math.exp(-away)  # the chance that more nodes than that are away
    while more * job.replica > 1:
        spares += 1
        more -= math.exp(-away) * away**spares / math.factorial(spares)
    last = [state.now - t for t in state.failures[-10:]]
    mean = (2 * job.mean_seconds + (last[0] if len(state.failures) > 10 else state.now)) / (
        2 + len(last))
    T = math.sqrt(2 * job.checkpoint_seconds * mean) - job.checkpoint_seconds / 2
    soon = job.restart_seconds + job.reshard_seconds
    nodes = state.running or possible
    if not state.running and possible < job.nodes and any(t < soon / 2 for t in state.back):
        nodes = 0
    elif state.running < possible and mean > 2 * job.nodes / job.replica * soon:
        nodes = possible
    return Decision(nodes, max(T, 60.0), min(spares, job.most_spares),
                    state.event == "warning" and state.unsaved > 4 * job.checkpoint_seconds)
