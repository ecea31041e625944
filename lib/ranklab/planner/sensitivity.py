"""changes: what half and twice of the batch, the sequence, a link or the price do to the best plan.
"""

from dataclasses import replace
from typing import NamedTuple

from ranklab.planner.search import TRIFLE, Found, NoLayout, distinct
from ranklab.planner.step import step_time
from ranklab.planner.wish import Wish


class Change(NamedTuple):
    """One thing is half or twice as much.

    wish, best  what was then asked for; its best layout, None: nothing fits
    same        the layout stays, but for the number of micro-batches
    """

    what: str
    factor: float
    wish: Wish
    best: Found | None
    same: bool


def changes(wish, found, best, watch=iter):
    """[Change], half and twice of each: the batch, the sequence (as many tokens in a batch), the
    link in a node, the network, the price.

    found  of wish.search(); best: of these, the one that is taken
    """
    rows = []
    for what, factor in ((what, factor) for what in (
            "batch", "sequence", "link", "network", "price") for factor in (0.5, 2)):
        each = changed(wish, what, factor)
        if what == "price" and wish.price:
            rows.append(Change(what, factor, each, best, True))
        elif each and what != "price":
            again = retimed(each, found, best, factor) if what in ("link", "network") else (
                searched(each, best, watch))
            rows.append(Change(what, factor, each, *again))
    return rows


def changed(wish, what, factor):
    """The Wish; None where a half is no whole number."""
    if what in ("link", "network"):
        speed = factor * getattr(wish.machine, what)
        return replace(wish, machine=replace(wish.machine, **{what: speed}))
    if what == "price":
        return replace(wish, price=wish.price and factor * wish.price)
    sizes = {"batch": wish.batch * factor}
    if what == "sequence":
        sizes = {"sequence": wish.sequence * factor, "batch": wish.batch / factor}
    whole = all(size == int(size) for size in sizes.values())
    return replace(wish, **{name: int(size) for name, size in sizes.items()}) if whole else None


def searched(wish, best, watch=iter):
    """(the best layout, whether it is the same one); None where nothing fits."""
    try:
        return chosen(wish.search(watch), best)
    except NoLayout:
        return None, False


def retimed(wish, found, best, factor):
    """The same where links are `factor` times as fast: what fits stays. A step is at most `factor`
    times faster, so that most need not be timed again.
    """
    def anew(each):
        return each._replace(step=step_time(wish.model, each.plan, wish.machine))

    most = anew(best).step.total * max(1, factor)
    new = [anew(each) for each in found if each.step.total <= most]
    return chosen(sorted(new, key=lambda each: each.step.total), best)


def chosen(found, best):
    """The layout of before, where it takes at most a TRIFLE longer than the fastest; else that."""
    most = (1 + TRIFLE) * found[0].step.total
    same = [each for each in found if each.step.total <= most
            and sizeless(each.plan) == sizeless(best.plan)]
    return (same[0], True) if same else (distinct(found, 1)[0], False)


def sizeless(plan):
    """The plan without the sizes of its batch."""
    return replace(plan, micro_batches=1, sequence=1)
