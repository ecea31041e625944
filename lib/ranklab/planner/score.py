"""score: how far off predictions are from published runs, by source, and why rows are not used.

A row is left out for what it is or lacks, never for its error.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from ranklab.planner.constants import CONSTANTS
from ranklab.planner.fit import memory_ratio, step_ratio
from ranklab.planner.jobs import Unused, job_of
from ranklab.planner.memory import fits

NO_DATA = ("the source contradicts", "a headline without", "out of memory", "no step time")
CLEAR = 0.05  # two layouts whose times differ by less do not count as a pair


@dataclass
class Score:
    """The errors of one source or of all, as lists of |predicted / published - 1|.

    pairs    for each two layouts of one model on the same GPUs: whether the faster one was named
    fits     for each used row: whether the planner says that it fits, as it did
    assumed  {what was not published, so that the usual was assumed: rows}
    """

    rows: int = 0
    used: int = 0
    times: list = field(default_factory=list)
    memory: list = field(default_factory=list)
    pairs: list = field(default_factory=list)
    fits: list = field(default_factory=list)
    unused: Counter = field(default_factory=Counter)
    assumed: Counter = field(default_factory=Counter)

    @property
    def usable(self):
        """Rows that publish a metric and do not contradict themselves."""
        return self.rows - sum(number for why, number in self.unused.items()
                               if why.startswith(NO_DATA))

    def as_dict(self):
        return {"rows": self.rows, "usable": self.usable, "used": self.used,
                "step_time": spread(self.times), "memory": spread(self.memory),
                "pairs": {"number": len(self.pairs), "right": mean(self.pairs)},
                "fits": mean(self.fits), "assumed": dict(self.assumed.most_common()),
                "unused": dict(self.unused.most_common())}


def spread(errors):
    """{"number", "median", "p90"} of these errors; None if there are none."""
    return {"number": len(errors), "median": quantile(errors, 0.5), "p90": quantile(errors, 0.9)}


def quantile(values, part):
    return float(np.quantile(values, part)) if values else None


def mean(values):
    return sum(values) / len(values) if values else None


def score(runs, constants=CONSTANTS):
    """{source: Score} of these Runs, and "all"."""
    found = defaultdict(Score)
    for source, group in by_source(runs).items():
        one, jobs = found[source], []
        one.rows = len(group)
        for run in group:
            try:
                jobs.append(job_of(run))
            except Unused as why:
                one.unused[str(why)] += 1
        one.used = len(jobs)
        times = {job.row_id: step_ratio(job, constants) for job in jobs if job.seconds}
        one.times = [abs(ratio - 1) for ratio in times.values()]
        one.memory = [abs(memory_ratio(job, constants) - 1) for job in jobs if job.memory]
        one.fits = [fits(job.model, job.plan, job.machine, None, constants) for job in jobs]
        one.assumed = Counter(said.partition("=")[0] for job in jobs for said in job.assumed)
        one.pairs = pairs_of([job for job in jobs if job.seconds], times)
    found["all"] = total(found.values())
    return dict(found)


def total(scores):
    """The Score of all of these together."""
    found = Score()
    for each in list(scores):
        found.rows, found.used = found.rows + each.rows, found.used + each.used
        for name in ("times", "memory", "pairs", "fits"):
            getattr(found, name).extend(getattr(each, name))
        found.unused += each.unused
        found.assumed += each.assumed
    return found


def by_source(runs):
    found = defaultdict(list)
    for run in runs:
        found[run.file or "none"].append(run)
    return found


def pairs_of(jobs, ratios):
    """[whether the faster of two was named] for each two plans of one model, in all its sizes, on
    the same number of the same GPUs, with sequences of the same length, whose published seconds a
    token differ by more than CLEAR. Two rows with one plan are no choice of a layout.
    """
    groups, found = defaultdict(list), []
    for job in jobs:
        groups[job.model, job.name, job.machine, job.plan.gpus, job.plan.sequence].append(job)
    for group in groups.values():
        for one, other in combinations(group, 2):
            if one.plan == other.plan:
                continue
            a, b = (job.seconds / job.plan.batch for job in (one, other))
            if max(a, b) > (1 + CLEAR) * min(a, b):
                said = [ratios[job.row_id] * job.seconds / job.plan.batch for job in (one, other)]
                found.append((said[0] < said[1]) == (a < b))
    return found
