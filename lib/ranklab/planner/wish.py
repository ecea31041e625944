"""Wish: a training that someone wants. nearest: the nearest possible one, if it is impossible.
offers: numbers of GPUs that do it within a budget and by a deadline.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ranklab.planner.cost import Bill, bill, cost_per_token
from ranklab.planner.failures import good_share_of
from ranklab.planner.machine import Machine
from ranklab.planner.model import Model
from ranklab.planner.search import RESERVE, Found, NoLayout, rank, search_layouts
from ranklab.planner.space import ADVISED, divisors

MOST_GPUS = 2**17


@dataclass(frozen=True)
class Wish:
    """What search_layouts takes, the tokens of the whole training, and dollars of a GPU an hour.

    reserve  the share of a GPU's memory that stays free
    """

    model: Model
    machine: Machine
    gpus: int
    sequence: int
    batch: int
    tools: tuple = ADVISED
    tokens: float = 1e12
    price: float | None = None
    reserve: float = RESERVE

    def search(self, watch=iter):
        """[Found], the fastest first.

        error  NoLayout
        """
        return search_layouts(self.model, self.machine, self.gpus, self.sequence, self.batch,
                              self.tools, watch, self.reserve)

    def best(self, watch=iter):
        """The fastest Found; None if no layout fits."""
        try:
            return min(self.search(watch), key=rank)
        except NoLayout:
            return None

    def bill(self, found):
        """The Bill of all tokens with this layout, failures included."""
        good = good_share_of(self.model, self.machine, self.gpus)
        return bill(found.plan, found.step, self.machine, self.tokens, self.price, good)

    def dollars(self, found):
        """Dollars of a token, without failures; None if no price is known."""
        mfu = found.step.mfu(self.model, found.plan, self.machine)
        return self.price and cost_per_token(self.model, self.sequence, self.machine, mfu,
                                             self.price)


def nearest(wish):
    """A sentence about the nearest batch, or the smallest multiple of the GPUs, that has a layout.
    """
    whole = {max(1, round(wish.batch / dp)) * dp for dp in divisors(wish.gpus)} - {wish.batch}
    times = chain(range(2, 9), (2**power for power in range(4, 17)))
    for kind, others in (
            ("batch", [replace(wish, batch=batch) for batch in sorted(
                whole, key=lambda batch: (abs(batch - wish.batch), batch))]),
            ("gpus", [replace(wish, gpus=wish.gpus * k) for k in times
                      if wish.gpus * k <= MOST_GPUS])):
        for other in others:
            if found := other.best():
                what = (f"with a batch of {other.batch:,}" if kind == "batch"
                        else f"on {other.gpus:,} GPUs")
                return f"{what} there is {words(found)}"
    return f"there is none on up to {MOST_GPUS:,} GPUs, either"


def words(found):
    """A layout in a few words."""
    return (f"{found.plan.words()} ({found.plan.tool}): {found.memory.total / 1e9:.1f} GB, "
            f"{plain(found.step.total)} s a step")


# --- a budget, a deadline -------------------------------------------------------------------------

class Offer(NamedTuple):
    """A number of GPUs with their best layout, and the bill of all tokens."""

    found: Found
    bill: Bill

    def miss(self, budget, deadline):
        """By which part dollars and days exceed the limits that are given: the sum of both."""
        return sum(max(0, value / most - 1) for value, most in (
            (self.bill.dollars, budget), (self.bill.days, deadline)) if most)


def offers(wish, watch=iter):
    """[Offer]: for 1, 2, 3, 4, 6, 8, 12 ... nodes up to wish.gpus, and for wish.gpus.

    error  NoLayout
    """
    node, found = min(wish.machine.node, wish.gpus), []
    counts = {times * node * 2**power for times in (1, 3) for power in range(20)}
    for gpus in sorted({wish.gpus, *(each for each in counts if each < wish.gpus)}):
        each = replace(wish, gpus=gpus)
        if best := each.best(watch):
            found.append(Offer(best, each.bill(best)))
    return found or wish.search()  # raises, and says why there is none


def ranked(found, budget=None, deadline=None):
    """The Offers, sorted. First come those within dollars and days: with a deadline the cheapest
    first, with only a budget the fastest. Then come the others, by how much they miss.
    """
    def key(each):
        spent = each.bill.gpu_hours, each.bill.days
        return each.miss(budget, deadline), spent if deadline else spent[::-1]

    return sorted(found, key=key)


def affordable(found, budget=None, deadline=None):
    """The best Offer.

    error  ValueError with the nearest one if none is within dollars and days
    """
    near = ranked(found, budget, deadline)[0]
    if not near.miss(budget, deadline):
        return near
    counts = ", ".join(f"{each.found.plan.gpus:,}" for each in found)
    raise ValueError(
        f"{near.bill.tokens:.3g} tokens are not done within {limit(budget, deadline)} on any of "
        f"{counts} GPUs: the nearest is {near.found.plan.gpus:,} ({near.found.plan.words()}), with "
        f"{limit(near.bill.dollars, near.bill.days)}")


def limit(dollars, days):
    """"$1,000,000 and 30 days", or the one that is given."""
    return " and ".join(words for value, words in (
        (dollars, f"${dollars or 0:,.0f}"), (days, f"{plain(days or 0)} days")) if value)


def plain(number, digits=3):
    """"5,230": `digits` significant digits, and no exponent."""
    return f"{float(f'{number:.{digits}g}'):,.12g}"
