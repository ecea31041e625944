"""The checks of the four detectors that the learner writes: what they must and must not find."""

import copy
import random

from ranklab.checks.exercise import Exercise
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.clinic.detectors import circle_of_waits, first_difference, own_limit, steps_behind


# What is said.
ALIKE = ("A list that ends early is not a difference, but the ranks that continue must still be "
         "compared.")
FIRST = "Return the first call that differs."
TWO = "Two ranks wait for each other: the smallest comes first."
SEVERAL = "A rank may wait for several others, and the first one you try may lead to a dead end."
LEADS = "Rank 0 only leads into the circle: it is not part of it."
NOBODY = "Rank 2 waits for no rank: that is not a circle."
ONE_ALONE = "One rank alone has the largest norm."
ONE_OF_5 = "Two ranks have the largest norm, but in only one step of 5."
NO_TENTH = "2 of 29 steps are less than a tenth."
NOT_FINITE = "Norms that are not finite say nothing: ignore them."
ROUNDED = "Norms are rounded: treat them as equal within `tolerance`."
SMALLEST = ("used[step] is held[step - behind]: return the smallest `behind` that fits nearly all "
            "steps.")
TENTH = "Up to a tenth of the steps may differ, such as evaluations or a first step."
TOLERANCE = "`tolerance` is small: these numbers differ by more."


def agree(fn, cases, args_of=lambda data: (data,)):
    """Check that fn gives `right` for each (data, right, hint), and leaves `data` as it was."""
    for data, right, hint in cases:
        original = copy.deepcopy(data)
        value = fn(*args_of(data))
        value = value.item() if hasattr(value, "item") else value  # of numpy or torch
        expect(value == right and type(value) is type(right),
               f"for {shortened(original)} it returns {value!r}, not {right!r}", hint)
        expect(data == original, "it changes what it is given", "Work on copies.")


def shortened(value):
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:150]} ..."


def check_first_difference(first_difference):
    a, b, c = "all_reduce", "broadcast", ("reduce", 3)
    agree(first_difference, (
        ({0: [a, b], 1: [a, b]}, None, "If all calls are alike, return None."),
        ({}, None, "No ranks, no difference."),
        ({0: [], 1: []}, None, "No calls, no difference.")))
    yield "None where all calls are the same"
    agree(first_difference, (
        ({0: [a, b], 1: [b, a]}, 0, FIRST), ({0: [a, b, a], 1: [a, b, b]}, 2, FIRST),
        ({2: [a, b, a], 5: [a, b, a], 7: [a, c, a]}, 1,
         "Check all ranks, including the last one; their numbers need not be 0, 1, 2."),
        ({0: [a, a, b], 1: [a, c, c]}, 1, FIRST),
        ({0: [a, b, c], 1: [a, b, b], 2: [c, b, c]}, 0,
         "The first difference between any two ranks counts.")))
    yield "the first call that is not the same, whichever rank differs"
    agree(first_difference, (
        ({0: [a, b, c], 1: [a, b]}, None, ALIKE), ({0: [a], 1: [a, b], 2: [a, c]}, 1, ALIKE),
        ({0: [a, b], 1: [a], 2: [a, c]}, 1, ALIKE),
        ({0: [], 1: [a, a], 2: [a, b]}, 1, ALIKE)))
    yield "lists of different lengths"


def check_circle_of_waits(circle_of_waits):
    agree(circle_of_waits, (
        ({}, [], "Nobody waits."), ({0: {1}, 1: {2}}, [], NOBODY),
        ({3: {1}, 1: {0}, 2: {1}, 0: set()}, [], "Paths that merely meet are not a circle.")))
    yield "[] where there is none"
    agree(circle_of_waits, (
        ({0: {1}, 1: {0}}, [0, 1], TWO),
        ({4: {2}, 2: {7}, 7: {4}}, [2, 7, 4], "A circle can have any length. List the smallest "
                                              "rank first; each rank waits for the next one.")))
    yield "the ranks in the order of their waits, the smallest first"
    agree(circle_of_waits, (
        ({0: {3}, 3: {5}, 5: {3}}, [3, 5], LEADS),
        ({0: {5}, 5: {3}, 3: {5}}, [3, 5], "The smallest rank of the circle comes first."),
        ({0: {1, 2}, 1: {4}, 2: {5}, 5: {0}}, [0, 2, 5], SEVERAL),
        ({1: {2, 3}, 2: {3}, 3: {4}, 4: {2}}, [2, 3, 4],
         "At a dead end, backtrack and try the other choices.")))
    yield "also where other ranks lead into it, and where there are dead ends"
    draw = random.Random(3)
    ring = draw.sample(range(64), 12)
    ring = ring[ring.index(min(ring)):] + ring[:ring.index(min(ring))]
    waits = {rank: {after} for rank, after in zip(ring, ring[1:] + ring[:1])}
    waits |= {rank: {draw.choice(ring)} for rank in set(range(64)) - set(ring)}
    agree(circle_of_waits, ((waits, ring, "52 ranks wait for ranks in a circle of 12."),))
    yield "a circle of 12 among 64 ranks"


def check_own_limit(own_limit):
    one = ("If all ranks are clipped by one global norm, the squares of their norms add up to its "
           "square.")
    whole = [[0.6, 0.8, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5], [0.1, 0.7, 0.5, 0.5]]
    free = [[3.1, 2.9, 3.3, 2.7], [2.8, 3.0, 2.6, 2.9], [2.5, 2.6, 2.2, 2.4]]
    agree(own_limit, (([], None, "No steps, no limit."), (whole, None, one),
                      (free, None, ("If the norms all differ, no rank was clipped by its own "
                                    "norm."))))
    yield "None where all are clipped together, or not at all"
    own = [[1.0, 1.0, 0.4, 1.0], [0.9, 1.0, 1.0, 1.0], [0.3, 0.9999, 1.0, 0.2]]
    agree(own_limit, (
        (own, 1.0, ("In one step, two or more ranks have the same norm, and no rank has a larger "
                    "one.")),
        ([[0.25, 0.25]] * 3 + [[0.1, 0.2]] * 5, 0.25, "Later steps are within the limit."),
        ([[1.0, 0.9995], [0.9994, 0.9996]], 1.0, ROUNDED),
        ([[1000.0, 999.5], [999.6, 1000.0]], 1000.0, "`tolerance` is a fraction of the limit."),
        ([[float("nan"), 0.5, 0.5], [0.5, 0.5, float("inf")]], 0.5,
         NOT_FINITE)))
    yield "the limit, also where some steps are below it, or a norm is not finite"
    small = [[0.9, 0.7, 0.3, 0.2]]
    agree(own_limit, ((free[:1] * 20, None, ONE_ALONE),
                      ([[1.0, 1.0, 0.4, 0.2]] + small * 4, None, ONE_OF_5),
                      ([[1.0, 1.0, 1.0, 1.0]], None, "There is only one step."),
                      ([[1.0, 1.0, 0.4, 0.2], [0.3, 1.0, 1.0, 0.1]] + small * 8, 1.0,
                       "Two ranks have the largest norm in 2 of 10 steps."),
                      ([[2.0, 2.0]] + [[1.0, 0.5]] * 30, None, "Once in 31 steps is just chance."),
                      ([[0.5, 0.5]] * 2 + [[0.1, 0.2]] * 27, None, NO_TENTH),
                      ([[0.5, 0.5]] * 2 + [[0.1, 0.2]] * 18, 0.5, "2 of 20 steps are a tenth."),
                      ([[0.3, 0.3], [0.2, 0.2], [0.9, 0.1]], None,
                       "There is one limit for the whole run: its largest norm. Which ranks reach "
                       "it?")))
    yield "None for what happens only once"


def check_steps_behind(steps_behind):
    held = [round(10 + 0.37 * step + 0.01 * step**2, 2) for step in range(20)]

    def late(steps, spoilt=()):
        used = held[:1] * steps + held[:20 - steps]
        return [x + 1 if step in spoilt else x for step, x in enumerate(used)]

    pairs = [((late(behind), held), behind, SMALLEST) for behind in (0, 1, 3)]
    pairs += [(([-x for x in late(1)], [-x for x in held]), 1,
               "Numbers can be negative: use abs()."),
              (([5.0] * 10, [5.0] * 10), 0, SMALLEST)]
    agree(steps_behind, pairs, lambda data: data)
    yield "0 where nothing is stale, otherwise the number of steps"
    agree(steps_behind, (((late(1, spoilt=(7,)), held), 1, TENTH),
                         ((late(0, spoilt=(0, 9)), held), 0, TENTH),
                         ((late(0, spoilt=(3, 9, 12)), held), None,
                          "3 of 20 steps are more than a tenth.")),
          lambda data: data)
    yield "a tenth of the steps may differ"
    numbers = [x + 0.5 for x in held]
    agree(steps_behind, (((numbers, held), None, "Nothing fits: None."),
                         (([x * (1 + 1e-12) for x in held], held), 0,
                          "Treat numbers as equal up to `tolerance`."),
                         (([1e5 * x * (1 + 1e-12) for x in held], [1e5 * x for x in held]), 0,
                          "`tolerance` is a fraction of the number."),
                         (([x * (1 + 1e-6) for x in held], held), None, TOLERANCE)),
          lambda data: data)
    yield "None where nothing fits; equal up to the tolerance"


DETECTORS = (
    Exercise(first_difference, check_first_difference, mistakes=(
        Slip(ALIKE, ("range(max(map(len, calls.values()), default=0))",
                     "range(min(map(len, calls.values()), default=0))"),
             ("rank_calls[number] for rank_calls in calls.values() if len(rank_calls) > number",
              "(*rank_calls, *[None] * 9)[number] for rank_calls in calls.values()")),
        Slip(FIRST, ("if len(kinds) > 1:", "if len(kinds) > 1 and number:"),
             ("return number", "return number + 1")),
        Slip("Check all ranks, including the last one", (
            "in calls.values() if len(r", "in [*calls.values()][:2] if len(r")),
    ), hints=(
        "Which ranks have a call with this number at all?",
        "For each number, take the set of the calls of all ranks that have come that far. Two "
        "calls in the set are a difference.",
        "len({each[number] for each in calls.values() if len(each) > number}) > 1")),
    Exercise(circle_of_waits, check_circle_of_waits, mistakes=(
        Slip(SEVERAL, ("rank > path[0] and rank not in path and (circle := walk([*path, rank]))",
                       "rank not in path", "return circle\n", "return walk([*path, rank])\n")),
        Slip(LEADS, ("if rank == path[0]:", "if rank in path:")),
        Slip(TWO, ("sorted(waits) if", "sorted(waits, reverse=True) if",
                   "if rank > path[0] and rank", "if rank")),
        Slip("circle_of_waits(waits={0: {1}", ("waits.get(path[-1], ())", "waits[path[-1]]")),
    ), hints=(
        "Start at a rank and go to one that it waits for. When have you found a circle, and when "
        "are you at a dead end?",
        "Continue from the last rank of a path to each rank that it waits for: reaching the first "
        "rank of the path closes the circle. At a dead end, backtrack.",
        "Write a function walk(path) that returns a circle or []. Visit only ranks larger than "
        "path[0], so that the smallest comes first and each circle is found once.")),
    Exercise(own_limit, check_own_limit, mistakes=(
        Slip(ONE_ALONE, ("count >= 2", "count >= 1")),
        Slip(ONE_OF_5, ("max(2, len(norms) / 10)", "max(1, len(norms) / 10)"),
             ("max(2, len(norms) / 10)", "1")),
        Slip(NO_TENTH, ("len(norms) / 10", "0")),
        Slip(NOT_FINITE, ("if math.isfinite(norm)), default=0)", "), default=0)")),
        Slip(ROUNDED, ("norm >= limit * (1 - tolerance)", "norm == limit")),
    ), hints=(
        "What do several ranks have in common if each has clipped by itself?",
        "The largest finite norm of all is the limit. In how many steps do two or more ranks have "
        "it?",
        "Require at least two steps, and a tenth of all steps, in which two ranks are at limit * "
        "(1 - tolerance) or more.")),
    Exercise(steps_behind, check_steps_behind, mistakes=(
        Slip(SMALLEST, ("range(len(used) // 2)", "range(1, len(used) // 2)"),
             ("zip(used[behind:], held)", "zip(used, held[behind:])")),
        Slip(TENTH, ("if misses <= len(pairs) / 10:", "if not misses:")),
        Slip(TOLERANCE, ("rel_tol=tolerance", "rel_tol=1e-3")),
    ), hints=(
        "If the model uses weights from the step before, which element of `held` do you compare "
        "with used[5]?",
        "Try 0, 1, 2, ...: compare used[behind:] with held, and count what differs.",
        "math.isclose(a, b, rel_tol=tolerance) for zip(used[behind:], held); a tenth may differ.")),
)
