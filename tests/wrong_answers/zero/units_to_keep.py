"""Lab 06: what goes wrong when units are chosen that stay whole."""

import itertools

from mutants import mutant

from ranklab.zero import units_to_keep
from ranklab.zero.keeping import keep_in_order, last_that_fit

SEARCH = "    one = ["


def _rule(text, says, called, **names):
    return mutant(units_to_keep, SEARCH, f"    return {text}\n{SEARCH}", says=says, called=called,
                  **names)


WRONG = [
    _rule("last_that_fit(step)", "used again soonest", "the_last_that_fit",
          last_that_fit=last_that_fit),
    _rule("keep_in_order(step, units[::-1])", "leave room", "as_much_as_fits",
          keep_in_order=keep_in_order),
    _rule("keep_in_order(step, sorted(units, key=lambda unit: step.nbytes[unit]))",
          "The smallest units save the most messages", "the_smallest", keep_in_order=keep_in_order),
    _rule("list(min((kept for n in range(len(units) + 1) for kept in "
          "itertools.combinations(units, n)), key=step.seconds))", "you can't look at all",
          "all_sets", itertools=itertools),
    _rule("[*units]", "another unit has no room", "all_of_them"),
    _rule("[]", "each unit is gathered twice", "none"),
    mutant(units_to_keep, "return sorted(best)", "return best", says="Return a list of units"),
    mutant(units_to_keep, "return sorted(best)", "return [unit in best for unit in units]",
           says="Return a list of units", called="a_mask"),
    mutant(units_to_keep, "if step.seconds() ==", "if 0 ==", says="The largest unit must fit"),
    _rule("max((list(kept) for n in range(len(units) + 1) for kept in itertools.combinations(units,"
          " n) if step.seconds(kept) < 1e9), key=lambda kept: sum(map(step.send, kept)))",
          "Is there a unit to add", "saves_the_most_link_time", itertools=itertools),
]


def units_to_keep__in_one_pass(step):
    """Look until there is none"""
    kept = []
    for unit in reversed(range(len(step.nbytes))):
        if step.seconds([*kept, unit]) < step.seconds(kept):
            kept.append(unit)
    return kept
