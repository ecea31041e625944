"""The check of diagnose, on timelines that are made up: causes and numbers are known exactly."""

import math
from statistics import StatisticsError, mean

from ranklab.checks.ddp.jobs import CLEAR, NAMES, NOISY, ODD, TWO_CAUSES, more_than_others
from ranklab.checks.exercise import Mistake

GENERAL = {
    "loader-bound": "Loader: the mean over ranks of loading that no computing hides, over the "
                    "step.",
    "communication-bound": "Communication: the least exposed_communication of all ranks, over the "
                           'step. (Events of kind "wait" are gaps of the main thread, and '
                           "something else.)",
    "straggler": "Straggler: the busiest rank's computing and loading, less the mean of the "
                 "*other* ranks', over the length of a step. 0 for one rank.",
}


def check_diagnose(fn):
    for cases, sentence in (
            (CLEAR, "each cause is named; a hidden transfer is none, and neither is waiting for a "
                    "straggler"),
            (TWO_CAUSES, "of two causes the larger one; the busiest rank against all others"),
            (ODD, "one rank alone; just below and above a quarter; fast and slow machines alike"),
            (NOISY, "a hiccup in one step, or noise of 30%, changes no verdict")):
        for case in cases:
            _compare(fn, case)
        yield sentence
    _refuses_without_steps(fn)
    yield "a ValueError where a rank has no step in which anything was computed"


def _refuses_without_steps(fn):
    """No ranks; and one that only loads, beside a healthy one."""
    healthy = CLEAR[0].timelines()
    for timelines in ([], [healthy[0], [e for e in healthy[1] if e.kind == "loader"]]):
        try:
            result = fn(timelines)
        except ValueError:
            continue
        raise Mistake(f"with steps on {len(timelines[:1])} of {len(timelines)} ranks it returns "
                      f"{str(result)[:60]}", "Leave the stub's ValueError in: without steps "
                      "everywhere there is nothing to compare.")


def _compare(fn, case):
    timelines = case.timelines()
    given = [list(events) for events in timelines]
    try:
        result = fn(timelines)
    except (ZeroDivisionError, StatisticsError) as error:
        raise Mistake(f"{case.name}: {error}",
                      "With one rank there are no others: its straggler share is 0."
                      if len(given) == 1 else "Ranks may be equally busy. The others are all but "
                      "one, not all that are less busy.") from None
    if timelines != given:
        raise Mistake("the timelines are changed", "Make new lists; steps_of does.")
    verdict, shares = _parts(result)
    right = case.shares(shares["straggler"])
    off = [name for name in NAMES if not _is_near(shares[name], right[name])]
    if verdict == case.verdict and not off:
        return
    what = f"the verdict is {verdict}, not {case.verdict}"
    if verdict == case.verdict:
        what = f"the verdict is right, but not the share of {off[0]}"
    got, wanted = (", ".join(f"{name} {values[name]:.4g}" for name in NAMES)
                   for values in (shares, right))
    raise Mistake(f"{case.name}: {what}\nshares: {got}\nright:  {wanted}",
                  _hint(case, shares, right, off))


def _is_near(got, right):
    return math.isclose(got, right, rel_tol=1e-4, abs_tol=1e-4)


def _parts(result):
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise Mistake(f"it returns {str(result)[:60]}, not a verdict and its shares",
                      "Return (verdict, shares): a string, and a dict of three numbers.")
    if set(result[1]) != set(NAMES):
        raise Mistake(f"the shares are called {', '.join(map(str, result[1]))}",
                      f"They are {', '.join(NAMES)}.")
    return result


def _hint(case, shares, right, off):
    if not off and case.verdict == "healthy":
        return "The shares are right. Below a quarter there is no culprit: the verdict is healthy."
    if not off:
        return "The shares are right: the verdict is the largest of them, from a quarter on."
    if case.hiccup or case.noise:
        return ("Take of each rank its median step: steps_of cuts the timeline, median() of what "
                "you measure in each step forgets the one that went wrong.")
    _, computing, _, bare, length = case.usual()
    for factor, hint in (
            (100, "That is per cent. Shares: all of a step is 1."),
            (length * case.unit, "Shares, not seconds: divide by the length of a step."),
            (1 / case.steps, "Shares of one step: you divide by the length of all of them.")):
        if all(_is_near(shares[name], factor * right[name]) for name in off):
            return hint
    got = shares[off[0]] * length
    if off[0] == "straggler" and math.isclose(got, more_than_others(computing), abs_tol=1e-3):
        return "A rank works when it computes or loads: compare the two together."
    if off[0] == "communication-bound":
        if any(math.isclose(got, value, rel_tol=1e-3) for value in (max(bare), mean(bare))):
            return ("Ranks that are ready early only wait for the last one, inside their "
                    "all-reduce. The rank that has least exposed communication shows what "
                    "transfers cost: min over the ranks.")
        if got > min(bare):
            return ("Not all communication counts, but what no computing hides: "
                    "exposed_communication(step).")
    return GENERAL[off[0]]
