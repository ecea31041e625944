"""diagnose, on made-up timelines, whose causes and numbers are known exactly."""

from statistics import mean
from typing import NamedTuple

from ranklab.checks.ddp.jobs import JOBS
from ranklab.checks.prover import Must, Proof, Slip, Stage
from ranklab.ddp import diagnose

NAMES = "loader-bound", "communication-bound", "straggler"


class NoStep(NamedTuple):
    """Timelines, one of which has no step with any computation."""

    name: str
    ranks: int

    def __str__(self):
        return self.name

    def timelines(self):
        events = JOBS[0].timelines()[0]
        return [events, events[:1]][:self.ranks]


def _see(fn, case):
    timelines = case.timelines()
    result = fn(timelines)
    is_pair = (isinstance(result, tuple) and [*map(type, result)] == [str, dict]
               and {*result[1]} == {*NAMES})
    if not is_pair:
        yield {"what it returns": str(result)[:60]}
        return
    verdict, shares = result
    # Rounded: shares that are 0 differ by rounding, too.
    yield {"what it returns": "a verdict and its three shares",
           **{f"the share {name}": round(float(shares[name]), 9) for name in NAMES},
           "the verdict": verdict,
           "whether timelines are as before": Must(timelines == case.timelines(), True)}


def by_the_job(timelines):
    """Return the diagnosis that follows from the ranks' times of loading, computing and sending."""
    job = next((each for each in JOBS if each.timelines() == timelines), None)
    if job is None:
        raise ValueError("no step")
    works = [load + compute for load, compute in zip(job.loads, job.computes)]
    length, rest = max(works) + job.transfer, len(works) - 1
    ms = {"loader-bound": mean(job.loads), "communication-bound": job.transfer,
          "straggler": max(works) - (sum(works) - max(works)) / rest if rest else 0.0}
    return job.verdict, {name: each / length for name, each in ms.items()}


MEDIAN = "median(measure(step) for step in rank_steps) for"
DURATION = "max(medians(lambda step: max(e.end for e in step) - min(e.start for e in step)))"
REST = "(sum(working) - max(working)) / max(len(working) - 1, 1)"
TOTAL = "medians(lambda step: sum(e.end - e.start for e in step if e.kind == '{}'))"
EXPOSED, LOADING = "medians(exposed_communication)", (
    'medians(lambda step: exposed_communication(step, kind="loader"))')
VERDICT, LARGEST = "verdict if shares[verdict] >= 0.25", "max(shares, key=shares.get)"
SHARES = '(verdict if shares[verdict] >= 0.25 else "healthy"), shares'
DIAGNOSE = Proof(
    diagnose,
    Stage({"each cause is named; a hidden transfer is none, and neither is waiting for a straggler":
           (), "of two causes the larger one, if it is at least a quarter; one rank alone; hiccups "
               "change nothing": ()}, _see, JOBS, oracle=by_the_job),
    Stage("a ValueError where a rank has no step in which anything was computed", _see,
          (NoStep("no timeline", 0), NoStep("a rank that only loads", 2)), oracle=by_the_job),
    mistakes=(
        Slip("Exposed communication: ranks that are ready early also wait for the last one, so "
             "take the min over ranks.",
             ("min(exposed)", "max(exposed)"), ("min(exposed)", "exposed[0]"),
             ("min(exposed)", "mean(exposed)"), mean=mean),
        Slip("Exposed communication is only what no computing hides, not all communication.",
             (EXPOSED, TOTAL.format("communication"))),
        Slip("Events of kind wait are gaps in the main thread, not communication.",
             (EXPOSED, TOTAL.format("wait"))),
        Slip("Count only the loading that no computing hides: exposed_communication(step, "
             'kind="loader").', (LOADING, TOTAL.format("loader"))),
        Slip("Loading: take the mean over ranks of what no computing hides, divided by the step's "
             "length.",
             ("sum(loading) / len(loading)", "max(loading)"),
             ("sum(loading) / len(loading)", "min(loading)"),
             ("sum(loading) / len(loading)", "sum(loading)"),
             ("sum(loading) / len(loading)", "loading[0]")),
        Slip('Pass kind="loader": without it, you count communication.',
             (LOADING, "medians(exposed_communication)")),
        Slip("Exactly 0.25 is enough: the verdict is the largest share if it is a quarter or more.",
             (VERDICT, VERDICT.replace(">=", ">"))),
        Slip("A share of a quarter or more is a cause: compare with 0.25.",
             (VERDICT, VERDICT.replace("0.25", "0.5"))),
        Slip("Compare the share itself with a quarter; do not round it.",
             (VERDICT, "verdict if round(shares[verdict], 2) >= 0.25")),
        Slip("If the largest share is below a quarter, the verdict is healthy.",
             (VERDICT, "verdict if True")),
        Slip("The verdict is the largest share, not the first one that is large enough.",
             (LARGEST, f"([x for x in shares if shares[x] >= 0.25] or [{LARGEST}])[0]")),
        Slip("The verdict is the largest share, not the smallest.",
             (LARGEST, LARGEST.replace("max", "min"))),
        Slip("Take the median over each rank's steps: it ignores a single bad step.",
             (MEDIAN, "mean([measure(step) for step in rank_steps]) for"),
             (MEDIAN, "max(measure(step) for step in rank_steps) for"),
             (MEDIAN, "min(measure(step) for step in rank_steps) for"), mean=mean),
        Slip("Those are seconds: divide by the length of a step.",
             (DURATION, "1.0", VERDICT, VERDICT.replace("0.25", "0.015")), (DURATION, "1.0")),
        Slip("Divide by the length of one step, not of the whole timeline.",
             (DURATION, "max(max(e.end for e in events) - min(e.start for e in events)\n"
                        "                   for events in timelines)")),
        Slip("Shares are fractions of a step: a whole step is 1, not 100.",
             ("duration = ", "duration = 0.01 * ", VERDICT, VERDICT.replace("0.25", "25")),
             ("duration = ", "duration = 0.01 * ")),
        Slip("A rank's work is computing plus loading: compare that sum.",
             ("[a + b for", "[a for")),
        Slip("Straggler: the work of the busiest rank, minus the mean of the *other* ranks' work.",
             (REST, "sum(working) / len(working)"), (REST, "min(working)"),
             (REST, "median(working)"),
             (REST, "mean([w for w in working if w < max(working)] or [max(working)])"), mean=mean),
        Slip("Straggler: subtract the mean of the other ranks' work.", (REST, "0.0"),
             (REST, "sum(working) - max(working)")),
        Slip("Two ranks can be equally busy: the others are all ranks but one, not only the less "
             "busy ones.",
             (REST, "mean([w for w in working if w < max(working)])"), mean=mean),
        Slip("With one rank there are no others: the straggler share is 0.",
             (" if len(working) > 1 else 0.0", "")),
        Slip(f"Return the verdict, a string, and its shares, a dict of {', '.join(NAMES)}.",
             (SHARES, "verdict"), (SHARES, "shares"), (f"return {SHARES}", SHARES),
             (f"return {SHARES}", 'return shares, (verdict if shares[verdict] >= 0.25 else '
                                  '"healthy")')),
        Slip("Keep the first lines of the stub: timelines without a step must raise a ValueError, "
             "not give a verdict.",
             ("raise ValueError(", 'return "healthy", dict.fromkeys(("loader-bound", '
              '"communication-bound", "straggler"), 0.0), ('),
             ("raise ValueError(", 'return "healthy", dict.fromkeys(("loader-bound", '
              '"communication-bound", "straggler"), 0.0)\n        ('),
             ("not steps or not all(steps)", "not steps")),
    ), hints=(
        "Cut each timeline with steps_of. Measure four things in every step of every rank: length, "
        "loading, exposed communication, computing. Take the median step of each rank.",
        "Loading: the mean over ranks. Exposed communication: the minimum, since the other ranks "
        "also wait for a slower one. Straggler: the largest computing + loading, minus the mean of "
        "the others. Divide each by the length of a step.",
        "medians(measure) = [median(measure(step) for step in s) for s in steps]; "
        "loading = medians(lambda s: exposed_communication(s, kind='loader')); the verdict is "
        "max(shares, key=shares.get) if that share is 0.25 or more, else 'healthy'.",
    ))
