"""changes: how halving or doubling the GPUs, batch, sequence or link changes the best plan."""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ranklab.planner.request import Request
from ranklab.planner.search import Found, NoLayout, rank
from ranklab.planner.step import step_time

QUANTITIES = ("GPUs", "batch", "sequence", "link", "network")
TRIFLE = 0.005  # of a step's time: too little to change the layout


class Change(NamedTuple):
    """One quantity multiplied by `factor`.

    request, best  the new Request, and its best layout; None if nothing fits
    same           whether the layout stays the same, apart from the number of micro-batches
    """

    quantity: str
    factor: float
    request: Request
    best: Found | None
    same: bool


def changes(request, layouts, best, watch=iter):
    """Return [Change] for half and twice each of: the GPUs, the batch, the sequence (with the same
    tokens in a batch), the link in a node, the network.

    layouts  from request.search(); best: the one of them in use
    """
    rows = []
    for quantity, factor in product(QUANTITIES, (0.5, 2)):
        variant = change_request(request, quantity, factor)
        if not variant:
            continue
        if quantity in ("link", "network"):  # the same fit; a step is at most twice as fast or slow
            near = [layout for layout in layouts
                    if layout.step.total <= 2 * layouts[0].step.total]
            new = sorted((layout._replace(step=step_time(request.model, layout.plan,
                                                         variant.machine))
                          for layout in near), key=lambda layout: layout.step.total)
        else:
            try:
                new = variant.search(watch)
            except NoLayout:
                new = []
        rows.append(Change(quantity, factor, variant, *best_of(new, best)))
    return rows


def change_request(request, quantity, factor):
    """Return the changed Request; None if a half is not a whole number."""
    if quantity in ("link", "network"):
        speed = factor * getattr(request.machine, quantity)
        return replace(request, machine=replace(request.machine, **{quantity: speed}))
    sizes = {quantity.lower(): factor * getattr(request, quantity.lower())}
    if quantity == "sequence":
        sizes["batch"] = request.batch / factor
    if any(size != int(size) for size in sizes.values()):
        return None
    return replace(request, **{name: int(size) for name, size in sizes.items()})


def best_of(layouts, old):
    """Return (the old layout, True) if it is at most a TRIFLE slower than the fastest of these, or
    (the fastest, False).
    """
    same = [layout for layout in layouts
            if layout.step.total <= (1 + TRIFLE) * layouts[0].step.total
            and without_sizes(layout.plan) == without_sizes(old.plan)]
    return (same[0], True) if same else (min(layouts, key=rank, default=None), False)


def without_sizes(plan):
    """Return the plan without the sizes of its batch."""
    return replace(plan, micro_batches=1, sequence=1)
