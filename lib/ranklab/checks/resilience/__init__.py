"""The exercises and predictions of lab 14, in the order of the lab.

    interval.py    optimal_interval, goodput
    save.py        atomic_save: processes are killed in the middle, so it has a check of its own
    resume.py      resume_exact
    elastic.py     elastic_batch
    straggler.py   find_straggler
    health.py      health_check
    corruption.py  silent_corruption
    spike.py       loss_spike
    policy.py      recovery_policy: open, and judged by its score, so it has a check of its own
"""

from ranklab import resilience
from ranklab.checks.exercise import Exercise
from ranklab.checks.resilience.corruption import CORRUPTION
from ranklab.checks.resilience.elastic import ELASTIC
from ranklab.checks.resilience.health import HEALTH
from ranklab.checks.resilience.interval import GOODPUT, INTERVAL
from ranklab.checks.resilience.policy import check_recovery_policy
from ranklab.checks.resilience.predictions import PREDICTIONS
from ranklab.checks.resilience.resume import RESUME
from ranklab.checks.resilience.save import check_atomic_save
from ranklab.checks.resilience.spike import SPIKE
from ranklab.checks.resilience.straggler import STRAGGLER

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    INTERVAL,
    GOODPUT,
    Exercise(resilience.atomic_save, check_atomic_save, hints=(
        "Which of the system's calls changes a whole file at once, or not at all?",
        "Write to another file in the same folder, then os.replace gives it the name. Its bytes "
        "must be on the disk before that, and the folder's entry after it. What if writing raises?",
        "part = path.with_name(f'.{path.name}.part'); torch.save, file.flush(), "
        "os.fsync(file.fileno()); os.replace(part, path); then os.fsync of os.open(path.parent, "
        "os.O_RDONLY). On any error: part.unlink(missing_ok=True), raise",
    )),
    RESUME,
    ELASTIC,
    STRAGGLER,
    HEALTH,
    CORRUPTION,
    SPIKE,
    Exercise(resilience.recovery_policy, check_recovery_policy, hints=(
        "Begin with the decisions that cost most: how many nodes, and how many spares? Print "
        "the scores of simple policies on each trace.",
        "Estimate the mean time until the next failure from state.now and state.failures. For "
        "each choice compute how much work is done until then, in node-seconds.",
        "For each choice of nodes now, and each time in state.back at which the job could grow: "
        "nodes * seconds, less restarts. For the spares: the number of nodes away is a Poisson "
        "number, with the mean: mean time away / mean time between failures.",
    )),
)
