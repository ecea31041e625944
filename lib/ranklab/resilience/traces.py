"""Traces of failures, drawn at random from published rates, to try policies on."""

from typing import NamedTuple

import numpy as np

from ranklab.formulas.resilience import GPU_HOURS, OPT_HOURS
from ranklab.resilience.cluster import Event, Job

HOUR, DAY = 3600.0, 86400.0


class Regime(NamedTuple):
    """A job, and the real behaviour of its cluster, which a policy does not know.

    reach   the share of an oracle's score that the check requires
    rate    the real rate of failures, relative to the stated rate
    burst   (days from one burst to the next, days that it lasts, factor on the rate of failures)
    """

    job: Job
    days: int
    reach: float
    rate: float = 1.0
    burst: tuple = (1, 0, 1)


# Nodes have 8 GPUs. These two rates are published; everything else is assumed.
REGIMES = {
    "rare failures": Regime(Job(16, 8, GPU_HOURS / 128 * HOUR, 600, 600, 300, 1200, DAY, 0.5),
                            240, 0.94),
    "2,048 nodes": Regime(Job(2048, 16, GPU_HOURS / 16384 * HOUR, 20, 600, 300, 900, DAY, 0.5),
                          54, 0.92),
    "bursts": Regime(Job(256, 16, GPU_HOURS / 2048 * HOUR, 120, 600, 300, 600, DAY / 2, 0.2),
                     60, 0.86, burst=(4, 1, 30)),
    "slow repairs": Regime(Job(124, 31, OPT_HOURS / 124 * HOUR, 180, 900, 600, 1800, 4 * DAY, 0.8),
                           60, 0.90),
    "slow restarts": Regime(Job(32, 16, OPT_HOURS / 32 * HOUR, 300, 600, 2400, 180, 4 * HOUR, 0.15),
                            90, 0.89, rate=3),
    "slow checkpoints": Regime(Job(512, 512, GPU_HOURS / 4096 * HOUR, 1200, 900, 600, 600,
                                   8 * HOUR, 0.4), 60, 0.62, rate=4),
}


def make_trace(regime, seed=0):
    """Draw the [Event] of a regime: failures at random, on any node that is up, and warnings.

    One failure in five has a warning, 2 to 20 minutes before; half of all warnings are false.
    """
    job, days, _, rate, (every, lasts, times) = regime
    random, events, until = np.random.default_rng(seed), [], {}
    nodes = job.nodes + job.most_spares
    most = rate * max(times, 1) * nodes / job.nodes / job.mean_seconds  # failures a second
    now = random.exponential(1 / most)
    while now < days * DAY:
        in_burst = now / DAY % every < lasts
        node, away = int(random.integers(nodes)), random.exponential(
            job.repair_seconds if random.random() < job.broken else job.reboot_seconds)
        lead, share = random.uniform(120, 1200), random.random()
        if share < (1 if in_burst else 1 / max(times, 1)) and until.get(node, 0) < now:
            until[node] = now + away
            events.append(Event(now, node, away))
            for at, warned in ((now - lead, node), (random.uniform(0, days * DAY),
                                                    int(random.integers(nodes)))):
                if random.random() < 0.2 and at > 0:
                    events.append(Event(at, warned, None))
        now += random.exponential(1 / most)
    return sorted(events)
