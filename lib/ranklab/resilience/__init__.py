"""Resilience: a run goes on, though its machines fail.

    save.py        atomic_save: a file that is the old one or the new one, whenever it is killed
    resume.py      resume_exact: all that a run must keep to go on bit for bit
    elastic.py     elastic_batch: the same batch on any number of ranks
    straggler.py   find_straggler: the slow ranks, by the seconds of each
    health.py      health_check: wrong and slow ranks, slow links
    corruption.py  silent_corruption: the rank whose numbers have changed
    spike.py       loss_spike: go on, skip, or roll back
"""

from ranklab.resilience.corruption import recompute_step, silent_corruption
from ranklab.resilience.elastic import elastic_batch
from ranklab.resilience.health import Health, Probe, health_check
from ranklab.resilience.resume import Loader, Run, resume_exact
from ranklab.resilience.save import atomic_save
from ranklab.resilience.spike import loss_spike
from ranklab.resilience.straggler import find_straggler

__all__ = [
    "Health", "Loader", "Probe", "Run", "atomic_save", "elastic_batch", "find_straggler",
    "health_check", "loss_spike", "recompute_step", "resume_exact", "silent_corruption",
]
