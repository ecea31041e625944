"""Lab 06's model of a step of stage 3: by hand, its memory, its bound; and the library's choice."""

import itertools
import random

import pytest

from ranklab.checks.zero.units_to_keep import _step
from ranklab.zero import units_to_keep
from ranklab.zero.keeping import Step, last_that_fit, published_steps, scores


def steps(n=60):
    dice = random.Random(1)
    return [_step(dice, dice.randint(1, 6)) for _ in range(n)]


def sets_of(step):
    units = range(len(step.nbytes))
    return [kept for n in range(len(units) + 1) for kept in itertools.combinations(units, n)]


def test_a_step_by_hand():
    # gathers end at 1 and 2; forwards at 2 and 3, backwards at 5 and 7, the last reduction at 8
    assert Step((1, 1), (1, 1), 2, 0, 1).seconds() == 8 == Step((1, 1), (1, 1), 2, 0, 1).bound()
    # a limit of one unit: nothing travels while something computes, but for the reductions
    one = Step((1, 1), (1, 1), 1, 0, 1)
    assert one.seconds() == 4 + 6 + 2  # four gathers, two reductions: the first delays a gather
    assert one.seconds([1]) == one.seconds() - 1
    assert one.seconds([0]) == float("inf")


def test_never_more_than_the_limit_is_whole():
    for step in steps(20):
        n = len(step.nbytes)
        for kept in sets_of(step):
            if step.seconds(kept) == float("inf"):
                continue
            for place, last in enumerate(step.gathered_ahead(frozenset(kept))):
                assert last >= place
                gathered = [min(p, 2 * n - 1 - p) for p in range(place, last + 1)
                            if p < n or 2 * n - 1 - p not in kept]
                stay = [unit for unit in kept if unit < place <= 2 * n - 1 - unit]
                assert sum(step.nbytes[unit] for unit in gathered + stay) <= step.limit + 1e-9


def test_the_bound_holds_and_the_librarys_choice_is_near_the_best():
    ratios = []
    for step in steps():
        least = min(map(step.seconds, sets_of(step)))
        assert step.bound() <= least + 1e-9
        ratios.append(step.seconds(units_to_keep(step)) / least)
    assert max(ratios) < 1.05 and sum(ratios) / len(ratios) < 1.002


def test_published_steps_are_scored():
    for step in published_steps().values():
        found = scores(step)
        assert found["bound"] < found["library"] < found["the last that fit"] < found["none"]
        assert step.seconds(last_that_fit(step)) == found["the last that fit"]


