"""The bytes held and sent in a step, counted and by formulas; a report; and a machine's config."""

import json
import math
from pathlib import Path
from typing import NamedTuple

from ranklab.baseline import activation_bytes
from ranklab.engine.report import count_ranks
from ranklab.formulas.zero import zero_traffic
from ranklab.meter import memory_of
from ranklab.meter.storage import tensors_in
from ranklab.meter.text import lined_up
from ranklab.models.gpt import block_parameters, count_parameters
from ranklab.projects.training import counted_step, model_line
from ranklab.projects.zero.config import MODELS
from ranklab.zero import deepspeed_config, fastest_way

BUCKET = 50_000_000  # numbers


class Costs(NamedTuple):
    """Bytes of one rank: on its device when the optimizer's step begins, offloaded, and sent."""

    parameters: int
    gradients: int  # also in buckets
    optimizer_state: int  # also masters
    offloaded: int  # in the CPU's memory or in files: all that the optimizer has, gradients too
    peak: int | None  # with activations; no formula says it
    sent: float


def measure(trainer, config):
    """Do one more step; return its Costs on this rank. The peak is rank 0's."""
    if config.engine == "deepspeed":
        optimizer = trainer.parallel.engine.basic_optimizer
        buffers = {"shards": trainer.parallel.shards()}
    else:
        optimizer, buckets = trainer.optimizer, trainer.parallel.replica.buckets
        buffers = {"shards": [bucket.shard for bucket in buckets if hasattr(bucket, "shard")],
                   "communication": [bucket.flat for bucket in buckets]}

    def look():
        held = memory_of(trainer.model, None if config.offload else optimizer, **buffers)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        # on a CPU stage 1's gradients there are views of those on the device
        away = sum(tensor.nbytes for tensor in tensors_in(
            [stepped, [p.grad for p in stepped], list(optimizer.state.values())]))
        return Costs(held.parameters, held.gradients + held.communication_buffers,
                     held.optimizer_state, away if config.offload else 0, 0, 0)

    def on_device(memory):
        return memory.total - (memory.optimizer_state if config.offload else 0)

    steps, peak, sent = counted_step(trainer, optimizer, look, on_device, **buffers)
    return max(steps, key=sum)._replace(peak=peak, sent=sent)


def predicted(shape, config, stage, ranks, zero_memory):
    """Return the Costs by the formulas; `zero_memory` may be a learner's.

    A step of several micro-batches sends the gradients once in stages 0 and 1, and for each
    micro-batch from stage 2 on, where no rank keeps them whole. Our engine also sends the model's
    buffers, as torch's DDP does; and stage 3 keeps what is outside the blocks whole for the step.
    """
    size = (2, 2, 12) if config.has_master_weights(stage) else (4, 4, 8)  # with gradients and Adam
    n, is_ours = count_parameters(shape), config.engine == "ours"
    resident = is_ours * (n - shape.n_layer * block_parameters(shape))  # outside of the blocks
    buffers = is_ours * 2 * shape.n_layer * shape.n_ctx * shape.head_size * size[0]  # angles
    sent = zero_traffic(stage, size[0] * n, ranks, size[0] * resident)
    gradients = zero_traffic(0, size[0] * n, ranks) / 2  # a reduce-scatter is half an all-reduce
    pieces = -(-config.batch // (ranks * config.micro_batch))
    repeat = {2: gradients + buffers, 3: sent + buffers}.get(stage, 0)
    held = Costs(*zero_memory(stage, n, ranks, *size), 0, None,
                 sent + buffers + (pieces - 1) * repeat)
    if config.offload:
        # Masters, moments and their gradients are in float32; stage 1 also has all gradients.
        held = held._replace(gradients=held.gradients if stage == 1 else 0, optimizer_state=0,
                             offloaded=zero_memory(3, n, ranks, 0, 4, 12).total)
    return held


def report(results):
    """Format the results of `run` as text."""
    config, shape, ranks = results["config"], results["shape"], results["ranks"]
    columns = [name for name in Costs._fields if config.offload or name != "offloaded"]
    table = []
    for row in results["rows"]:
        loss = f"stopped at {row.steps}" if row.held_out is None else f"{row.held_out:.3f}"
        speed = row.tokens_per_second
        table += [(f"stage {row.stage}", *cells(row.costs, columns),
                   "-" if math.isnan(speed) else f"{speed:,.0f}", loss),
                  ("  the formula", *cells(row.predicted, columns), "", "")]
    lines = [
        model_line(shape),
        f"training  {config.engine}, {config.steps} steps of {config.batch} x {shape.n_ctx} "
        f"tokens of {results['text']}, {config.precision}, {count_ranks(ranks)}",
        f"{results['authors']}\n",
        lined_up(["rank 0, bytes", *(name.partition("_")[0] for name in columns), "tokens/s",
                  "held out"], table)]
    if config.offload:
        lines += [f"\nOffloaded to {config.offload}: what the optimizer steps, its state, its "
                  "gradients.", "The other columns show what the device holds."]
    elif config.precision == "bf16":
        lines.append("\nIn bf16 the optimizer takes its gradients in float32: 4 bytes for each "
                     "number that a rank steps, which the formula does not count.")
    return "\n".join(lines)


def cells(costs, columns):
    """Return the costs as texts; "-" means not counted."""
    numbers = [getattr(costs, name, None) for name in columns]
    return ["-" if nbytes is None else f"{nbytes:,.0f}" for nbytes in numbers]


def write_config(command, config):
    """Write DeepSpeed's config for the machine in `command`; return a text about it.

    It is the fastest config with which the model fits. Raises ValueError if none fits.
    """
    shape, gpus, nbytes = MODELS[command.size], command.gpus, command.gpu_gb * 1e9
    n, rest = count_parameters(shape), beside_states(config, shape)
    together = config.micro_batch * gpus
    batch = together * max(1, config.batch // together)
    way = fastest_way(n, gpus, nbytes, rest)
    written = deepspeed_config(n, gpus, nbytes, batch, config.micro_batch, rest, lr=config.lr,
                               bucket=BUCKET)
    Path(command.write_config).write_text(json.dumps(written, indent=2) + "\n")
    states = way.states(n, gpus).total / 1e9
    return (f"{gpus} GPUs of {command.gpu_gb:g} GB: {way}: {states:.3g} GB of states on each, "
            f"beside {rest / 1e9:.3g} GB of activations and buckets, in bf16 with Adam.\n"
            f"{command.write_config} says so to DeepSpeed.")


def beside_states(config, shape):
    """Return the bytes of a GPU's memory besides the model states, in bf16.

    These are the tensors saved for backward, three float32 tensors of the logits' size (logits,
    softmax, gradients; three copies), and two buckets.
    """
    logits = config.micro_batch * shape.n_ctx * shape.vocab_size
    activations = activation_bytes(shape, config.micro_batch, shape.n_ctx, 2, config.recompute)
    return activations + 3 * 4 * logits + 2 * 2 * min(BUCKET, count_parameters(shape))
