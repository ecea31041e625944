"""What one step holds and sends, counted; and what the formulas say."""

from typing import NamedTuple

import torch

from ranklab.engine import device
from ranklab.meter import Memory, MemoryCurve, Traffic, memory_of


class Costs(NamedTuple):
    """Of one rank."""

    held: Memory  # at the begin of the optimizer's step
    peak: int  # bytes, with activations
    sent: int  # bytes


def measure(trainer):
    """The trainer has done one more step; returns its Costs on this rank."""
    held, on_gpu = [], device().type == "cuda"
    hook = trainer.optimizer.register_step_pre_hook(
        lambda *_: held.append(memory_of(trainer.model, trainer.optimizer)))
    with Traffic() as traffic:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            trainer.step()
            peak = torch.cuda.max_memory_allocated()
        else:
            with MemoryCurve(trainer.model, trainer.optimizer) as curve:
                trainer.step()
            peak = curve.peak_bytes
    hook.remove()
    return Costs(held[0], peak, traffic.sent_bytes)


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
