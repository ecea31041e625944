"""step_time: the seconds of a step, in parts that add up; and what follows from them."""

from dataclasses import dataclass

from ranklab.pipeline_parallel.formulas import flush_bubble, zb_h1_bubble
from ranklab.planner import compute, traffic
from ranklab.planner.constants import CONSTANTS


@dataclass(frozen=True)
class Step:
    """Where the seconds of a step go on the average GPU, without messages that computing hides.

    products, attention, other  computing: matrix products, attention's core, memory-bound work
    recompute  forwards that run twice
    tensor, context, expert, weights, data, pipeline  messages that are not hidden; weights: those
               of ZeRO-3 and FSDP, for each micro-batch
    bubble     time without work for a pipeline rank: filling, draining, and uneven stages
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
        """Of all GPUs."""
        return plan.batch * plan.sequence / self.total

    def mfu(self, model, plan, machine, causal=False):
        """The model's FLOPs as a part of the peak; attention in full, as most papers count it."""
        return self._of_peak(model.flops_per_token(plan.sequence, causal), plan, machine)

    def hfu(self, model, plan, machine, causal=False):
        """The same with forwards that run twice."""
        twice = plan.recomputed * (plan.recompute == "full")
        flops = model.flops_per_token(plan.sequence, causal, 1 + twice)
        return self._of_peak(flops, plan, machine)

    def _of_peak(self, flops, plan, machine):
        peak = plan.gpus * machine.peak(plan.precision)
        return flops * self.tokens_per_second(plan) / peak


def exposed(messages, work, hidden, c):
    """Seconds of messages that `work` does not hide; all of them if they are not hidden at all.

    Together they take (work^n + messages^n)^(1/n): a little more than the longer of the two.
    """
    if not hidden or not messages or not work:
        return messages
    longer, shorter = max(messages, work), min(messages, work)
    return longer * (1 + (shorter / longer) ** c.overlap) ** (1 / c.overlap) - work


def tensor_exposed(model, plan, machine, work, c):
    """Seconds of a layer's tensor messages that are left; "tensor backward" hides those of inputs'
    gradients behind the products of weights' gradients (Megatron-LM since 2022).
    """
    seconds = traffic.tensor_seconds(model, plan, machine, c)
    if "tensor backward" not in plan.hides:
        return exposed(seconds, sum(work.products), "tensor" in plan.hides, c)
    back = seconds / (2 + plan.recomputed * (plan.recompute == "full"))
    return seconds - back + exposed(back, work.products[1] / 2, True, c)


def layer_parts(model, plan, machine, c, sparse):
    """{part of a Step: seconds} of a layer and micro-batch, on one GPU."""
    work = compute.layer_work(model, plan, machine, c, sparse)
    twice = compute.again(work, plan)
    both = work.forward + work.backward + twice
    late = exposed(c.host_seconds, both, True, c) if sparse and not plan.graphs else 0.0
    numbers = model.block + model.dense_ffn * (not sparse)
    gathered = traffic.gather_seconds(numbers / plan.tp, plan, machine, c)
    if sparse and plan.zero == 3:
        gathered += traffic.gather_seconds(model.experts * model.expert / plan.ep, plan, machine, c)
    axes = {  # part: (axis that may hide it, its messages, the work beside them)
        "context": ("context", traffic.context_seconds(model, plan, machine, c),
                    sum(work.attention)),
        "expert": ("expert", sparse and traffic.expert_seconds(model, plan, machine, c), both),
        "weights": ("data", gathered, both)}
    return {"products": sum(work.products), "attention": sum(work.attention),
            "other": sum(work.other) + late, "recompute": twice,
            "tensor": tensor_exposed(model, plan, machine, work, c),
            **{part: exposed(seconds, beside, axis in plan.hides, c)
               for part, (axis, seconds, beside) in axes.items()}}


def layer_seconds(model, plan, machine, c=CONSTANTS):
    """{part of a Step: seconds} of all layers for one micro-batch, one GPU after the other."""
    kinds = ((model.layers - model.sparse_layers, False), (model.sparse_layers, True))
    found = [(number, layer_parts(model, plan, machine, c, sparse))
             for number, sparse in kinds if number]
    return {part: sum(number * parts[part] for number, parts in found) for part in found[0][1]}


def head_seconds(model, plan, machine, c=CONSTANTS):
    """The same of the head and the loss, on the last pipeline rank."""
    work = compute.head_work(model, plan, machine, c)
    return {"products": sum(work.products), "other": sum(work.other)}


def sent_seconds(model, plan, machine, beside, c=CONSTANTS):
    """Seconds of a micro-batch's messages between pipeline ranks that `beside` does not hide."""
    seconds = traffic.pipeline_seconds(model, plan, machine, c)
    return exposed(seconds, beside, "pipeline" in plan.hides, c)


def bubble_part(model, plan, machine, c=CONSTANTS):
    """The bubble as a part of the time of even pipeline ranks (lab 09)."""
    if plan.schedule == "zb-h2" or plan.pp == 1:
        return 0.0
    if plan.schedule == "zb-h1":
        work = compute.layer_work(model, plan, machine, c, model.sparse_layers > 0)
        weights = work.products[1] / 2
        back = work.backward + compute.again(work, plan) - weights
        return zb_h1_bubble(plan.pp, plan.micro_batches, work.forward, back, weights)
    return flush_bubble(plan.pp, plan.micro_batches, plan.virtual)


def step_time(model, plan, machine, constants=CONSTANTS):
    """Return the Step of this plan on the average GPU: parts in seconds that add up to its total.

    A GPU computes its share of the layers for each micro-batch; the head is the last stage's.
    bubble     the schedule's part of (busy + sent + bubble), and waiting for the fullest stage
    optimizer  with gradients once a step, beside the work of one micro-batch
    lab        13
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


def held_numbers(model, plan):
    """(dense parameters, parameters of experts) that the fullest GPU of the first stage holds."""
    layers = max(plan.stages(model.layers))
    dense = layers * model.block + min(layers, model.dense) * model.dense_ffn + model.embedding
    sparse = max(0, layers - min(layers, model.dense)) if model.experts else 0
    return dense / plan.tp, sparse * model.experts * model.expert / plan.ep


def update_seconds(model, plan, machine, piece, c=CONSTANTS):
    """(data, optimizer): gradients and weights that travel once a step beside the work of a
    micro-batch, of `piece` seconds; and the optimizer's step.
    """
    numbers, experts = held_numbers(model, plan)
    ranks = max(1, plan.copies * plan.tp // plan.ep)
    reduced = compute.add(traffic.data_seconds(numbers, plan, machine, c),
                          traffic.data_seconds(experts, plan, machine, c, ranks))
    data = sum(exposed(seconds, piece * part, "data" in plan.hides, c)
               for seconds, part in zip(reduced, (2 / 3, 1 / 3)))  # beside backward, and forward
    mine = 0 if plan.frozen else (numbers + experts) / (plan.sharders if plan.zero else 1)
    if plan.offload:  # 28 bytes a parameter in the host's memory, by DeepSpeed's vectorised Adam
        shared = min(machine.node, plan.gpus) / machine.host_memory
        return data, mine * (4 / machine.host + 28 * shared)
    return data, compute.ADAM * mine / machine.memory_bandwidth
