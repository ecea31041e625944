"""Lemons: nodes that fail again and again, and pass every check in between.

One failure says nothing about a node, because any node fails now and then. Only its history tells:
more failures than chance explains, in the days that it has run.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from ranklab.formulas.resilience import NODE_RATE, poisson_tail

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # nodes of a job


class JobRecord(NamedTuple):
    """A job in the scheduler's log.

    nodes   the names of its nodes, each of which ran for all of its days
    days    how long it ran
    failed  the node whose failure ended it; None if the job was done, cancelled or wrong itself
    """

    nodes: tuple
    days: float
    failed: str | None


def lemon_nodes(log, false_alarms=0.05):
    """Return the sorted names of the nodes that fail more often than chance explains.

    Healthy nodes fail at random, all at one rate per node-day, whatever job they run. A node is
    named if a healthy node fails at least as often, in as many days, with a probability below
    `false_alarms` / the number of nodes in the log.
    The rate is that of the nodes that are not named, because lemons raise the rate of all nodes,
    and hide behind it: begin with all nodes, and repeat until the same nodes are named again.
    log: [JobRecord, ...] in any order, not modified; at least one.
    false_alarms: how many healthy nodes may be named on average, in a log without lemons.
    Raises: ValueError unless `false_alarms` is above 0 and below half the number of nodes.
    Lab: 14
    """
    days, failures, named = Counter(), Counter(), None
    for job in log:
        for node in job.nodes:
            days[node] += job.days
        if job.failed is not None:
            failures[job.failed] += 1
    if not 0 < false_alarms < len(days) / 2:
        raise ValueError(f"false_alarms is {false_alarms}, of {len(days)} nodes")
    limit, lemons = false_alarms / len(days), []
    while lemons != named:
        named = lemons
        healthy = days.keys() - named
        rate = sum(failures[node] for node in healthy) / sum(days[node] for node in healthy)
        lemons = sorted(node for node in days
                        if poisson_tail(failures[node], rate * days[node]) < limit)
    return lemons


def make_job_log(nodes=2000, days=28, lemons=24, times=30, rate=NODE_RATE, seed=0):
    """Emulate the log of a cluster; return ([JobRecord, ...], the names of its lemons).

    Each day the nodes that are in use are dealt out to jobs of 1 to 128 nodes, each size with the
    same share of the nodes. A job runs until the day ends, one of its nodes fails, or it ends by
    itself, as half of them do. Nodes are in use on 20% to 100% of the days.
    `rate` and the share of lemons, 24 of 2,000 nodes, are RSC-1's (arXiv 2410.21680). Everything
    else is assumed, `times` above all: a lemon's rate is that many times a healthy node's.
    """
    random, log = np.random.default_rng(seed), []
    names, use = [f"node{i:04}" for i in range(nodes)], random.uniform(0.2, 1, nodes)
    rates = np.where(random.permutation(nodes) < lemons, times, 1) * rate
    share = 1 / np.array(SIZES)
    for _ in range(days):
        order = random.permutation(np.flatnonzero(random.random(nodes) < use))
        while len(order):
            size = random.choice(SIZES, p=share / share.sum())
            members, order = order[:size], order[size:]
            own = rates[members]
            end = random.random() if random.random() < 0.5 else 1.0
            fails = random.exponential(1 / own.sum())
            failed = names[random.choice(members, p=own / own.sum())] if fails < end else None
            log.append(JobRecord(tuple(names[i] for i in members), float(min(end, fails)), failed))
    return log, [names[i] for i in np.flatnonzero(rates > rate)]
