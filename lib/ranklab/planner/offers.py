"""offers: numbers of GPUs that can run a Request; affordable: the best within budget and deadline.
"""

from dataclasses import replace
from typing import NamedTuple

from ranklab.planner.cost import Bill
from ranklab.planner.request import plain
from ranklab.planner.search import Found


class Offer(NamedTuple):
    """A number of GPUs with their best layout, and the bill for all tokens."""

    layout: Found
    bill: Bill

    def miss(self, budget, deadline):
        """Return the sum of the fractions by which dollars and days exceed their limits, if any."""
        return sum(max(0, value / most - 1) for value, most in (
            (self.bill.dollars, budget), (self.bill.days, deadline)) if most)


def offers(request, watch=iter):
    """Return [Offer] for 1, 2, 3, 4, 6, 8, 12 ... nodes up to request.gpus, and for request.gpus.

    Raises NoLayout if none has a layout.
    """
    node = min(request.machine.node, request.gpus)
    counts = {factor * node * 2**power for factor in (1, 3) for power in range(20)}
    counts = {gpus for gpus in counts if gpus < request.gpus} | {request.gpus}
    rows = []
    for smaller in (replace(request, gpus=gpus) for gpus in sorted(counts)):
        if best := smaller.best(watch):
            rows.append(Offer(best, smaller.bill(best)))
    return rows or request.search()  # raises, and says why there is none


def ranked(rows, budget=None, deadline=None):
    """Return the Offers, sorted. First come those within dollars and days: with a deadline the
    cheapest first, with only a budget the fastest. Then come the others, by how far they miss.
    """
    def key(offer):
        spent = offer.bill.gpu_hours, offer.bill.days
        return offer.miss(budget, deadline), spent if deadline else spent[::-1]

    return sorted(rows, key=key)


def affordable(rows, budget=None, deadline=None):
    """Return the best Offer.

    Raises ValueError that names the nearest one if none is within dollars and days.
    """
    best = ranked(rows, budget, deadline)[0]
    if not best.miss(budget, deadline):
        return best
    counts, plan = ", ".join(f"{offer.layout.plan.gpus:,}" for offer in rows), best.layout.plan
    raise ValueError(
        f"{best.bill.tokens:.3g} tokens are not done within {limit(budget, deadline)} on any of "
        f"{counts} GPUs: the nearest is {plan.gpus:,} ({plan.words()}), with "
        f"{limit(best.bill.dollars, best.bill.days)}")


def limit(dollars, days):
    """Return "$1,000,000 and 30 days", or the one that is not None."""
    return " and ".join(words for value, words in (
        (dollars, f"${dollars or 0:,.0f}"), (days, f"{plain(days or 0)} days")) if value)
