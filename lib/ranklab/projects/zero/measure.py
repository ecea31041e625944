"""What one step holds and sends, counted; and what the formulas say."""

from typing import NamedTuple

from ranklab.meter import memory_of
from ranklab.meter.storage import tensors_in
from ranklab.models.gpt import block_parameters, count_parameters
from ranklab.projects.training import counted_step
from ranklab.zero.memory import zero_traffic


class Costs(NamedTuple):
    """Bytes of one rank: on its device when the optimizer's step begins, offloaded, and sent."""

    parameters: int
    gradients: int  # also in buckets
    optimizer_state: int  # also masters
    offloaded: int  # in the CPU's memory or in files: all that the optimizer has, gradients too
    peak: int | None  # with activations; no formula says it
    sent: float


def measure(trainer, config):
    """The trainer has done one more step; returns its Costs on this rank. (The peak: on rank 0.)"""
    if config.engine == "deepspeed":
        optimizer = trainer.parallel.engine.basic_optimizer
        kept = {"shards": trainer.parallel.shards()}
    else:
        optimizer, buckets = trainer.optimizer, trainer.parallel.replica.buckets
        kept = {"shards": [bucket.shard for bucket in buckets if hasattr(bucket, "shard")],
                "communication": [bucket.flat for bucket in buckets]}

    def look():
        held = memory_of(trainer.model, None if config.offload else optimizer, **kept)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        # on a CPU stage 1's gradients there are views of those on the device
        away = sum(tensor.nbytes for tensor in tensors_in(
            [stepped, [p.grad for p in stepped], list(optimizer.state.values())]))
        return Costs(held.parameters, held.gradients + held.communication_buffers,
                     held.optimizer_state, away if config.offload else 0, 0, 0)

    def on_device(memory):
        return memory.total - (memory.optimizer_state if config.offload else 0)

    seen, peak, sent = counted_step(trainer, optimizer, look, on_device, **kept)
    return max(seen, key=sum)._replace(peak=peak, sent=sent)


def predicted(shape, config, stage, ranks, zero_memory):
    """The Costs by the formulas; `zero_memory` may be a learner's.

    A step of several micro batches sends the gradients once in stages 0 and 1, and for each of
    them from stage 2 on, where no rank keeps them whole. Ours send the model's buffers, too, as
    torch's DDP does; and stage 3 has what is outside of the blocks whole for all of a step.
    """
    size = (2, 2, 12) if config.has_master_weights(stage) else (4, 4, 8)  # with gradients and Adam
    n, is_ours = count_parameters(shape), config.engine == "ours"
    resident = is_ours * (n - shape.n_layer * block_parameters(shape))  # outside of the blocks
    buffers = is_ours * 2 * shape.n_layer * shape.n_ctx * shape.head_size * size[0]  # angles
    sent = zero_traffic(stage, size[0] * n, ranks, size[0] * resident)
    gradients = zero_traffic(0, size[0] * n, ranks) / 2  # a reduce-scatter is half an all-reduce
    pieces = -(-config.batch // (ranks * config.micro_batch))
    again = {2: gradients + buffers, 3: sent + buffers}.get(stage, 0)
    held = Costs(*zero_memory(stage, n, ranks, *size), 0, None,
                 sent + buffers + (pieces - 1) * again)
    if config.offload:
        # Masters, moments and their gradients are in float32; stage 1 has all gradients here, too.
        held = held._replace(gradients=held.gradients if stage == 1 else 0, optimizer_state=0,
                             offloaded=zero_memory(3, n, ranks, 0, 4, 12).total)
    return held
