"""diagnose: which of the known diseases a run has, by the records of its ranks (trace.py).

In the modules NAME_detectors.py a detector takes [Rank, ...] and returns a sentence of evidence,
or None. Evidence has numbers: what was seen, and what was expected. Four detectors use
detectors.py, the exercises of lab 16.
"""

from typing import NamedTuple

from ranklab.clinic import (
    drift_detectors, gradient_detectors, hang_detectors, run_state_detectors,
    sharding_detectors, training_detectors)
from ranklab.clinic.trace import by_optimizer


MODULES = (hang_detectors, gradient_detectors, drift_detectors, training_detectors,
           sharding_detectors, run_state_detectors)


CAUSES = {  # {disease: its possible causes, which say more}
    "replicas_drift": {"collective_order", "rank_branch", "unsynchronised_start",
                       "change_in_flight", "stale_weights", "fp16_nan", "dropout_seeds",
                       "shard_norm", "old_shard"},
    "unsynchronised_start": {"old_shard"},
    "memory_growth": {"stale_weights"},  # reductions that are never waited for pile up
}


class Finding(NamedTuple):
    """A disease, and the sentence that proves it."""

    disease: str
    evidence: str


def diagnose(ranks, before=(), beside=()):
    """Name the diseases of one run: [Finding, ...], or [] if no known disease is found.

    ranks   [Rank, ...] of the run (trace.py)
    before  the Ranks of the run that this run resumes; a resume is judged by both
    beside  the Ranks of the same program on fewer ranks; without them learning_rate is not judged
    """
    findings, other_runs = {}, {"data_twice": [before], "optimizer_not_restored": [before],
                                "learning_rate": [beside]}
    for module in MODULES if ranks else ():
        for name, detector in module.DETECTORS.items():
            for part in [ranks] if name in module.WHOLE else by_optimizer(ranks):
                if name not in findings and (
                        evidence := detector(part, *other_runs.get(name, ()))):
                    findings[name] = Finding(name, evidence)
    return [finding for name, finding in findings.items()
            if not CAUSES.get(name, set()) & findings.keys()]
