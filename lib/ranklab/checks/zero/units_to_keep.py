"""The check of units_to_keep: against the best of all sets, and the library's; it prints scores."""

import dataclasses
import itertools
import random

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.checks.trial import refuses
from ranklab.zero import keeping

SLOWER, CALLS, SEED = 1.02, 3000, 6  # than the best; of step.seconds() for one step
SEARCH = ("Does adding a unit, dropping one, or swapping one for another lower step.seconds()? "
          "Repeat until no change does.")
TOO_MANY = f"n units have 2^n sets, too many to try them all. {SEARCH}"
UNITS = "Return a list of units, numbers from 0 to"
NO_ROOM = ("step.seconds(kept) is infinite. All kept units are whole when forward turns to "
           "backward, and every other unit must still fit next to them.")
LARGEST = "If the largest unit does not fit, raise ValueError(...)."
EXACT = "A unit exactly as large as the limit still fits: raise only for a larger one."
RULES = {  # all choices are as the rule of the sentence has them
    "Nothing stays whole, so each unit is gathered twice. What would keeping one save?":
        lambda step: [],
    "You keep the units that are used again soonest, as long as they fit (DeepSpeed's "
    "stage3_max_reuse_distance). How much does each save per byte?": keeping.last_that_fit,
    "The kept units fill the memory, so the next unit can't be gathered while one computes: leave "
    "room.":
        lambda step: keeping.keep_in_order(step, range(len(step.nbytes))[::-1]),
    "The smallest units save the most messages per byte. But a message hidden behind computation "
    "costs no time, and when memory is full, no message is hidden.":
        lambda step: keeping.keep_in_order(
            step, sorted(range(len(step.nbytes)), key=lambda unit: step.nbytes[unit])),
}


def check_units_to_keep(units_to_keep):
    dice = random.Random(SEED)
    steps = [random_step(dice, n) for n in (7, 6, 5, 7, 4, 3, 7, 2, 1) * 5]
    for step in steps:
        sets = itertools.product((False, True), repeat=len(step.nbytes))
        least = min(step.seconds(itertools.compress(range(7), each)) for each in sets)
        _near(units_to_keep, step, least, f"{step}", steps)
    yield f"{len(steps)} steps of 1 to 7 units: at most 2% slower than the best of all sets"
    expect(refuses(units_to_keep, dataclasses.replace(steps[0], limit=1)),
           "a limit of 1 byte: no ValueError", LARGEST)
    exact = keeping.Step((2, 5, 3), (1, 2, 1), limit=5, alpha=0.3, beta=0.5)
    expect(not refuses(units_to_keep, exact), f"{exact}: a ValueError", EXACT)
    yield "a unit that is larger than the limit is a ValueError; now 20 units of published shapes:"
    for name, step in keeping.published_steps().items():
        scores = keeping.scores(step)
        scores = {"yours": _near(units_to_keep, step, scores["library"], name, steps)} | scores
        yield f"{name}: " + ", ".join(f"{label} {1e3 * seconds:.0f}"
                                      for label, seconds in scores.items()) + " ms"


def random_step(dice, n):
    nbytes = [dice.choice((5, 8, 11, 14) if i % 2 else (0.01, 1, 2, 3)) for i in range(n)]
    compute = [dice.choice((1, 2, 4)) for _ in range(n)]
    beta = round(dice.choice((0.5, 1, 2)) * sum(compute) / sum(nbytes), 3)
    return keeping.Step(tuple(nbytes), tuple(compute), dice.choice((1.5, 2, 3)) * max(nbytes),
                        dice.choice((0, 0.3, 1)), beta)


def _near(units_to_keep, step, least, case, steps):
    """Return the seconds with the kept units; raise a Mistake if far above `least`."""
    calls = itertools.count(1)

    class Counted(keeping.Step):
        def seconds(self, resident=()):
            expect(next(calls) <= CALLS, f"{case}: more than {CALLS} calls of step.seconds()",
                   TOO_MANY)
            return super().seconds(resident)

    units, n = units_to_keep(Counted(**vars(step))), len(step.nbytes)
    expect(isinstance(units, list)
           and sorted(units) == [unit for unit in range(n) if unit in units],
           f"{case}: it returned {str(units)[:60]}",
           f"{UNITS} {n - 1}, each at most once.")
    seconds = step.seconds(units)
    expect(seconds < float("inf"), f"{case}: {units} is kept, which leaves no room for another "
           "unit", NO_ROOM)
    if seconds > SLOWER * least:
        same = (hint for hint, rule in RULES.items() if all(
            set(units_to_keep(each)) == set(rule(each)) for each in steps[:9]))
        raise Mistake(f"{case}: {str(units)[:60]} takes {seconds:.4g} s; {least:.4g} are possible",
                      next(same, SEARCH))
    return seconds


def in_one_pass(step):
    units = []
    for unit in reversed(range(len(step.nbytes))):
        if step.seconds([*units, unit]) < step.seconds(units):
            units.append(unit)
    return units


BEST = "return sorted(best)"
KEEP = Exercise(
    keeping.units_to_keep, check_units_to_keep, mistakes=(
        *(Slip(says, rule) for says, rule in RULES.items()),
        Slip(SEARCH, in_one_pass),
        Slip(NO_ROOM, (BEST, "return [*units]")),
        Slip(UNITS, (BEST, "return best"), (BEST, "return [unit in best for unit in units]")),
        Slip(LARGEST, ("if step.seconds() ==", "if 0 ==")),
        Slip(EXACT, ("if step.seconds() == float(\"inf\")", "if max(step.nbytes) >= step.limit")),
        Slip(TOO_MANY, (BEST, "return list(min((kept for n in range(len(units) + 1) for kept in "
                        "itertools.combinations(units, n)), key=step.seconds))"),
             itertools=itertools),
    ), hints=(
        "What does step.seconds() return for no units, for all that fit, and for sets in between?",
        "n units have 2^n sets. Begin with one of them, and look at those that differ from it "
        "slightly. When is one better, and when do you stop?",
        "Add a unit, drop one, or swap one for another: make the best of these changes, again and "
        "again, until none of them lowers step.seconds(kept).",
    ))
