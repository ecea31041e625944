"""What one step holds and sends, counted; and what the formulas say."""

from typing import NamedTuple

import torch

from ranklab.engine import device
from ranklab.meter import Memory, MemoryCurve, Traffic, memory_of
from ranklab.models.gpt import block_parameters, count_parameters
from ranklab.projects.zero.engines import buckets_of, has_master_weights, shards_of, stepping
from ranklab.zero.memory import zero_traffic

BYTES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}  # of parameter, gradient, optimizer state


class Costs(NamedTuple):
    """What one rank holds at the begin of the optimizer's step, and in all of a step."""

    held: Memory
    peak: int  # bytes, with activations
    sent: int  # bytes

    @property
    def states(self):
        """(parameters, gradients, optimizer state); gradients also in buckets."""
        held = self.held
        return (held.parameters, held.gradients + held.communication_buffers, held.optimizer_state)


def measure(trainer):
    """The trainer has done one more step; returns its Costs on this rank."""
    held, optimizer = [], stepping(trainer)
    how = {"shards": shards_of(trainer), "communication": buckets_of(trainer)}
    hook = optimizer.register_step_pre_hook(
        lambda *_: held.append(memory_of(trainer.model, optimizer, **how)))
    on_gpu = device().type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    curve = None if on_gpu else MemoryCurve(trainer.model, optimizer, **how)
    with Traffic() as traffic:
        if on_gpu:
            trainer.step()
        else:
            with curve:
                trainer.step()
    hook.remove()
    peak = torch.cuda.max_memory_allocated() if on_gpu else curve.peak_bytes
    return Costs(max(held, key=lambda one: one.total), peak, traffic.sent_bytes)


def predicted(shape, settings, stage, ranks, zero_memory):
    """(States, bytes sent in a step) by the formulas; `zero_memory` may be a learner's.

    A step of several micro batches sends the gradients once in stages 0 and 1, and for each of
    them from stage 2 on, where no rank keeps them whole. Ours send the model's buffers, too, as
    torch's DDP does; and stage 3 has what is outside of the blocks whole for all of a step.
    """
    has_masters = has_master_weights(settings, stage)
    size = BYTES[settings.precision if has_masters else "fp32"]
    n = count_parameters(shape)
    whole = n - shape.n_layer * block_parameters(shape)  # what is outside of the blocks
    resident = whole if settings.engine == "ours" else 0
    sent = zero_traffic(stage, size[0] * n, ranks, size[0] * resident)
    angles = 2 * shape.n_layer * shape.n_ctx * shape.head_size * size[0]
    buffers = angles if settings.engine == "ours" else 0
    pieces = -(-settings.batch // (ranks * settings.micro_batch))
    gradients = zero_traffic(0, size[0] * n, ranks) / 2  # a reduce-scatter is half an all-reduce
    again = {2: gradients + buffers, 3: sent + buffers}.get(stage, 0)
    return zero_memory(stage, n, ranks, *size), sent + buffers + (pieces - 1) * again
