"""The check of diagnose, on timelines that are made up: causes and numbers are known exactly."""

from statistics import mean

from ranklab.checks.beside import expect
from ranklab.checks.ddp.calls import called, refuses
from ranklab.checks.ddp.jobs import JOBS
from ranklab.checks.trial import explain

ADVICE = {
    "loader-bound": "The mean over ranks of loading that no computing hides, over the step.",
    "communication-bound": "The smallest exposed communication of all ranks, over the step. "
    "Exposed is what no computing hides. (Events of kind wait are something else: gaps of the main "
    "thread.)",
    "straggler": "The busiest rank's computing and loading, less the mean of the *other* ranks'."}
MEDIAN = "Take the median step of each rank: it ignores one step that went wrong."
EARLY = "Ranks that are ready early only wait for the last one. Take the min over the ranks."
WORK = "A rank works when it computes or loads: compare the two together."
OTHERS = {"(ZeroDivision|Statistics)Error: .*": "Ranks may be equally busy: the others are all but "
          "one, not all that are less busy. With one rank there are no others: its share is 0."}


def check_diagnose(fn):
    for job in JOBS:  # in the first one ranks are unequal: an error there is a slip
        _compare(fn, job, OTHERS if job is not JOBS[0] else {})
    yield "each cause is named; a hidden transfer is none, and neither is waiting for a straggler"
    yield "of two causes the larger one, from a quarter on; one rank alone; hiccups change nothing"
    events = JOBS[0].timelines()[0]
    refuses(fn, {"no timeline": ([],), "a rank that only loads": ([events, events[:1]],)})
    yield "a ValueError where a rank has no step in which anything was computed"


def _compare(fn, job, failures):
    works = [load + compute for load, compute in zip(job.loads, job.computes)]
    length = max(works) + job.transfer
    exposed = [length - work for work in works]
    result = called(job.name, failures, fn, {"timelines": job.timelines()})
    expect(isinstance(result, tuple) and [*map(type, result)] == [str, dict]
           and set(result[1]) == set(ADVICE), f"it returns {str(result)[:60]}",
           f"Return a verdict and its shares: a string, and a dict of {', '.join(ADVICE)}.")
    ms = {"loader-bound": mean(job.loads), "communication-bound": min(exposed),
          "straggler": _more_than_others(works)}
    slips = {"communication-bound": {"that of the rank with most": (max(exposed), EARLY)},
             "straggler": {"computing alone": (_more_than_others(job.computes), WORK)}}
    for name, right in ms.items():
        named = slips.get(name, {}) | {
            "per cent": (100 * right, "These are shares of a step: a whole step is 1."),
            "in seconds": (job.unit * length * right, "Divide by the length of a step."),
            "a share of all steps": (right / len(job.hiccups), "Divide by one step's length.")}
        explain(f"{job.name}: {name}", round(result[1][name], 9), round(right / length, 9),
                {what: (wrong / length, hint) for what, (wrong, hint) in named.items()},
                MEDIAN if any(job.hiccups) else ADVICE[name])
    expect(result[0] == job.verdict, f"{job.name}: the verdict is {result[0]}, not {job.verdict}",
           "The verdict is the largest of them, from a quarter on; below that it is healthy.")


def _more_than_others(works):
    """What the busiest has more than the mean of the others; 0 where there are none."""
    return max(works) - (sum(works) - max(works)) / (len(works) - 1) if len(works) > 1 else 0.0
