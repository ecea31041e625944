"""Resilience: keep a run going although its machines fail.

    gaps.py        failures drawn at random; optimal_interval and goodput, how often to save and
                   the share of useful work, are in formulas/resilience.py
    save.py        atomic_save: the file is the old or the new one, even if the process is killed
    resume.py      resume_exact: all state that a run must keep to continue bit for bit
    stream.py      PackedStream: shuffled, packed documents, resumed on any number of ranks
    elastic.py     elastic_batch: the same batch on any number of ranks
    straggler.py   find_straggler: the slow ranks, from each rank's seconds
    health.py      health_check: wrong and slow ranks, slow links
    corruption.py  silent_corruption: the rank whose numbers have changed
    spike.py       loss_spike: go on, skip, or roll back
    policy.py      recovery_policy: interval, spares, shrink or wait; cluster.py simulates the job,
                   traces.py makes failures out of published rates
    lemons.py      lemon_nodes: nodes that fail more often than chance explains
    neighbour.py   Neighbour: a copy of each rank's shard in another rank's memory
    heartbeat.py   Heartbeats: detect a rank that has stopped
"""

from ranklab.formulas.resilience import (
    expected_ettr, goodput, optimal_interval, poisson_tail, spares_needed,
)
from ranklab.resilience.cluster import Decision, Job, State, run_policy
from ranklab.resilience.corruption import recompute_step, silent_corruption
from ranklab.resilience.elastic import elastic_batch
from ranklab.resilience.gaps import random_gaps, simulate
from ranklab.resilience.health import Health, Probe, health_check
from ranklab.resilience.lemons import JobRecord, lemon_nodes, make_job_log
from ranklab.resilience.neighbour import Neighbour
from ranklab.resilience.policy import daly_policy, oracle, recovery_policy
from ranklab.resilience.resume import Loader, Run, resume_exact
from ranklab.resilience.save import atomic_save
from ranklab.resilience.spike import loss_spike
from ranklab.resilience.straggler import find_straggler
from ranklab.resilience.stream import Documents, PackedStream
from ranklab.resilience.traces import REGIMES, make_trace

__all__ = [
    "Decision", "Documents", "Health", "Job", "JobRecord", "Loader", "Neighbour", "PackedStream",
    "Probe", "REGIMES", "Run", "State",
    "atomic_save", "daly_policy", "elastic_batch", "expected_ettr", "find_straggler", "goodput",
    "health_check", "lemon_nodes", "loss_spike", "make_job_log", "make_trace", "optimal_interval",
    "oracle", "poisson_tail", "random_gaps", "recompute_step", "recovery_policy", "resume_exact",
    "run_policy", "silent_corruption", "simulate", "spares_needed",
]
