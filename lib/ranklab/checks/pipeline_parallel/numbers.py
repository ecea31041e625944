"""The proofs of numbers computed from a schedule, and of where a model is cut."""

import functools
import itertools
from collections import defaultdict
from typing import NamedTuple

import torch

from ranklab.checks.pipeline_parallel.refusals import ASSERTED, SENTENCE, refusals
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.pipeline_parallel import (
    Action, Span, bubble_fraction, gpipe_schedule, in_flight_activations, interleaved_schedule,
    one_f_one_b_schedule, parse_schedule, simulate, split_stages, stale_weights, zb_v_schedule,
    zero_bubble_schedule,
)

SCHEDULES = {
    "GPipe": gpipe_schedule(4, 6), "1F1B": one_f_one_b_schedule(4, 6),
    "B, I and W by hand": parse_schedule("F0 I0 F1 F2 W0 B1 F3 F4 I2 W2 B3 B4\n"
                                         "F0 B0 F1 F2 I1 F3 I2 F4 W1 I3 F5 W3 W2 B4 B5"),
    "interleaved": interleaved_schedule(2, 4, 3), "ZB-H1": zero_bubble_schedule(4, 6),
    "ZB-V": zb_v_schedule(3, 8), "one rank": one_f_one_b_schedule(1, 3),
    "F and B by hand": parse_schedule("F0 F1 F2 B1 F3 B0 B2 B3")}


# --- bubble_fraction ------------------------------------------------------------------------------

class Timed(NamedTuple):
    """Spans of a schedule, or measured ones; flush is None if not given."""

    name: str
    flush: bool | None

    def __str__(self):
        return self.name + f", flush={self.flush}" * (self.flush is not None)

    def spans(self):
        return [*MEASURED] if self.name == "measured" else simulate(SCHEDULES[self.name])

    @property
    def keywords(self):
        return {} if self.flush is None else {"flush": self.flush}


# With waits: the clock does not begin at 0, and no rank is called 2.
MEASURED = [Span(rank, Action("F", rank, 0), 100.0 + start, 100.0 + end) for rank, start, end in
            ((3, 5, 11), (0, 4, 7), (0, 0, 1), (1, 1, 2), (1, 2, 4))]
TIMED = (Timed("measured", None), Timed("measured", False), Timed("measured", True),
         Timed("1F1B", True), Timed("interleaved", True), Timed("ZB-H1", True),
         Timed("ZB-V", False), Timed("interleaved", False), Timed("one rank", True))


def _see_bubble(fn, timed):
    bubble = fn(timed.spans(), **timed.keywords)
    # What is 0 may be 1e-16.
    yield {"the bubble": round(bubble, 9) if isinstance(bubble, float | int) else bubble}


def by_gaps(spans, flush=True):
    """Add up the gaps between a rank's spans and, with a flush, those at its two ends."""
    times = defaultdict(list)
    for span in spans:
        times[span.rank].append((span.start, span.end))
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    longest = max(max(ends) - min(starts) for starts, ends in (
        zip(*of_rank) for of_rank in times.values()))
    idle = 0
    for of_rank in times.values():
        starts, ends = zip(*sorted(of_rank))
        idle += sum(start - end for start, end in zip(starts[1:], ends))
        own = ends[-1] - starts[0]
        idle += (starts[0] - first) + (last - ends[-1]) if flush else longest - own
    return idle / (len(times) * (last - first if flush else longest))


RETURN = "return 1 - busy / (len(ranks) * longest)"
OF_GROUP = "max(s.end for s in group) - min(s.start for s in group)"
LONGEST = f"max({OF_GROUP} for group in groups)"
OF_RANKS = "[[s for s in spans if s.rank == rank] for rank in ranks]"
GROUPS = f"[spans] if flush else {OF_RANKS}"
BUSY = "busy = sum(span.end - span.start for span in spans)"
OWN = f"own = [{OF_GROUP} for group in {OF_RANKS}]\n    "
BUBBLE = Proof(
    bubble_fraction,
    Stage({"the share of all ranks' time without work, from the first start to the last end": (),
           "without a flush: each rank's own time, and the slowest counts for all": (),
           "spans in any order, measured or simulated; any numbers of ranks": ()},
          _see_bubble, TIMED, oracle=by_gaps,
          note="1 - busy / (ranks * time). Count the ranks that are in the spans. The time is the "
               "last end minus the first start, over all ranks; without a flush, take it for each "
               "rank, and then the longest."),
    mistakes=(
        Slip("This counts each rank's own time even with a flush. But a rank is idle before its "
             "first action and after its last, while others work.",
             (RETURN, f"{OWN}return 1 - busy / (sum(own) if flush else len(own) * max(own))"),
             (GROUPS, OF_RANKS, RETURN, f"{OWN}return 1 - busy / sum(own)")),
        Slip("With flush=True the time runs from the first start to the last end over all ranks. "
             "It is not the longest of the ranks' own times.", (GROUPS, OF_RANKS)),
        Slip("flush is ignored: without a flush, each rank's time runs from its own first start to "
             "its own last end.", (GROUPS, "[spans]")),
        Slip("flush=True and flush=False are swapped.", (GROUPS, GROUPS.replace("if", "if not"))),
        Slip("flush must default to True, as in the stub.",
             ("flush=True", "flush=False")),
        Slip("Without a flush, the slowest rank's time counts for every rank: take the largest of "
             "the ranks' own times, not their sum or mean.",
             (RETURN, f"{OWN}return 1 - busy / (len(ranks) * longest if flush else sum(own))")),
        Slip("Without a flush, the slowest rank's time counts for every rank, not the fastest "
             "rank's.",
             (RETURN, f"{OWN}return 1 - busy / (len(ranks) * (longest if flush else min(own)))")),
        Slip("That divides idle time by busy time. Divide it by the whole time, which includes the "
             "bubble.",
             (RETURN, "return len(ranks) * longest / busy - 1")),
        Slip("That is the busy fraction. The bubble is the idle fraction: 1 - busy / time.",
             (RETURN, "return busy / (len(ranks) * longest)")),
        Slip("That is the idle time itself, in seconds. Divide it by the total time of all ranks.",
             (RETURN, "return len(ranks) * longest - busy")),
        Slip("Return a fraction, 0.2 for a fifth, not a percentage.",
             (RETURN, f"return 100 * ({RETURN[7:]})")),
        Slip("Rounding loses digits: do not round.",
             (RETURN, f"return round({RETURN[7:]}, 2)")),
        Slip("The clock does not begin at 0: the time is the last end minus the first start.",
             (LONGEST, "max(s.end for s in spans)"), (" - min(s.start for s in group)", "")),
        Slip("Spans can come in any order: the first in the list need not start first, nor the "
             "last end last.", (LONGEST, "max(g[-1].end - g[0].start for g in groups)"),
             (LONGEST, LONGEST.replace("max(s.end for s in group)", "group[-1].end")),
             (LONGEST, LONGEST.replace("min(s.start for s in group)", "group[0].start"))),
        Slip("Count the ranks that appear in the spans: rank numbers can have gaps.",
             ("len(ranks) * longest", "(max(ranks) + 1) * longest")),
        Slip("A rank counts once, however many spans it has.",
             ("{span.rank for span in spans}", "[span.rank for span in spans]")),
        Slip("A rank counts once, however many stages it has: count the different values of "
             "span.rank.",
             ("len(ranks) * longest", "len({span.action.stage for span in spans}) * longest")),
        Slip("The number of ranks is missing: multiply the longest time by it to get the time of "
             "all ranks.",
             ("(len(ranks) * longest)", "longest")),
        Slip("This counts spans, but actions take different times: add up end - start.",
             (BUSY, "busy = len(spans)")),
        Slip("Each rank's bubble is a fraction of its own time, so their mean is not the fraction "
             "of the whole: add up all ranks' work, and divide once.",
             (RETURN, "parts = [1 - sum(s.end - s.start for s in g) / (max(s.end for s in g) - "
              f"min(s.start for s in g)) for g in {OF_RANKS}]\n    return sum(parts) / len(parts)"
              )),
    ), hints=(
        "How much time do all ranks have together, and how much of it do they work?",
        "1 - work / (ranks * time). The time is the last end minus the first start, of all spans.",
        "busy = sum(s.end - s.start for s in spans); 1 - busy / (len({s.rank for s in spans}) * "
        "longest). Without a flush, longest is the largest of max(end) - min(start) of each rank.",
    ))


# --- in_flight_activations ------------------------------------------------------------------------

def _see_held(fn, name):
    yield {"what each rank holds at most": [int(number) for number in fn(SCHEDULES[name])]}


def by_lifetimes(schedule):
    """Count, at each action, the micro-batches between their F and their B or W."""
    peaks = []
    for actions in schedule:
        begins = {a[1:]: at for at, a in enumerate(actions) if a.kind == "F"}
        ends = {a[1:]: at for at, a in enumerate(actions) if a.kind in "BW"}
        peaks.append(max(sum(begins[key] <= at <= ends[key] for key in begins)
                         for at in range(len(actions))))
    return peaks


HELD, PEAK = 'count += {"F": 1, "I": 0}.get(action.kind, -1)', "peak = max(peak, count)"
START, RESULT = "        count = peak = 0\n", "peaks.append(peak)"
IN_FLIGHT = Proof(
    in_flight_activations,
    Stage({"for each rank the most at any time: GPipe, 1F1B, interleaved, by hand": (),
           "if B is in two halves: from F until W": ()}, _see_held, (*SCHEDULES,),
          oracle=by_lifetimes,
          note=("On each rank, F adds one, and B or W removes one. Return the most held at any "
                "time: look after each F, before the B that follows.")),
    mistakes=(
        Slip("I frees nothing: an activation is held until its W.",
             (HELD, 'count += {"F": 1, "W": 0}.get(action.kind, -1)')),
        Slip("Here both I and W free an activation. It is only one, and it is held until its W.",
             (HELD, 'count += 1 if action.kind == "F" else -1')),
        Slip("W frees an activation as well: where a backward is split into I and W, there is no "
             "B.",
             (HELD, 'count += {"F": 1, "B": -1}.get(action.kind, 0)')),
        Slip("A B is a whole backward, so it frees its activation.",
             (HELD, 'count += {"F": 1, "W": -1}.get(action.kind, 0)'),
             (HELD, 'count += action.kind == "F"')),
        Slip("A rank can have both: a B for some micro-batches, I and W for others.",
             (HELD, 'count += {"F": 1, "W": -1}.get(action.kind, -(action.kind == "B" and not any('
              'a.kind == "W" for a in actions)))'),
             (HELD, 'count += {"F": 1, "B": -1}.get(action.kind, -(action.kind == "W" and not any('
              'a.kind == "B" for a in actions)))')),
        Slip("Those are only the forwards before the first backward. A rank can hold more later.",
             (PEAK, "if action.kind != 'F' and not peak:\n                peak = count + ("
              "action.kind in 'BW')")),
        Slip("That is what is held at the end. Return the most that is held at any time.",
             (RESULT, "peaks.append(count)")),
        Slip("Check the count after each F, before the B that follows.",
             (f"{HELD}\n            {PEAK}", f"{HELD}\n            peak = max(peak, count) if "
              'action.kind in "BIW" else peak')),
        Slip("Each rank holds its own activations: start from 0 for each rank.",
             (START, "", "peaks = []", "peaks = []\n    count = peak = 0"),
             (START, "        count = 0\n", "peaks = []", "peaks = []\n    peak = 0")),
        Slip("Return one number for each rank, not the largest of all.",
             ("return peaks", "return [max(peaks)]")),
        Slip("Return one number for each rank, not for each stage: a rank with several stages "
             "holds the activations of all of them.",
             ("for actions in schedule:", "for actions in [[a for a in actions if a.stage == s] "
              "for actions in schedule for s in sorted({a.stage for a in actions})]:")),
        Slip("Count activations by stage and micro-batch: the same micro-batch on another stage of "
             "the rank is another activation.",
             (START, "        live, peak = set(), 0\n", HELD,
              'live = live | {action[2]} if action.kind == "F" else live - {action[2]} if '
              'action.kind in "BW" else live\n            count = len(live)')),
    ), hints=(
        "Which action adds an activation, and which one frees it?",
        "F adds one. B frees it, or W does if the backward is split in two.",
        "held += {\"F\": 1, \"B\": -1, \"I\": 0, \"W\": -1}[action.kind]; keep the largest.",
    ))


# --- stale_weights --------------------------------------------------------------------------------

class Versions(NamedTuple):
    """A schedule; stash is None if not given."""

    name: str
    stash: bool | None

    def __str__(self):
        return self.name + f", stash={self.stash}" * (self.stash is not None)

    @property
    def keywords(self):
        return {} if self.stash is None else {"stash": self.stash}


VERSIONS = tuple(Versions(name, stash) for name in ("1F1B", "GPipe", "interleaved", "F and B by "
                 "hand") for stash in (True, False)) + (Versions("1F1B", None),)


def _see_versions(fn, case):
    schedule = SCHEDULES[case.name]
    versions = dict(fn(schedule, **case.keywords))
    actions = [action for of_rank in schedule for action in of_rank]
    numbers = torch.tensor([float(versions.get(action, -1)) for action in actions])
    yield {"the version": Told(numbers, functools.partial(_of_action, actions))}


def _of_action(actions, got, due):
    at = int((got != due).int().argmax())
    number = "missing" if got[at] == -1 else f"{got[at]:g}"
    return f"{number} for {actions[at]}, not {due[at]:g}"


def by_counting(schedule, stash=True):
    """Count for each action separately: the B of its stage before it, or before its F."""
    return {action: sum(a[:2] == ("B", action.stage) for a in actions[:actions.index(
        action._replace(kind="F") if stash else action)])
        for actions in schedule for action in actions}


UPDATE = '            updates[action.stage] += action.kind == "B"\n'
USED = "versions[action] = versions[forward] if is_old else updates[action.stage]\n"
OLD = 'is_old = stash and action.kind == "B"'
NEW_COUNTER = "        updates = Counter()\n"
STALE = Proof(
    stale_weights,
    Stage({"every F uses the newest weights; B uses its F's with a stash, otherwise the newest": (),
           "counted for each stage, also with several on a rank": ()}, _see_versions, VERSIONS,
          oracle=by_counting,
          note=("Count the B of the same stage before the action: each stage has its own updates. "
                "With stash, a B has the version of its F; without, the newest version at that "
                "moment.")),
    mistakes=(
        Slip("stash is ignored: with it, B uses the weights that its own F used.",
             (OLD, "is_old = False")),
        Slip("stash=True and stash=False are swapped: with a stash, B uses the weights that its "
             "own F used.", (OLD, OLD.replace("stash", "not stash"))),
        Slip("stash is ignored: without it, B uses the newest weights.",
             (OLD, 'is_old = action.kind == "B"')),
        Slip("stash must default to True, as in the stub.",
             ("stash=True", "stash=False")),
        Slip("A B makes the next version only when it is done: the B itself uses the version "
             "before.",
             (UPDATE, "", f"            {USED}", f"{UPDATE}            {USED}")),
        Slip("Each stage has its own updates, even if a rank has several stages.",
             ("updates[action.stage] +=", "updates[0] +=", "else updates[action.stage]",
              "else updates[0]")),
        Slip("All ranks' updates are counted together. A stage's weights change only with its own "
             "B.", (NEW_COUNTER, "", "versions = {}", "versions = {}\n    updates = Counter()",
                        UPDATE, UPDATE.replace("action.stage", "0"), "else updates[action.stage]",
                        "else updates[0]")),
        Slip("An update follows each B, not each F.", (UPDATE, UPDATE.replace('"B"', '"F"'))),
        Slip("Only a B is followed by an update: an F does not change the weights.",
             (UPDATE, UPDATE.replace('action.kind == "B"', "1"))),
        Slip("Every F has a version as well.",
             ("return versions", "return {a: n for a, n in versions."
                                             "items() if a.kind == 'B'}")),
        Slip("Every B has a version as well.",
             ("return versions", "return {a: n for a, n in versions."
                                             "items() if a.kind == 'F'}")),
        Slip("The first version is 0.", ("else updates[action.stage]\n",
                                         "else updates[action.stage] + 1\n")),
        Slip("That is how many versions have been made since the F. Return the version itself.",
             ("return versions", "return {a: n - versions[a._replace(kind='F')] for a, n in "
              "versions.items()}")),
        Slip("Each key must be the Action itself.",
             ("return versions", "return {str(action): n for "
                                             "action, n in versions.items()}"),
             ("return versions", "return {action[1:]: n for action, n in versions.items()}")),
    ), hints=(
        "How many updates has a stage had when it begins an action?",
        "Count each stage's B. With stash, a B uses the same version as its own F.",
        "versions[action] = versions[action._replace(kind=\"F\")] if stash and action.kind == "
        "\"B\" else updates[action.stage]; then updates[action.stage] += action.kind == \"B\"",
    ))


# --- split_stages ---------------------------------------------------------------------------------

class Cut(NamedTuple):
    costs: tuple
    stages: int

    def __str__(self):
        return f"costs {[*self.costs]}, {self.stages} stages"


CUTS = tuple(Cut(costs, stages) for costs in (
    (5, 4, 17, 9, 30, 2), (0, 4, 4, 4, 4, 8), (9, 1, 1, 1, 1, 1), (1,) * 6, (0, 0, 0, 7),
    (0.0, 0.5, 0.25, 0.25, 0.5), (23, 4, 17, 9, 38, 2, 2, 31, 12, 6, 27, 15, 8))
    for stages in range(1, min(6, len(costs)) + 1))


def _see_cut(fn, cut):
    costs = [*cut.costs]
    layers = [[*part] for part in fn(costs, cut.stages)]
    is_split = len(layers) == cut.stages and all(layers) and (
        sum(layers, []) == [*range(len(costs))])
    yield {"the split": Told([] if is_split else layers, _of_layers),
           "the list of costs afterwards": Must(costs, [*cut.costs])}
    if is_split:
        slowest = max(sum(cut.costs[layer] for layer in part) for part in layers)
        yield {"the slowest stage": AtMost(slowest, _least(cut), "has a slowest stage of cost {:g};"
                                           " {:g} is possible")}


def _of_layers(layers, _):
    return f"{layers}: a stage is missing or empty, or a layer is missing or appears twice"


@functools.cache
def _least(cut):
    """Return the smallest largest sum over all ways to cut."""
    return min(max(sum(cut.costs[a:b]) for a, b in itertools.pairwise((0, *inner, len(cut.costs))))
               for inner in itertools.combinations(range(1, len(cut.costs)), cut.stages - 1))


def all_cuts(costs, stages):
    ways = ([range(a, b) for a, b in itertools.pairwise((0, *inner, len(costs)))]
            for inner in itertools.combinations(range(1, len(costs)), stages - 1))
    return min(ways, key=lambda parts: max(sum(costs[i] for i in part) for part in parts))


def equally_many(costs, stages):
    refuse(costs, stages)
    each, more = divmod(len(costs), stages)
    begins = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(begins)]


def up_to_the_mean(costs, stages):
    return _filled(costs, stages, lambda first, count: sum(costs) / stages)


def up_to_the_mean_of_what_is_left(costs, stages):
    return _filled(costs, stages, lambda first, count: sum(costs[first:]) / count)


def _filled(costs, stages, mean):
    """Fill each stage up to mean(its first layer, number of stages from it on)."""
    refuse(costs, stages)
    parts, first = [], 0
    for count in range(stages, 0, -1):
        stop = first + 1
        while stop < len(costs) - count + 1 and (
                count == 1 or sum(costs[first:stop + 1]) <= mean(first, count)):
            stop += 1
        parts.append(range(first, stop))
        first = stop
    return parts


def without_layers(costs, stages):
    refuse(costs, stages)
    total, partial, parts = sum(costs), 0, [[] for _ in range(stages)]
    for layer, cost in enumerate(costs):
        parts[min(stages - 1, int(partial * stages / total))].append(layer)
        partial += cost
    return parts


def to_the_least_busy(costs, stages):
    refuse(costs, stages)
    parts = [[] for _ in range(stages)]
    for layer in sorted(range(len(costs)), key=lambda layer: -costs[layer]):
        min(parts, key=lambda part: sum(costs[i] for i in part)).append(layer)
    return [sorted(part) for part in parts]


def halves(costs, stages):
    """Cut the costliest part in two, until there are enough."""
    refuse(costs, stages)
    parts = [range(len(costs))]
    while len(parts) < stages:
        part = max((part for part in parts if len(part) > 1),
                   key=lambda part: sum(costs[i] for i in part))
        at, cut = parts.index(part), min(part[1:], key=lambda k: max(
            sum(costs[part[0]:k]), sum(costs[k:part[-1] + 1])))
        parts[at:at + 1] = [range(part[0], cut), range(cut, part[-1] + 1)]
    return parts


def refuse(costs, stages):
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages={stages} must be between 1 and the {len(costs)} layers")


LIMITS = "if not 1 <= stages <= len(costs):"
RAISE = 'raise ValueError(f"stages={stages} must be between 1 and the {len(costs)} layers")'
BEST = "max(best[k][0], sum(costs[k:n]))"
RANGES = "[range(a, b) for a, b in zip(begins, begins[1:] + [len(costs)])]"
SPLIT = Proof(
    split_stages,
    Stage({"layers in order, none twice, no stage empty; `costs` is unchanged": (),
           "the slowest stage is as fast as it can be": ("the slowest stage",)},
          _see_cut, CUTS, oracle=all_cuts,
          note="The best place for the last cut depends on all the others."),
    refusals("split_stages", ([1, 2, 3], 0), ([1, 2, 3], 4)),
    mistakes=(
        Slip("The same number of layers is not the same amount of work.", equally_many),
        Slip("Stages filled up to the mean can leave too much for later ones: the best place for "
             "the last cut depends on all the others.", up_to_the_mean,
             up_to_the_mean_of_what_is_left),
        Slip("This cuts the costliest part in two each time, and never moves earlier cuts. With "
             "one more stage, every cut might have to move.", halves),
        Slip("A stage is empty: each needs at least one layer.", without_layers),
        Slip("This gives each layer to the least busy stage. But a stage must be a run of adjacent "
             "layers, or its output would go back and forth.", to_the_least_busy),
        Slip("Use max(...): what counts is the larger of the best for the layers before and the "
             "last stage's own cost.", (BEST, "best[k][0] + sum(costs[k:n])"),
             (BEST, "best[k][0]")),
        Slip("The slowest stage sets the pace: take the larger of the two, not the smaller.",
             (BEST, BEST.replace("max", "min"))),
        Slip("This looks only at the last stage's cost: the best for the layers before it counts "
             "as well.", (BEST, "sum(costs[k:n])")),
        Slip("The stages are balanced, but the slowest could still be faster: only the largest sum "
             "counts.",
             ("min((max(best[k][0], sum", "max((min(best[k][0], sum"),
             ("(sum(costs[:n]), [0])", "(sum(costs[:n])**2, [0])",
              BEST, "best[k][0] + sum(costs[k:n])**2")),
        Slip("That compares stages by their number of layers. Use the cost of the layers instead.",
             ("(sum(costs[:n]), [0])", "(n, [0])", BEST, "max(best[k][0], n - k)")),
        Slip("The last stage's range is missing: it ends where the layers end.",
             ("begins[1:] + [len(costs)]", "begins[1:]")),
        Slip("One stage is missing: the first one begins at 0, and each of the others at a cut.",
             ("range(1, stages)", "range(1, stages - 1)")),
        Slip("Each stage begins where the one before it stops: range(a, b) ends with b - 1.",
             ("[range(a, b) for", "[range(a, b + 1) for")),
        Slip("Return the layers' numbers, not their costs.",
             (RANGES, RANGES.replace("range(a, b)", "costs[a:b]"))),
        Slip("Those are the positions of the cuts. Return a range of layers for each stage.",
             (RANGES, "begins"), (RANGES, "[(a, b) for a, b in zip(begins, begins[1:] + "
                                  "[len(costs)])]")),
        Slip("This changes the costs. Work on a copy, and keep the layers in order.",
             ("best = {n: (sum(costs[:n])", "costs.sort()\n    best = {n: (sum(costs[:n])")),
        Slip("Check both limits first, 1 <= stages <= len(costs), and raise ValueError(...) with a "
             "sentence.",
             (LIMITS, "if False:"), (LIMITS, "if stages < 1:"),
             (LIMITS, "if stages > len(costs):")),
        Slip(SENTENCE, (RAISE, "raise ValueError")),
        Slip(ASSERTED, (LIMITS, "assert 1 <= stages <= len(costs)\n    if False:")),
    ), hints=(
        "Where is the last cut, if you know the best cuts for any number of layers before it?",
        "If the last stage begins at k, the slowest stage costs the larger of two: that stage's "
        "cost, and the best for the first k layers.",
        "best[n] = min over k of max(best_before[k], sum(costs[k:n])), once for each stage; keep "
        "the k. Or guess the largest sum, fill stages up to it, and keep the smallest that works.",
    ))
