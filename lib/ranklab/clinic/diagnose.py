"""diagnose: which of the known diseases a run has, by what its ranks have shown (symptoms.py).

In stopped.py, trained.py, split.py and kept.py a detector takes [Rank, ...] and returns a
sentence of evidence, or None. Evidence has numbers: what was seen, and what should have been.
Four of them rest on detectors.py, the exercises of lab 16.
"""

from typing import NamedTuple

from ranklab.clinic import kept, split, stopped, trained
from ranklab.clinic.symptoms import by_optimizer


class Finding(NamedTuple):
    """A disease, and the sentence that proves it."""

    disease: str
    evidence: str


def diagnose(ranks, before=(), beside=()):
    """[Finding, ...] for the Ranks of one run; [] where none of the known diseases is seen.

    before  the Ranks of the run that this one goes on with; data_twice looks at both
    beside  those of the same program on fewer ranks: without them no learning_rate is judged
    """
    found, more = {}, {"data_twice": [before], "learning_rate": [beside]}
    for module in (stopped, trained, split, kept) if ranks else ():
        for name, look in module.DETECTORS.items():
            for part in [ranks] if name in module.WHOLE else by_optimizer(ranks):
                said = name not in found and look(part, *more.get(name, ()))
                if said:
                    found[name] = Finding(name, said)
    return list(found.values())
