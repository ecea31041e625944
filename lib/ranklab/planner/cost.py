"""The cost of a training run: dollars, days and energy, from its step time or its MFU."""

from dataclasses import dataclass

from ranklab.planner.published import table

DAY = 86400


def cost_per_token(model, sequence, machine, mfu, price):
    """Return the dollars that a training token costs at this MFU, on one of these GPUs or many.

    mfu    fraction of machine.peak_flops; model.flops_per_token has all FLOPs of a token
    price  dollars per GPU and hour
    Raises: ValueError if the MFU is 0 or less, or more than 1.
    Lab: 13
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu={mfu} must be above 0 and at most 1")
    tokens_per_second = mfu * machine.peak_flops / model.flops_per_token(sequence)
    return price / 3600 / tokens_per_second


@dataclass(frozen=True)
class Bill:
    """The cost of a whole training run.

    days      including the time lost to failures
    dollars   None if no price is known
    energy    joules of the GPUs only, at the power that vendors quote
    """

    tokens: float
    days: float
    gpu_hours: float
    dollars: float | None
    energy: float


def bill(plan, step, machine, tokens, price=None, good_share=1.0):
    """Return the Bill for this many tokens.

    price       dollars per GPU-hour; None: no dollars
    good_share  the share of the time that is not lost to failures
    """
    seconds = tokens / step.tokens_per_second(plan) / good_share
    hours = plan.gpus * seconds / 3600
    return Bill(tokens, seconds / DAY, hours, price and hours * price,
                plan.gpus * machine.watts * seconds)


def price_of(accelerator):
    """Return (dollars per hour, source) of the latest published price; (None, "") without one."""
    rows = [row for row in table("gpu_prices") if row["accelerator"] == accelerator]
    if not rows:
        return None, ""
    row = max(rows, key=lambda row: (row["provenance"] == "read" and row["trust"] != "low",
                                     "on-demand" in row["offer"], row["price_date"].split()[-1]))
    recalled = "" if row["provenance"] == "read" else ", recalled"
    return float(row["usd_per_gpu_hour"]), f"{row['offer']}, {row['price_date']}{recalled}"
