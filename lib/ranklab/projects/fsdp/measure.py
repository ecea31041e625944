"""What one step holds and sends, counted; and what the formulas say."""

from typing import NamedTuple

from ranklab.meter import Memory, memory_of
from ranklab.projects.costs import counted_step


class Costs(NamedTuple):
    """Of one rank."""

    held: Memory  # at the begin of the optimizer's step
    peak: int | None  # bytes, with activations; on a CPU of rank 0 alone
    sent: int  # bytes


def measure(trainer):
    """The trainer has done one more step; returns its Costs on this rank."""
    [held], peak, sent = counted_step(trainer, trainer.optimizer, lambda: memory_of(
        trainer.model, trainer.optimizer))
    return Costs(held, peak, sent)


def predicted(numbers, settings, ranks):
    """((bytes of parameters, gradients, optimizer), bytes sent in a step), of each rank.

    Rows, gradients and Adam's two moments are in float32. For each micro-batch parameters are
    gathered, those of blocks twice, and gradients reduced; in hybrid sharding over copies, too.
    numbers  of parameters: in the model, and in each of its blocks
    """
    model, *blocks = numbers
    S = settings.shard_ranks or ranks
    copies, pieces = ranks // S, -(-settings.batch // (ranks * settings.micro_batch))
    gathered = (2 if settings.precision == "bf16" else 4) * (model + sum(blocks))
    inside = (S - 1) / S * (gathered + 4 * model)
    between = 2 * (copies - 1) / copies * 4 * model / S
    return [size * model / S for size in (4, 4, 8)], pieces * (inside + between)
