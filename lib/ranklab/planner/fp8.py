"""What FP8 changes in a plan that was found in bf16: by Amdahl's law, by the planner's parts, and
in published pairs of runs.

FP8 is for the matrix products of the blocks. Attention's core, the head, the embeddings and
messages of activations stay in bf16; master weights and the optimizer stay in float32.
"""

from dataclasses import replace
from typing import NamedTuple

from ranklab.planner.constants import CONSTANTS
from ranklab.planner.jobs import with_jobs
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.published import all_runs
from ranklab.planner.step import head_seconds, step_time
from ranklab.planner.traffic import volumes


def fp8_speedup(model, plan, machine):
    """Return how many times as fast a step in bf16 is with FP8, by Amdahl's law.

    products   of the layers run machine.rate("fp8") / machine.rate("bf16") times as fast; the
               head's stay in bf16. Step.products has both; head_seconds(...)["products"] is one
               micro-batch's on the last of plan.pp stages, and Step is about the average stage
    recompute  Step.recompute has the layers' forward products once more, for plan.rerun_share of
               the layers: forward is a third of the layers' products, and also runs in FP8
    bubble     shrinks by the same factor as the busy seconds, which are all parts of a Step but
               pipeline, bubble, data, optimizer and rest
    all other parts of step_time(model, plan, machine) keep their seconds
    Raises: ValueError if plan.precision is not "bf16", or if machine.fp8 is 0: it has no FP8.
    Lab: 13
    """
    if plan.precision != "bf16":
        raise ValueError(f"precision={plan.precision!r} must be bf16")
    if not machine.fp8:
        raise ValueError(f"{machine.name} has no FP8")
    step = step_time(model, plan, machine)
    head = plan.micro_batches / plan.pp * head_seconds(model, plan, machine)["products"]
    matmuls = (step.products - head) * (1 + plan.rerun_share / 3)
    saved = matmuls * (1 - machine.rate("bf16") / machine.rate("fp8"))
    busy = step.total - step.pipeline - step.bubble - step.data - step.optimizer - step.rest
    return step.total / (step.total - saved * (1 + step.bubble / busy))


def matmul_share(model, plan, machine):
    """Return the share of a step in bf16 that FP8 speeds up, as Amdahl's law counts it."""
    faster = machine.rate("fp8") / machine.rate("bf16")
    return (1 - 1 / fp8_speedup(model, plan, machine)) / (1 - 1 / faster)


class Fp8Change(NamedTuple):
    """The bf16 plan and the FP8 plan: bytes of a GPU, and seconds of a step.

    share: of the bf16 step, that FP8 speeds up.
    gathers: seconds of the FP8 plan whose weights are all-gathered in FP8 as well.
    gathered: (bf16, FP8) bytes of weights that a GPU gathers in a step.
    """

    share: float
    memory: tuple
    seconds: tuple
    gathers: float
    gathered: tuple


def fp8_change(model, plan, machine, constants=CONSTANTS):
    """Compute the Fp8Change of a plan in bf16, by the planner's own parts.

    Unlike Amdahl's law it knows that shorter products hide fewer messages, that small products are
    bound by memory, and the fitted rates of FP8, which include scales and casts. Transformer Engine
    keeps inputs of FP8 products in one byte (Megatron's plans).
    Not modelled: FP8 copies of weights; messages of activations in FP8.
    Raises: ValueError if the plan is not in bf16, or if the machine has no FP8.
    """
    share = matmul_share(model, plan, machine)
    products = replace(plan, precision="fp8")
    gathers = replace(products, gathered_bytes=1)
    memory, seconds = zip(*(
        (memory_per_gpu(model, each, machine, constants=constants).total,
         step_time(model, each, machine, constants).total) for each in (plan, products)))
    return Fp8Change(share, memory, seconds, step_time(model, gathers, machine, constants).total,
                     tuple(gathered_bytes(model, each, machine) for each in (plan, gathers)))


def gathered_bytes(model, plan, machine):
    """Return the bytes of weights that a GPU gathers in a step, its own shards included."""
    traffic = volumes(model, plan, machine)
    layers = ((traffic.dense_layer, model.layers - model.sparse_layers),
              (traffic.sparse_layer, model.sparse_layers))
    often = [(layer.get(part, ()), number * plan.micro_batches / plan.pp)
             for layer, number in layers for part in ("weights", "expert weights")]
    return sum(times * count * message.nbytes
               for exchanges, times in [*often, *((each, 1) for each in traffic.weights)]
               for messages, count, *_ in exchanges
               for message in messages if message.verb == "all_gather")


class Pair(NamedTuple):
    """A published run in bf16, and one in FP8 of the same source, layout, batch and GPUs."""

    bf16: object
    fp8: object

    @property
    def speedup(self):
        return self.bf16.seconds / self.fp8.seconds


def published_pairs():
    """Return all Pairs of the published runs; FP8 of any kind, but not FP4."""
    layouts = {}
    for run, job in with_jobs(all_runs()):
        if job.seconds and job.plan.precision != "nvfp4":
            layout = replace(job.plan, precision="")
            same = run.source.partition(";")[0], job.name, job.model, job.machine, layout
            layouts.setdefault(same, []).append(job)
    return [Pair(bf16, fp8) for group in layouts.values()
            for bf16 in group if bf16.plan.precision == "bf16"
            for fp8 in group if fp8.plan.precision != "bf16"]
