"""The check of diagnose, on timelines that are made up: causes and numbers are known exactly."""

import math
from statistics import StatisticsError

from ranklab.checks.ddp.jobs import CLEAR, NAMES, NOISY, ODD, TWO_CAUSES, more_than_others
from ranklab.checks.exercise import Mistake


def check_diagnose(fn):
    for case in CLEAR:
        _compare(fn, case)
    yield "each cause is named; a hidden transfer is none, and neither is waiting for a straggler"
    for case in TWO_CAUSES:
        _compare(fn, case)
    yield "of two causes the larger one; the busiest rank against all of the others"
    for case in ODD:
        _compare(fn, case)
    yield "one rank alone; just below and above a quarter; fast and slow machines alike"
    for case in NOISY:
        _compare(fn, case)
    yield "a hiccup in one step, or noise of 30%, changes no verdict"
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
        hint = "With one rank there are no others: its straggler share is 0."
        if len(given) > 1:
            hint = ("Ranks may be equally busy. The others are all but one, not all that are less "
                    "busy.")
        raise Mistake(f"{case.name}: {error}", hint) from None
    if timelines != given:
        raise Mistake("the timelines are changed", "Make new lists; steps_of does.")
    shares = _result(result)
    right = _nearest(case, shares)
    verdict = result[0]
    numbers = ", ".join(f"{name} {shares[name]:.2f}" for name in NAMES)
    wanted = ", ".join(f"{name} {right[name]:.2f}" for name in NAMES)
    if verdict != case.verdict:
        raise Mistake(f"{case.name}: the verdict is {verdict}, not {case.verdict}\n"
                      f"shares: {numbers}\nright:  {wanted}", _hint(case, shares, right, verdict))
    for name in NAMES:
        if not math.isclose(shares[name], right[name], rel_tol=1e-4, abs_tol=1e-4):
            raise Mistake(f"{case.name}: the verdict is right, but the share of {name} is "
                          f"{right[name]:.4g}, not {shares[name]:.4g}",
                          _hint(case, shares, right, verdict))


def _nearest(case, shares):
    """The right shares; of the two right ones of a straggler the nearer."""
    right = case.shares()
    both = right["straggler"], case.straggler_of_sums()
    return {**right, "straggler": min(both, key=lambda x: abs(x - shares["straggler"]))}


def _result(result):
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise Mistake(f"it returns {str(result)[:60]}, not a verdict and its shares",
                      "Return (verdict, shares): a string, and a dict of three numbers.")
    if set(result[1]) != set(NAMES):
        raise Mistake(f"the shares are called {', '.join(map(str, result[1]))}",
                      f"They are {', '.join(NAMES)}.")
    return result[1]


def _hint(case, shares, right, verdict):
    def is_near(name, value):
        return math.isclose(shares[name], value, rel_tol=1e-3, abs_tol=1e-4)

    off = [name for name in NAMES if not is_near(name, right[name])]
    if not off and case.verdict == "healthy":
        return "The shares are right. Below a quarter there is no culprit: the verdict is healthy."
    if not off:
        return "The shares are right: the verdict is the largest of them, from a quarter on."
    if case.hiccup or case.noise:
        return ("Take of each rank its median step: steps_of cuts the timeline, median() of what "
                "you measure in each step forgets the one that went wrong.")
    of_ranks, length = case.usual()
    if all(is_near(name, 100 * right[name]) for name in off):
        return "That is per cent. Shares: all of a step is 1."
    if all(is_near(name, right[name] * length * case.unit) for name in off):
        return "Shares, not seconds: divide by the length of a step."
    if all(is_near(name, right[name] / case.steps) for name in off):
        return "Shares of one step: you divide by the length of all of them."
    return HINTS[off[0]](shares[off[0]] * length, of_ranks)


def _hint_loader(got, of_ranks):
    return "Loader: the mean over ranks of loading that no computing hides, over the step."


def _hint_communication(got, of_ranks):
    bare = [exposed for *_, exposed in of_ranks]
    for value in (max(bare), sum(bare) / len(bare)):
        if math.isclose(got, value, rel_tol=1e-3):
            return ("Ranks that are ready early only wait for the last one, inside their "
                    "all-reduce. The rank that has least exposed communication shows what "
                    "transfers cost: min over the ranks.")
    if got > min(bare):
        return ("Not all communication counts, but what no computing hides: "
                "exposed_communication(step).")
    return ("Communication: the least exposed_communication of all ranks, over the step. (Events "
            'of kind "wait" are gaps of the main thread, and something else.)')


def _hint_straggler(got, of_ranks):
    computing = more_than_others([compute for _, compute, _ in of_ranks])
    if math.isclose(got, computing, rel_tol=1e-3, abs_tol=1e-3):
        return "A rank works when it computes or loads: compare the two together."
    return ("Straggler: the busiest rank's computing and loading, less the mean of the *other* "
            "ranks', over the length of a step. 0 for one rank.")


HINTS = dict(zip(NAMES, (_hint_loader, _hint_communication, _hint_straggler)))
