"""The checks of what is computed from a schedule, and of where a model is cut."""

import itertools

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.pipeline_parallel.schedules import illegal
from ranklab.checks.trial import explain
from ranklab.pipeline_parallel import (
    Action, Span, flush_bubble, gpipe_schedule, interleaved_schedule, one_f_one_b_schedule,
    parse_schedule, simulate, zb_h1_bubble, zb_v_schedule, zero_bubble_schedule,
)

SCHEDULES = {"B, I and W on one rank": parse_schedule(
    "F0 I0 F1 F2 W0 B1 F3 F4 I2 W2 B3 B4"),
             "GPipe": gpipe_schedule(4, 6), "1F1B": one_f_one_b_schedule(4, 6),
             "interleaved": interleaved_schedule(2, 4, 3), "ZB-H1": zero_bubble_schedule(4, 6),
             "ZB-V": zb_v_schedule(3, 8), "one rank": one_f_one_b_schedule(1, 3),
             "F and B by hand": parse_schedule("F0 F1 F2 B1 F3 B0 B2 B3")}
# Measured, with waits: the clock does not begin at 0, and no rank is called 2.
MEASURED = [Span(rank, Action("F", rank, 0), 100.0 + start, 100.0 + end) for rank, start, end in
            ((3, 5, 10), (0, 0, 1), (1, 1, 2), (1, 2, 4), (0, 4, 6))]


def check_bubble_fraction(bubble_fraction):
    for name, flush, right in (("measured", True, 1 - 11 / 30), ("measured", False, 1 - 11 / 18),
                               ("ZB-V", False, 0.0), ("1F1B", True, flush_bubble(4, 6)),
                               ("interleaved", True, flush_bubble(2, 4, 3)),
                               ("ZB-H1", True, zb_h1_bubble(4, 6)), ("one rank", True, 0.0)):
        spans = MEASURED if name == "measured" else simulate(SCHEDULES[name])
        busy, times = 0, {}  # of each rank, all starts and ends
        for span in spans:
            busy += span.end - span.start
            times.setdefault(span.rank, []).extend((span.start, span.end))
        own = [max(each) - min(each) for each in times.values()]
        explain(f"{name}, flush={flush}", round(bubble_fraction(list(spans), flush), 9), right, {
            "without the ranks' idle ends" if flush else "by the mean of the ranks' own times": (
                1 - busy / sum(own), "A rank is idle, too, before its first action and after its "
                "last, while others work." if flush else "The slowest rank counts for all: the "
                "largest of these times."),
            "as without a flush": (1 - busy / len(own) / max(own), "With flush=True the time is "
                                   "that from the first start to the last end of all ranks."),
            "a part of the work": (right / (1 - right), "The bubble is a part of the whole time, "
                                   "and the whole time includes it."),
        }, "1 - busy / (ranks * time). Count the ranks that are in the spans. The time is the last "
           "end minus the first start, over all ranks; without a flush, take it for each rank, and "
           "then the longest.")
    yield "the part of all ranks' time without work, from the first start to the last end"
    yield "without a flush: each rank's own time, and the slowest counts for all"
    yield "spans in any order, measured or simulated; any numbers of ranks"


def check_in_flight_activations(in_flight_activations):
    for name, schedule in SCHEDULES.items():
        right, of_I, of_both, of_B, of_none = (torch.tensor([
            max(itertools.accumulate((a.kind == "F") - (a.kind in freed_by) for a in actions))
            for actions in schedule]) for freed_by in ("BW", "BI", "BIW", "B", ""))
        of_start = torch.tensor([len([*itertools.takewhile(lambda a: a.kind == "F", actions)])
                                 for actions in schedule])
        got = torch.tensor([int(number) for number in in_flight_activations(schedule)])
        explain(f"{name}: what ranks hold", got, right, {
            "as if I freed them": (of_I, "With I and W, an activation is there until its W."),
            "as if I and W freed them": (of_both, "With I and W, one is there until its W."),
            "as if only B freed them": (of_B, "W frees them as well."),
            "those before the first backward": (of_start, "There may be more later."),
            "all forwards": (of_none, "A backward frees its activation."),
        }, "For each rank: F adds one, B or W takes one away. The most that is there at any time: "
           "look after each F, before the B that follows.")
    yield "for each rank the most at any time: GPipe, 1F1B, interleaved, by hand"
    yield "if B is in two halves: from F until W"


def check_stale_weights(stale_weights):
    for name, stash in itertools.product(("1F1B", "GPipe", "interleaved"), (True, False)):
        where, right, newest = f"{name}, stash={stash}", {}, {}
        for actions in SCHEDULES[name]:
            for at, action in enumerate(actions):
                newest[action] = sum(a[:2] == ("B", action.stage) for a in actions[:at])
                right[action] = newest[action._replace(kind="F") if stash else action]
        got = dict(stale_weights(SCHEDULES[name], stash))
        hint = "With stash, B uses the weights that its own F used." if got == newest else \
            ("Count the B of the same stage that came before the action: each stage has updates of "
             "its own. With stash, B has the number of its F; without, that of its own moment.")
        for action, number in right.items():
            if got.get(action) != number:
                raise Mistake(f"{where}: {action} uses weights after {got.get(action)} updates, "
                              f"not {number}", hint)
    yield "every F uses the newest weights; B uses its F's with a stash, otherwise the newest"
    yield "counted for each stage, also with several on a rank"


def _least(costs, stages):
    """The smallest possible largest sum, of all ways to cut."""
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs))))
               for cut in cuts)


def check_split_stages(split_stages):
    for costs in ([1] * 6, [0, 4, 4, 4, 4, 8], [9, 1, 1, 1, 1, 1], [0.0, 0.5, 0.25, 0.25, 0.5],
                  [0, 0, 0, 7], [23, 4, 17, 9, 38, 2, 2, 31, 12, 6, 27, 15, 8]):
        for stages in range(1, min(6, len(costs)) + 1):
            given = list(costs)
            parts = [list(part) for part in split_stages(given, stages)]
            where = f"costs {costs}, {stages} stages"
            if given != costs:
                raise Mistake(f"{where}: the costs are changed", "Work on a copy.")
            if len(parts) != stages or not all(parts) or sum(parts, []) != [*range(len(costs))]:
                raise Mistake(f"{where}: the stages are {parts}", "Return as many stages as asked "
                              "for, each with one layer or more. Each begins where the one before "
                              "it stops.")
            got, best = max(sum(costs[i] for i in part) for part in parts), _least(costs, stages)
            if got > best * (1 + 1e-9):
                raise Mistake(f"{where}: the slowest stage costs {got}, where {best} is possible",
                              "Equally many layers are not equally much work, and a stage filled "
                              "up to the mean leaves too much or too little to those after it: "
                              "the best place for the last cut depends on all the others.")
    yield "the slowest stage is as fast as it can be; layers in order, none twice, no stage empty"
    yield from illegal(split_stages, ([1, 2, 3], 0), ([1, 2, 3], 4))
