"""step_time: the seconds of a step, in parts that add up; and what follows from them.

Each kind of messages hides behind computing as if it were alone: two kinds that overlap with the
same products may hide more than there is.
"""

from dataclasses import dataclass

from ranklab.formulas.pipeline_parallel import flush_bubble, zb_h1_bubble
from ranklab.planner.compute import head_work, layer_work, optimizer_seconds
from ranklab.planner.constants import CONSTANTS
from ranklab.planner.links import exchange_seconds
from ranklab.planner.traffic import volumes


@dataclass(frozen=True)
class Step:
    """Where the seconds of a step go on the average GPU, without messages hidden by computing.

    products, attention, other  computing: matrix products, attention's core, memory-bound work
    recompute  forwards that run twice
    tensor, context, expert, weights, data, pipeline  messages that are not hidden; weights: of
               ZeRO-3 and FSDP, for each micro-batch
    bubble     idle time of a pipeline rank: filling, draining, and uneven stages
    optimizer  its step
    rest       loader, norms
    """

    products: float
    attention: float
    other: float
    recompute: float
    tensor: float
    context: float
    expert: float
    weights: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float
    rest: float

    @property
    def total(self):
        return sum(vars(self).values())

    def tokens_per_second(self, plan):
        """Return the tokens that all GPUs together process per second."""
        return plan.batch * plan.sequence / self.total

    def mfu(self, model, plan, machine, causal=False):
        """Return the model's FLOPs as a fraction of the peak; attention in full, as most papers
        count it; with causal, the needed half.
        """
        return self._of_peak(model.flops_per_token(plan.sequence, causal), plan, machine)

    def hfu(self, model, plan, machine, causal=False):
        """Return mfu with forwards that run twice counted twice: hardware FLOPs."""
        flops = model.flops_per_token(plan.sequence, causal, 1 + plan.rerun_share)
        return self._of_peak(flops, plan, machine)

    def _of_peak(self, flops, plan, machine):
        peak = plan.gpus * machine.peak(plan.precision)
        return flops * self.tokens_per_second(plan) / peak


def exposed(messages, work, hidden, c):
    """Return the seconds of messages that `work` does not hide; all of them if not `hidden`.

    Together they take (work^n + messages^n)^(1/n): a little more than the longer of the two.
    """
    if not hidden or not messages or not work:
        return messages
    longer, shorter = max(messages, work), min(messages, work)
    return longer * (1 + (shorter / longer) ** c.overlap) ** (1 / c.overlap) - work


def tensor_exposed(seconds, plan, work, c):
    """Return the seconds of a layer's tensor messages that are not hidden; "tensor backward" hides
    the messages of input gradients behind the products of weight gradients (Megatron-LM since
    2022).
    """
    if "tensor backward" not in plan.hides:
        return exposed(seconds, sum(work.products), "tensor" in plan.hides, c)
    back = seconds / (2 + plan.rerun_share)
    return seconds - back + exposed(back, work.products[1] / 2, True, c)


def layer_parts(model, plan, machine, c, sparse):
    """Return {part of a Step: seconds} of a layer and micro-batch, on one GPU."""
    work = layer_work(model, plan, machine, c, sparse)
    traffic = volumes(model, plan, machine)
    messages = dict.fromkeys(("tensor", "context", "expert", "weights", "expert weights"), 0.0)
    for part, exchanges in (traffic.sparse_layer if sparse else traffic.dense_layer).items():
        messages[part] = exchange_seconds(exchanges, machine, c)
    weights = messages["weights"] + messages["expert weights"]
    attention, busy, hides = sum(work.attention), work.busy, plan.hides
    late = exposed(c.host_seconds, busy, True, c) if sparse and not plan.graphs else 0.0
    return {"products": sum(work.products), "attention": attention,
            "other": sum(work.other) + late, "recompute": work.rerun,
            "tensor": tensor_exposed(messages["tensor"], plan, work, c),
            "context": exposed(messages["context"], attention, "context" in hides, c),
            "expert": exposed(messages["expert"], busy, "expert" in hides, c),
            "weights": exposed(weights, busy, "data" in hides, c)}


def layer_seconds(model, plan, machine, c=CONSTANTS):
    """Return {part of a Step: seconds} of all layers for one micro-batch, summed over stages."""
    kinds = ((model.layers - model.sparse_layers, False), (model.sparse_layers, True))
    layers = [(number, layer_parts(model, plan, machine, c, sparse))
              for number, sparse in kinds if number]
    return {part: sum(number * parts[part] for number, parts in layers) for part in layers[0][1]}


def head_seconds(model, plan, machine, c=CONSTANTS):
    """Return {part of a Step: seconds} of the head and the loss for one micro-batch, on the last
    pipeline rank.
    """
    work = head_work(model, plan, machine, c)
    return {"products": sum(work.products), "other": sum(work.other)}


def sent_seconds(model, plan, machine, beside, c=CONSTANTS):
    """Return the seconds of a micro-batch's messages between pipeline ranks that `beside` does not
    hide.
    """
    seconds = exchange_seconds(volumes(model, plan, machine).pipeline, machine, c)
    return exposed(seconds, beside, "pipeline" in plan.hides, c)


def bubble_part(model, plan, machine, c=CONSTANTS):
    """Return the bubble as a fraction of the time of even pipeline ranks (lab 09)."""
    if plan.schedule == "zb-h2" or plan.pp == 1:
        return 0.0
    if plan.schedule == "zb-h1":
        work = layer_work(model, plan, machine, c, model.sparse_layers > 0)
        weights = work.products[1] / 2
        back = work.backward + work.rerun - weights
        return zb_h1_bubble(plan.pp, plan.micro_batches, work.forward, back, weights)
    return flush_bubble(plan.pp, plan.micro_batches, plan.virtual)


def step_time(model, plan, machine, constants=CONSTANTS):
    """Return the Step of this plan on the average GPU: parts in seconds that add up to its total.

    A GPU computes its share of the layers for each micro-batch; the last stage also has the head.
    bubble     the schedule's part of (busy + sent + bubble), and waiting for the fullest stage
    data, optimizer  once a step; the work of one micro-batch hides some of data
    Lab: 13
    """
    c, M, P = constants, plan.micro_batches, plan.pp
    layers, head = layer_seconds(model, plan, machine, c), head_seconds(model, plan, machine, c)
    parts = {part: M / P * (layers[part] + head.get(part, 0)) for part in layers}
    busy, ends = sum(parts.values()), sum(head.values())
    sent = M * sent_seconds(model, plan, machine, busy / M, c)
    part = bubble_part(model, plan, machine, c)
    layer = sum(layers.values()) / model.layers
    fullest = max(n * layer + (rank == P - 1) * ends
                  for rank, n in enumerate(plan.stages(model.layers)))
    bubble = (busy + sent) * part / (1 - part) + max(0.0, M * fullest - busy)
    data, optimizer = update_seconds(model, plan, machine, busy / M, c)
    return Step(**parts, pipeline=sent, bubble=bubble, data=data, optimizer=optimizer,
                rest=c.step_seconds)


def update_seconds(model, plan, machine, beside, c=CONSTANTS):
    """Return (data, optimizer): the seconds of gradients and weights sent once a step, as far as
    the work of a micro-batch, `beside` seconds, does not hide them; and of the optimizer's step.
    """
    traffic, hidden = volumes(model, plan, machine), "data" in plan.hides
    gradients, weights = (sum(exchange_seconds(exchanges, machine, c) for exchanges in kinds)
                          for kinds in (traffic.gradients, traffic.weights))
    data = (exposed(gradients, beside * (2 / 3), hidden, c)  # during backward
            + exposed(weights, beside * (1 / 3), hidden, c))  # and forward
    return data, optimizer_seconds(sum(traffic.parameters), plan, machine)
