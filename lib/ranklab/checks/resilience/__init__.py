"""The exercises and predictions of lab 14, in the order of the lab.

    interval.py    optimal_interval, goodput
    save.py        atomic_save: processes are killed in the middle, so it has its own check
    resume.py      resume_exact
    elastic.py     elastic_batch
    straggler.py   find_straggler
    stream.py      PackedStream
    health.py      health_check
    corruption.py  silent_corruption
    spike.py       loss_spike
    lemons.py      lemon_nodes
    policy.py      recovery_policy: open, and judged by its score, so it has its own check
"""

from ranklab.checks.clinic import bugs
from ranklab.checks.resilience.corruption import CORRUPTION
from ranklab.checks.resilience.elastic import ELASTIC
from ranklab.checks.resilience.health import HEALTH
from ranklab.checks.resilience.interval import GOODPUT, INTERVAL
from ranklab.checks.resilience.lemons import LEMONS
from ranklab.checks.resilience.policy import POLICY
from ranklab.checks.resilience.predictions import PREDICTIONS as NUMBERS
from ranklab.checks.resilience.resume import RESUME
from ranklab.checks.resilience.save import SAVE
from ranklab.checks.resilience.spike import SPIKE
from ranklab.checks.resilience.straggler import STRAGGLER
from ranklab.checks.resilience.stream import STREAM

__all__ = ["EXERCISES", "PREDICTIONS"]

BUGS = "resumed_digits", "split_digits"
EXERCISES = (
    INTERVAL,
    GOODPUT,
    SAVE,
    RESUME,
    ELASTIC,
    STRAGGLER,
    STREAM,
    HEALTH,
    CORRUPTION,
    SPIKE,
    LEMONS,
    POLICY,
    *bugs.exercises(*BUGS),
)
PREDICTIONS = (*NUMBERS, *bugs.predictions(*BUGS))
