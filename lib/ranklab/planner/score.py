"""score: the errors of predictions on published runs, by source, and why rows are not used.
likely_range: the errors on the runs that are most similar to a plan.

A row is left out for its kind or for missing data, never for its error.
"""

import functools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from ranklab.planner.constants import CONSTANTS
from ranklab.planner.jobs import Unused, is_for_fit, job_of
from ranklab.planner.memory import fits, memory_per_gpu
from ranklab.planner.published import all_runs
from ranklab.planner.step import step_time

NO_DATA = ("the source contradicts", "a headline without", "out of memory", "no step time")
CLEAR = 0.05  # two layouts whose times differ by less do not count as a pair
SIMILAR_RUNS = 12  # at least, for a range of their own
# (median, 90th percentile) of errors if constants are fitted without the row's source: the line
# "all" at the end of `python -m ranklab.projects.planner fit`, of 25 November 2026
LEFT_OUT = {"time": (0.092, 0.228), "memory": (0.023, 0.125)}


@dataclass
class Score:
    """The errors of one source or of all, as lists of |predicted / published - 1|.

    pairs    for each pair of layouts of one model on the same GPUs: whether the order was right
    fits     for each used row: whether the planner says that it fits, as it did
    assumed  {unpublished field, whose usual value was assumed: number of rows}
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
        """The number of rows that publish a metric and do not contradict themselves."""
        return self.rows - sum(number for reason, number in self.unused.items()
                               if reason.startswith(NO_DATA))

    def as_dict(self):
        return {"rows": self.rows, "usable": self.usable, "used": self.used,
                "step_time": spread(self.times), "memory": spread(self.memory),
                "pairs": {"number": len(self.pairs), "right": mean(self.pairs)},
                "fits": mean(self.fits), "assumed": dict(self.assumed.most_common()),
                "unused": dict(self.unused.most_common())}


def spread(errors):
    """Return {"number", "median", "p90"} of these errors; median and p90 are None without any."""
    return {"number": len(errors), "median": quantile(errors, 0.5), "p90": quantile(errors, 0.9)}


def quantile(values, part):
    """Return the value below which this fraction of them lies, by linear interpolation."""
    if not values:
        return None
    values = sorted(values)
    index, rest = divmod(part * (len(values) - 1), 1)
    return values[int(index)] + rest * (values[min(int(index) + 1, len(values) - 1)]
                                        - values[int(index)])


def mean(values):
    return sum(values) / len(values) if values else None


def step_ratio(job, constants=CONSTANTS, step=step_time):
    """Return predicted / published step time; `step` may be a learner's step_time."""
    return step(job.model, job.plan, job.machine, constants).total / job.seconds


def memory_ratio(job, constants=CONSTANTS, memory=memory_per_gpu):
    """Return predicted / published memory, as the source counts it.

    memory  memory_per_gpu, or a learner's
    """
    predicted = memory(job.model, job.plan, job.machine, None, constants)
    return predicted.reading(job.memory_kind) / job.memory


def score(runs, constants=CONSTANTS):
    """Return {source: Score} of these Runs, and "all"."""
    scores = {source: score_of_source(group, constants)
              for source, group in by_source(runs).items()}
    return {**scores, "all": total(scores.values())}


def score_of_source(runs, constants):
    """Return the Score of the Runs of one source."""
    jobs, unused = [], Counter()
    for run in runs:
        try:
            jobs.append(job_of(run))
        except Unused as reason:
            unused[str(reason)] += 1
    timed = [job for job in jobs if job.seconds]
    ratios = {job.row_id: step_ratio(job, constants) for job in timed}
    return Score(
        rows=len(runs), used=len(jobs), unused=unused,
        times=[abs(ratio - 1) for ratio in ratios.values()],
        memory=[abs(memory_ratio(job, constants) - 1) for job in jobs if job.memory],
        pairs=pairs_of(timed, ratios),
        fits=[fits(job.model, job.plan, job.machine, None, constants) for job in jobs],
        assumed=Counter(words.partition("=")[0] for job in jobs for words in job.assumed))


def total(scores):
    """Combine these Scores into one."""
    together = Score()
    for one in scores:
        together.rows, together.used = together.rows + one.rows, together.used + one.used
        for name in ("times", "memory", "pairs", "fits"):
            getattr(together, name).extend(getattr(one, name))
        together.unused += one.unused
        together.assumed += one.assumed
    return together


def by_source(runs):
    groups = defaultdict(list)
    for run in runs:
        groups[run.file or "none"].append(run)
    return groups


def pairs_of(jobs, ratios):
    """Return [whether the faster of two was predicted] for each pair of plans of the same model (in
    all sizes), on the same number of the same GPUs, with sequences of the same length, if their
    published seconds per token differ by more than CLEAR. Rows with the same plan are no pair.
    """
    groups, results = defaultdict(list), []
    for job in jobs:
        groups[job.model, job.name, job.machine, job.plan.gpus, job.plan.sequence].append(job)
    for first, second in (pair for group in groups.values() for pair in combinations(group, 2)):
        if first.plan == second.plan:
            continue
        a, b = (job.seconds / job.plan.batch for job in (first, second))
        if max(a, b) > (1 + CLEAR) * min(a, b):
            predicted_a, predicted_b = (ratios[job.row_id] * job.seconds / job.plan.batch
                                        for job in (first, second))
            results.append((predicted_a < predicted_b) == (a < b))
    return results


# --- all published runs ---------------------------------------------------------------------------

class Residual(NamedTuple):
    """A published run and its prediction.

    ratio   published / predicted step time
    in_fit  whether constants were fitted on it
    """

    source: str
    tool: str
    gpu: str
    precision: str
    has_experts: bool
    ratio: float
    in_fit: bool


@functools.cache
def published_residuals():
    """Return [Residual] of all published runs that have a step time."""
    residuals = []
    for run in all_runs():
        try:
            job = job_of(run)
        except Unused:
            continue
        if job.seconds:
            residuals.append(Residual(
                run.file, job.plan.tool, job.machine.family, job.plan.precision,
                bool(job.model.experts), 1 / step_ratio(job, CONSTANTS), is_for_fit(job.row_id)))
    return residuals


@functools.cache
def median_errors():
    """Return the median errors (of step times, of memory) on all published runs, as fractions of
    the measured values.
    """
    errors = score(all_runs())["all"]
    return quantile(errors.times, 0.5), quantile(errors.memory, 0.5)


def likely_range(model, plan, machine):
    """Return (low, high, a sentence): the 10th and 90th percentile of published / predicted step
    time over the most similar published runs: dense like this model, or with experts, at its
    precision, by this tool on this kind of GPU; or by any tool; or on any GPU. In the last case
    runs on this kind of GPU widen the range, as does a single source.
    """
    residuals = published_residuals()
    family_runs = [run for run in residuals if run.gpu == machine.family]  # whatever its kind
    kind = "with experts" if model.experts else "dense"

    def alike(runs, **traits):
        return [run for run in runs if run.has_experts == bool(model.experts)
                and all(getattr(run, name) == value for name, value in traits.items())]

    precision, tool = {"precision": plan.precision}, {"tool": plan.tool}
    for similar, words in (
            (alike(family_runs, **precision, **tool),
             f"{plan.tool} on {machine.family}, {kind}, {plan.precision}"),
            (alike(family_runs, **precision), f"{kind}, {plan.precision}, on {machine.family}"),
            (alike(family_runs), f"{kind}, on {machine.family}"),
            (alike(residuals, **precision), f"{kind}, {plan.precision}, on any GPU"),
            (alike(residuals), f"{kind}, on any GPU")):
        if len(similar) >= SIMILAR_RUNS:
            break
    ranges, suffix = [percentiles(similar)], ""
    if "any GPU" in words:
        rest = [run for run in family_runs if run not in similar]
        if len(rest) >= SIMILAR_RUNS:
            ranges.append(percentiles(rest))
        suffix = (f", and of {len(rest)} of other kinds on {machine.family}"
                  if len(ranges) > 1 else f", {len(family_runs) - len(rest)} of them on "
                  f"{machine.family}")
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    measured = f"{low:.2f} to {high:.2f}"
    is_wider, wider = len({run.source for run in similar}) == 1, 1 + LEFT_OUT["time"][1]
    if is_wider:
        low, high = low / wider, high * wider
    side = ": most were slower" if low > 1 else ": most were faster" if high < 1 else ""
    furthest = max((run.ratio for run in similar), key=lambda ratio: max(ratio, 1 / ratio))
    return low, high, (
        f"80% of {len(similar)} published runs ({words}){suffix} took {measured} "
        f"times the predicted time{side}, the furthest {furthest:.2f}; "
        f"{sum(run.in_fit for run in similar)} were used in the fit"
        + (f". All are of one source, so the range is {wider - 1:.0%} wider on both sides: so far "
           "off is one run in ten of a source that the fit has not seen" if is_wider else ""))


def percentiles(runs):
    return tuple(quantile([run.ratio for run in runs], part) for part in (0.1, 0.9))
