"""Lab 06's model of a step of stage 3: by hand, its memory, its bound."""

import itertools
import random

from ranklab.checks.zero.units_to_keep import random_step
from ranklab.zero.keeping import Step


def test_a_step_by_hand():
    # gathers end at 1 and 2; forwards at 2 and 3, backwards at 5 and 7, the last reduction at 8
    assert Step((1, 1), (1, 1), 2, 0, 1).seconds() == 8 == Step((1, 1), (1, 1), 2, 0, 1).bound()
    # a limit of one unit: nothing travels while something computes, but for the reductions
    one = Step((1, 1), (1, 1), 1, 0, 1)
    assert one.seconds() == 4 + 6 + 2  # four gathers, two reductions: the first delays a gather
    assert one.seconds([1]) == one.seconds() - 1
    assert one.seconds([0]) == float("inf")


def test_never_more_than_the_limit_is_whole_and_no_set_beats_the_bound():
    dice = random.Random(1)
    for step in (random_step(dice, dice.randint(1, 6)) for _ in range(20)):
        n = len(step.nbytes)
        sets = [kept for size in range(n + 1) for kept in itertools.combinations(range(n), size)]
        for kept in sets:
            assert step.bound() <= step.seconds(kept) + 1e-9
            if step.seconds(kept) == float("inf"):
                continue
            for place, last in enumerate(step.horizon(frozenset(kept))):
                assert last >= place
                gathered = [min(p, 2 * n - 1 - p) for p in range(place, last + 1)
                            if p < n or 2 * n - 1 - p not in kept]
                stay = [unit for unit in kept if unit < place <= 2 * n - 1 - unit]
                assert sum(step.nbytes[unit] for unit in gathered + stay) <= step.limit + 1e-9
