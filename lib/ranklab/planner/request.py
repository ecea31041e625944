"""Request: a training run that someone asks for. nearest: the nearest possible one, if it is
impossible.
"""

from dataclasses import dataclass, replace
from itertools import chain

from ranklab.planner.cost import bill, cost_per_token
from ranklab.planner.failures import good_share_of
from ranklab.planner.machine import Machine
from ranklab.planner.model import Model
from ranklab.planner.search import RESERVE, NoLayout, quick_search, rank, search_layouts
from ranklab.planner.space import ADVISED, divisors

MOST_GPUS = 2**17


@dataclass(frozen=True)
class Request:
    """The arguments of search_layouts, the tokens of the whole run, and dollars per GPU-hour.

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
        """Return [Found], the fastest first: all layouts that fit.

        Raises NoLayout if there is none.
        """
        return search_layouts(self.model, self.machine, self.gpus, self.sequence, self.batch,
                              self.tools, watch, self.reserve)

    def quick_search(self):
        """Return [Found] of the best ways to divide the GPUs, the fastest first.

        Raises NoLayout if there is none.
        """
        return quick_search(self.model, self.machine, self.gpus, self.sequence, self.batch,
                            self.tools, self.reserve)

    def best(self, watch=iter):
        """Return the fastest Found; None if no layout fits."""
        try:
            return min(self.search(watch), key=rank)
        except NoLayout:
            return None

    def bill(self, layout):
        """Return the Bill for all tokens with this Found, including failures."""
        good = good_share_of(self.model, self.machine, self.gpus)
        return bill(layout.plan, layout.step, self.machine, self.tokens, self.price, good)

    def dollars(self, layout):
        """Return the dollars per token with this Found, without failures; None if no price is
        known.
        """
        mfu = layout.step.mfu(self.model, layout.plan, self.machine)
        return self.price and cost_per_token(self.model, self.sequence, self.machine, mfu,
                                             self.price)


def nearest(request):
    """Return a sentence about the nearest batch, or the smallest multiple of the GPUs, that has a
    layout.
    """
    batches = {max(1, round(request.batch / dp)) * dp for dp in divisors(request.gpus)}
    for batch in sorted(batches - {request.batch},
                        key=lambda batch: (abs(batch - request.batch), batch)):
        if layout := replace(request, batch=batch).best():
            return f"with a batch of {batch:,} there is {description(layout)}"
    for factor in chain(range(2, 9), (2**power for power in range(4, 17))):
        gpus = factor * request.gpus
        if gpus <= MOST_GPUS and (layout := replace(request, gpus=gpus).best()):
            return f"on {gpus:,} GPUs there is {description(layout)}"
    return f"there is none on up to {MOST_GPUS:,} GPUs, either"


def description(layout):
    """Describe a Found in a few words."""
    return (f"{layout.plan.words()} ({layout.plan.tool}): {layout.memory.total / 1e9:.1f} GB, "
            f"{plain(layout.step.total)} s a step")


def plain(number, digits=3):
    """Format a number as "5,230": `digits` significant digits, and no exponent."""
    return f"{float(f'{number:.{digits}g}'):,.12g}"
