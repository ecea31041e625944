"""What the stages have shown, as text; and which of them suits a machine."""

import json
import math
from pathlib import Path

from ranklab.baseline import activation_bytes
from ranklab.engine.report import count_ranks
from ranklab.meter.text import lined_up
from ranklab.models.gpt import count_parameters
from ranklab.projects.zero.config import MODELS
from ranklab.projects.zero.measure import Costs
from ranklab.zero import deepspeed_config, fastest_way

BUCKET = 50_000_000  # numbers


def report(found):
    """What `run` found, as text."""
    config, shape, ranks = found["config"], found["shape"], found["ranks"]
    columns = [name for name in Costs._fields if config.offload or name != "offloaded"]
    table = []
    for row in found["rows"]:
        loss = f"stopped at {row.steps}" if row.held_out is None else f"{row.held_out:.3f}"
        speed = row.tokens_per_second
        table += [(f"stage {row.stage}", *cells(row.costs, columns),
                   "-" if math.isnan(speed) else f"{speed:,.0f}", loss),
                  ("  the formula", *cells(row.said, columns), "", "")]
    lines = [
        f"model     {count_parameters(shape):,} parameters: {shape.n_layer} layers, "
        f"{shape.n_head} heads, width {shape.n_embd}, {shape.n_ctx} tokens, V={shape.vocab_size}",
        f"training  {config.engine}, {config.steps} steps of {config.batch} x {shape.n_ctx} "
        f"tokens of {found['text']}, {config.precision}, {count_ranks(ranks)}",
        f"{found['authors']}\n",
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
    """As text; None was not counted."""
    found = [getattr(costs, name, None) for name in columns]
    return ["-" if nbytes is None else f"{nbytes:,.0f}" for nbytes in found]


def write_config(command, config):
    """A file has DeepSpeed's config for the machine in `command`, on which this model trains in the
    fastest way that fits; a text says so.

    error  ValueError when nothing fits
    """
    shape, gpus, nbytes = MODELS[command.size], command.gpus, command.gpu_gb * 1e9
    n, other = count_parameters(shape), beside_states(config, shape)
    together = config.micro_batch * gpus
    batch = together * max(1, config.batch // together)
    way = fastest_way(n, gpus, nbytes, other)
    written = deepspeed_config(n, gpus, nbytes, batch, config.micro_batch, other, lr=config.lr,
                               bucket=BUCKET)
    Path(command.write_config).write_text(json.dumps(written, indent=2) + "\n")
    states = way.states(n, gpus).total / 1e9
    return (f"{gpus} GPUs of {command.gpu_gb:g} GB: {way}: {states:.3g} GB of states on each, "
            f"beside {other / 1e9:.3g} GB of activations and buckets, in bf16 with Adam.\n"
            f"{command.write_config} says so to DeepSpeed.")


def beside_states(config, shape):
    """Bytes of a GPU's memory that are no states, in bf16: what is kept for backward, three copies
    of the logits in float32 (themselves, their softmax, their gradients), two buckets.
    """
    logits = config.micro_batch * shape.n_ctx * shape.vocab_size
    kept = activation_bytes(shape, config.micro_batch, shape.n_ctx, 2, config.recompute)
    return kept + 3 * 4 * logits + 2 * 2 * min(BUCKET, count_parameters(shape))
