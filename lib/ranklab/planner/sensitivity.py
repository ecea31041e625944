"""changes: how half or twice the GPUs, batch, sequence or link change the best plan."""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ranklab.planner.search import Found, NoLayout, rank
from ranklab.planner.step import step_time
from ranklab.planner.wish import Wish

THINGS = ("GPUs", "batch", "sequence", "link", "network")
TRIFLE = 0.005  # of a step's time: too little for another layout


class Change(NamedTuple):
    """One thing becomes `factor` times as much.

    wish, best  the new Wish, and its best layout; None if nothing fits
    same        whether the layout stays the same, apart from the number of micro-batches
    """

    what: str
    factor: float
    wish: Wish
    best: Found | None
    same: bool


def changes(wish, found, best, watch=iter):
    """[Change], for half and twice of each: the GPUs, the batch, the sequence (with the same tokens
    in a batch), the link in a node, the network.

    found  from wish.search(); best: the layout of `found` that is taken
    """
    rows = []
    for what, factor in product(THINGS, (0.5, 2)):
        each, new = changed(wish, what, factor), found
        if not each:
            continue
        if what in ("link", "network"):  # the same fit; a step is at most twice as fast or slow
            near = [one for one in found if one.step.total <= 2 * found[0].step.total]
            new = sorted((one._replace(step=step_time(wish.model, one.plan, each.machine))
                          for one in near), key=lambda one: one.step.total)
        else:
            try:
                new = each.search(watch)
            except NoLayout:
                new = []
        rows.append(Change(what, factor, each, *chosen(new, best)))
    return rows


def changed(wish, what, factor):
    """The changed Wish; None if a half is not a whole number."""
    if what in ("link", "network"):
        speed = factor * getattr(wish.machine, what)
        return replace(wish, machine=replace(wish.machine, **{what: speed}))
    sizes = {what.lower(): factor * getattr(wish, what.lower())}
    if what == "sequence":
        sizes["batch"] = wish.batch / factor
    whole = all(size == int(size) for size in sizes.values())
    return replace(wish, **{name: int(size) for name, size in sizes.items()}) if whole else None


def chosen(found, best):
    """(the old layout, True) if it is at most a TRIFLE slower than the fastest, or (that, False)"""
    same = [each for each in found if each.step.total <= (1 + TRIFLE) * found[0].step.total
            and sizeless(each.plan) == sizeless(best.plan)]
    return (same[0], True) if same else (min(found, key=rank, default=None), False)


def sizeless(plan):
    """The plan without the sizes of its batch."""
    return replace(plan, micro_batches=1, sequence=1)
