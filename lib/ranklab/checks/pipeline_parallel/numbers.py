"""The checks of what is computed from a schedule, and of where a model is cut."""

import itertools

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain
from ranklab.pipeline_parallel import (
    Action, Span, flush_bubble, gpipe_schedule, interleaved_schedule, one_f_one_b_schedule,
    parse_schedule, simulate, zb_h1_bubble, zb_v_schedule, zero_bubble_schedule,
)

SCHEDULES = {"GPipe": gpipe_schedule(4, 6), "1F1B": one_f_one_b_schedule(4, 6),
             "interleaved": interleaved_schedule(2, 4, 3), "ZB-H1": zero_bubble_schedule(4, 6),
             "ZB-V": zb_v_schedule(3, 8), "1F1B on one rank": one_f_one_b_schedule(1, 3),
             "F and B by hand": parse_schedule("F0 F1 F2 B1 F3 B0 B2 B3")}
# Measured, as a run with waits: the clock does not begin at 0, and no rank is called 2.
MEASURED = [Span(rank, Action("F", rank, 0), 100.0 + start, 100.0 + end) for rank, start, end in
            ((3, 5, 10), (0, 0, 1), (1, 1, 2), (1, 2, 4), (0, 4, 6))]


def check_bubble_fraction(bubble_fraction):
    cases = [("measured", MEASURED, True, 1 - 11 / 30), ("measured", MEASURED, False, 1 - 11 / 18),
             ("ZB-V", simulate(zb_v_schedule(4, 8)), False, 0.0),
             ("1F1B", simulate(SCHEDULES["1F1B"]), True, flush_bubble(4, 6)),
             ("interleaved", simulate(SCHEDULES["interleaved"]), True, flush_bubble(2, 4, 3)),
             ("ZB-H1", simulate(SCHEDULES["ZB-H1"]), True, zb_h1_bubble(4, 6)),
             ("one rank", simulate(one_f_one_b_schedule(1, 3)), True, 0.0)]
    for name, spans, flush, right in cases:
        busy = sum(span.end - span.start for span in spans)
        times = {span.rank: [t for s in spans if s.rank == span.rank for t in (s.start, s.end)]
                 for span in spans}
        own = [max(each) - min(each) for each in times.values()]
        first, end = min(map(min, times.values())), max(map(max, times.values()))
        most, whole = max(times) + 1, busy / (1 - right)
        explain(f"{name}, flush={flush}", round(bubble_fraction(list(spans), flush), 9), right, {
            "without the ranks' idle ends": (1 - busy / sum(own), "A rank is idle, too, before its "
                                             "first action and after its last, as long as others "
                                             "work."),
            "as without a flush": (1 - busy / len(own) / max(own), "With flush=True the time is "
                                   "that from the first start to the last end of all ranks."),
            "as with a flush": (1 - busy / len(own) / (end - first), "Without one, each rank's own "
                                "time counts."),
            "a part of the work": (whole / busy - 1, "It is a part of the whole time, in which "
                                   "the bubble is contained."),
            "from time 0 on": (1 - busy / len(own) / end, "Begin with the first start."),
            "the busy part": (busy / whole, "1 minus that."),
            "in percent": (100 * right, "A fraction: 0.2 for a fifth."),
            f"of {most} ranks": (1 - busy / whole * len(own) / most, "Count the ranks that are in "
                                 "the spans; one number may be missing."),
        }, "1 - busy / (ranks * time), where the time is the last end minus the first start: of all "
           "ranks, or without a flush of each rank, and then the longest.")
    yield "the part of all ranks' time without work, from the first start to the last end"
    yield "without a flush: each rank's own time, that of the slowest for all"
    yield "spans in any order, measured or simulated; any numbers of ranks"


def _peaks(schedule, freed_by):
    """What is held at most if these kinds of action set an activation free."""
    steps = [[(a.kind == "F") - (a.kind in freed_by) for a in actions] for actions in schedule]
    return torch.tensor([max(itertools.accumulate(each)) for each in steps])


def check_in_flight_activations(in_flight_activations):
    for name, schedule in SCHEDULES.items():
        right = _peaks(schedule, "BW")
        got = torch.tensor([int(number) for number in in_flight_activations(schedule)])
        forwards = torch.tensor([sum(a.kind == "F" for a in actions) for actions in schedule])
        explain(f"{name}: what ranks hold", got, right, {
            "as if I set them free": (_peaks(schedule, "BI"), "Where B is in two halves, an "
                                      "activation is there until its W."),
            "as if only B set them free": (_peaks(schedule, "B"), "W sets them free, as well."),
            "as if I and W both did": (_peaks(schedule, "BIW"), "One activation is free after its "
                                       "W; I changes nothing."),
            "all forwards": (forwards, "A backward sets its activation free: count down."),
            "what is left at the end": (0 * right, "The most that is there at any time."),
            "one too few": (right - 1, "Look after each F, before the B that follows."),
        }, "For each rank: F one more, B or W one less; and of these numbers the largest.")
    yield "for each rank the most at any time: GPipe, 1F1B, interleaved, by hand"
    yield "where B is in two halves: from F until W"


def check_stale_weights(stale_weights):
    schedules = {name: SCHEDULES[name] for name in ("1F1B", "GPipe", "interleaved")}
    for (name, schedule), stash in itertools.product(schedules.items(), (True, False)):
        where, right, newest, of_rank = f"{name}, stash={stash}", {}, {}, {}
        for actions in schedule:
            for at, action in enumerate(actions):
                before = [a.stage for a in actions[:at] if a.kind == "B"]
                newest[action], of_rank[action] = before.count(action.stage), len(before)
                forward = action._replace(kind="F")
                right[action] = newest[forward if stash else action]
        got = dict(stale_weights(schedule, stash))
        if got.keys() != right.keys():
            raise Mistake(f"{where}: {len(got)} actions, not {len(right)}", "Each action of each "
                          "rank is a key, F and B.")
        after = {action: number + (action.kind == "B") for action, number in right.items()}
        slips = ((newest, "With stash, B uses the weights that its own F used."),
                 (after, "The update comes after the B, which does not use what it makes."),
                 (of_rank, "Each stage has updates of its own, also where a rank has several."),
                 (got, "Count the B of the same stage that came before. With stash, B has the "
                       "number of its F; without, that of its own moment."))
        for action, number in right.items():
            if got[action] != number:
                raise Mistake(f"{where}: {action} uses weights after {got[action]} updates, not "
                              f"{number}", next(hint for slip, hint in slips if slip == got))
    yield "every F uses the newest weights; B those of its F with a stash, and else the newest"
    yield "counted for each stage, also with several on a rank"


def _least(costs, stages):
    """The smallest possible largest sum: tried from the smallest sum of neighbours on."""
    def parts(most):
        count, total = 1, 0
        for cost in costs:
            count, total = (count, total + cost) if total + cost <= most else (count + 1, cost)
        return count

    sums = {sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)}
    return next(most for most in sorted(sums) if most >= max(costs) and parts(most) <= stages)


def check_split_stages(split_stages):
    random = torch.randint(1, 40, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    for costs in ([1] * 6, [0, 4, 4, 4, 4, 8], [9, 1, 1, 1, 1, 1], [3, 1, 1, 1, 1, 5, 2],
                  [0.0, 0.5, 0.25, 0.25, 0.5], [0, 0, 0, 7], random):
        for stages in range(1, min(6, len(costs)) + 1):
            given = list(costs)
            parts = [list(part) for part in split_stages(given, stages)]
            where = f"costs {costs if len(costs) < 9 else 'of 24 layers'}, {stages} stages"
            if given != costs:
                raise Mistake(f"{where}: the costs are changed", "Work on a copy.")
            if len(parts) != stages or not all(parts):
                raise Mistake(f"{where}: the stages have {[len(part) for part in parts]} layers",
                              "As many stages as asked for, and each has a layer at least.")
            if [layer for part in parts for layer in part] != list(range(len(costs))):
                raise Mistake(f"{where}: the stages are {parts}", "Each layer once, in their order: "
                              "range(first, stop), and the next begins at stop.")
            got, best = max(sum(costs[i] for i in part) for part in parts), _least(costs, stages)
            even = max(map(len, parts)) - min(map(len, parts)) <= 1
            if got > best * (1 + 1e-9):
                raise Mistake(f"{where}: the slowest stage costs {got}, where {best} is possible",
                              "Equally many layers are not equally much work." if even else
                              "A stage that is filled up to the mean leaves too much, or too "
                              "little, to those after it: the best last cut depends on all others.")
    yield "the slowest stage is as fast as it can be; layers in order, none twice, no stage empty"
    for stages in (0, 4):
        try:
            split_stages([1, 2, 3], stages)
        except ValueError:
            continue
        raise Mistake(f"{stages} stages of 3 layers are no error", "Each stage needs a layer, and "
                      "there must be a stage: ValueError(...).")
    yield "more stages than layers, or none, is a ValueError"
