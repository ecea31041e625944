"""Resilience: a job that goes on although nodes fail.

    interval.py   optimal_interval, goodput: how often to save, and what share is useful work
    cluster.py    a job on nodes that fail, simulated: what a policy sees, decides and gets
    traces.py     traces of failures out of published rates, several regimes
    policy.py     recovery_policy: interval, spares, shrink or wait; Daly's and an oracle's beside
    neighbour.py  Neighbour: a copy of each rank's shard in another rank's memory
"""

from ranklab.resilience.interval import goodput, optimal_interval
from ranklab.resilience.neighbour import Neighbour
from ranklab.resilience.policy import recovery_policy

__all__ = ["Neighbour", "goodput", "optimal_interval", "recovery_policy"]
