"""Lab 14: policies that always do the same, or do what can't be done."""

import random

from mutants import mutant

from ranklab.resilience import optimal_interval, recovery_policy
from ranklab.resilience.cluster import Decision

INTERVAL = "optimal_interval(job.checkpoint_seconds, mean)"
SPARES = 'min(range(job.most_spares + 1), key=idle) if state.event == "start" else 0'
NODES = "Decision(best[1],"
ALL = "job.nodes if state.up >= job.nodes else 0"

WRONG = [mutant(recovery_policy, *edits, says=says, called=called, random=random)
         for *edits, says, called in (
    (INTERVAL, "600.0", "library's `interval`", "every_ten_minutes"),
    (INTERVAL, "3600.0", "library's `interval`", "every_hour"),
    (INTERVAL, "6 * 3600.0", "library's `interval`", "every_six_hours"),
    (INTERVAL, "optimal_interval(job.checkpoint_seconds, job.mean_seconds)",
     "bursts.*library's `interval`", "believes_the_stated_mean"),
    (SPARES, "0", "library's `spares`", "no_spares"),
    (SPARES, "-(-job.nodes // 10)", "library's `spares`", "a_tenth_in_spares"),
    (SPARES, "job.nodes // 24", "2,048 nodes.*library's `spares`", "a_spare_for_24"),
    (NODES, f"Decision({ALL},", "library's `nodes`", "always_waits"),
    (NODES, "Decision(fits(state.up),", "slow restarts.*library's `nodes`", "never_waits"),
    (NODES, "Decision(state.running or fits(state.up),", "library's `nodes`", "never_grows"),
    ("up // job.replica * job.replica", "up", "a multiple of 8", "half_a_replica"),
    (NODES, "Decision(min(job.nodes, state.job.nodes),", "nodes=.* are up", "nodes_that_are_down"),
    (SPARES, "state.job.nodes", "can be had", "as_many_spares_as_nodes"),
    (INTERVAL, "0.0", "interval=0", "always_saves"),
    ("return Decision(best[1]", "return (best[1]", "a tuple is returned", "a_tuple"),
    (INTERVAL, f"{INTERVAL} * random.uniform(0.95, 1.05)", "again has another score", "random"),
)]  # fmt: skip


def recovery_policy__daly(state):
    """2,048 nodes.*library's `spares`"""
    job = state.job
    return Decision(job.nodes if state.up >= job.nodes else 0,
                    optimal_interval(job.checkpoint_seconds, job.mean_seconds))


def recovery_policy__only_at_failures(state):
    """a NoneType is returned"""
    return Decision(state.up, 3600.0) if state.event == "failure" else None
