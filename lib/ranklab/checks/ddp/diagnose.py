"""The check of diagnose, on timelines that are made up: causes and numbers are known exactly."""

from statistics import mean

from ranklab.checks.beside import expect
from ranklab.checks.ddp.calls import called, refuses
from ranklab.checks.ddp.jobs import CASES, more_than_others
from ranklab.checks.trial import explain

GENERAL = {
    "loader-bound": "The mean over ranks of loading that no computing hides, over the step.",
    "communication-bound": "The least exposed communication of all ranks, what no computing hides, "
                           'over the step. (Events of kind "wait" are gaps of the main thread, and '
                           "something else.)",
    "straggler": "The busiest rank's computing and loading, less the mean of the *other* ranks', "
                 "over the length of a step. 0 for one rank.",
}
MEDIAN = ("Take of each rank its median step: steps_of cuts the timeline, median() of what you "
          "measure in each step forgets the one that went wrong.")
EARLY = ("Ranks that are ready early only wait for the last one, inside their all-reduce. The rank "
         "that has least exposed communication shows what transfers cost: min over the ranks.")
OTHERS = {"(ZeroDivision|Statistics)Error: .*": "Ranks may be equally busy: the others are all but "
          "one, not all that are less busy. With one rank there are no others: its share is 0."}


def check_diagnose(fn):
    failures = {}  # in the first case ranks are unequal: an error there is a slip
    for sentence, cases in CASES.items():
        for case in cases:
            _compare(fn, case, failures)
            failures = OTHERS
        yield sentence
    trains, loads = cases[0].timelines()
    loads = [event for event in loads if event.kind == "loader"]
    refuses(fn, {"no timeline": ([],), "a rank that only loads": ([trains, loads],)})
    yield "a ValueError where a rank has no step in which anything was computed"


def _compare(fn, case, failures):
    right = case.shares()
    result = called(case.name, failures, fn, {"timelines": case.timelines()})
    expect(isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
           and set(result[1]) == set(right), f"it returns {str(result)[:60]}, not a verdict and "
           "its shares", f"Return (verdict, shares): a string, and a dict of {', '.join(right)}.")
    verdict, shares = result
    for name, share in right.items():
        explain(f"{case.name}: {name}", round(shares[name], 9), round(share, 9),
                _slips(case, name, share), MEDIAN if any(case.hiccups) else GENERAL[name])
    expect(verdict == case.verdict, f"{case.name}: the shares are right, and the verdict is "
           f"{verdict}, not {case.verdict}", "Below a quarter there is no culprit: healthy."
           if case.verdict == "healthy" else "The verdict is the largest of them, from a quarter "
           "on.")


def _slips(case, name, right):
    _, bare, length = case.usual()
    slips = {
        "per cent": (100 * right, "Shares: all of a step is 1."),
        "in seconds": (length * case.unit * right, "Divide by the length of a step."),
        "a share of all steps": (right / len(case.hiccups), "You divide by the length of all of "
                                 "them."),
    }
    if name == "straggler":
        slips["computing alone"] = (more_than_others(case.computes) / length, "A rank works when "
                                    "it computes or loads: compare the two together.")
    if name == "communication-bound":
        slips |= {"that of the rank with most": (max(bare) / length, EARLY),
                  "the mean over ranks": (mean(bare) / length, EARLY)}
    return slips
