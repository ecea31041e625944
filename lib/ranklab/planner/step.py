"""step_time: the seconds of a step, in parts that add up; and what follows from them."""

import math
from dataclasses import dataclass, fields

from ranklab.pipeline_parallel.formulas import flush_bubble, zb_h1_bubble
from ranklab.planner import compute, traffic
from ranklab.planner.constants import CONSTANTS


@dataclass(frozen=True)
class Step:
    """Where the seconds of a step go, on the average GPU; what computing hides is not in it.

    products, attention, other  computing: matrix products, attention's core, what memory bounds
    recompute  forwards that are computed twice
    tensor, context, expert, weights, data, pipeline  messages that are not hidden; weights: those
               of ZeRO-3 and FSDP, for each micro-batch
    bubble     no work for a pipeline rank: filling, draining, and stages that are not even
    optimizer  its step
    rest       waiting for the slowest node, loader, norms
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
        return sum(getattr(self, field.name) for field in fields(self))

    def tokens_per_second(self, plan):
        """Of all GPUs."""
        return plan.batch * plan.sequence / self.total

    def mfu(self, model, plan, machine, causal=False):
        """The model's FLOPs as a part of the peak; attention in full, as most papers count it."""
        return self._of_peak(model.flops_per_token(plan.sequence, causal), plan, machine)

    def hfu(self, model, plan, machine, causal=False):
        """The same, with forwards that are computed twice."""
        twice = plan.recomputed * (plan.recompute == "full")
        flops = model.flops_per_token(plan.sequence, causal, 1 + twice)
        return self._of_peak(flops, plan, machine)

    def _of_peak(self, flops, plan, machine):
        peak = plan.gpus * machine.peak(plan.precision)
        return flops * self.tokens_per_second(plan) / peak


def exposed(messages, work, hidden, c):
    """Seconds of messages that are left where they run beside `work`; all, where they do not.

    Together they take (work^n + messages^n)^(1/n): a little more than the longer of the two.
    """
    if not hidden or not messages or not work:
        return messages
    longer, shorter = max(messages, work), min(messages, work)
    return longer * (1 + (shorter / longer) ** c.overlap) ** (1 / c.overlap) - work


def layer_parts(model, plan, machine, c, sparse):
    """(Work, seconds of recompute, {axis: seconds exposed}) of a layer and micro-batch."""
    work = compute.layer_work(model, plan, machine, c, sparse)
    twice = compute.again(work, plan)
    both = work.forward + work.backward + twice
    numbers = model.block + model.dense_ffn * (not sparse)
    axes = {"tensor": (traffic.tensor_seconds(model, plan, machine, c), sum(work.products)),
            "context": (traffic.context_seconds(model, plan, machine, c), sum(work.attention)),
            "expert": (traffic.expert_seconds(model, plan, machine, c) if sparse else 0.0, both)}
    left = {axis: exposed(seconds, beside, axis in plan.hides, c)
            for axis, (seconds, beside) in axes.items()}
    gathered = traffic.gather_seconds(numbers / plan.tp, plan, machine, c)
    if sparse and plan.zero == 3:
        gathered += traffic.gather_seconds(model.experts * model.expert / plan.ep, plan, machine, c)
    left["weights"] = exposed(gathered, both, "data" in plan.hides, c)
    return work, twice, left


def bubble_part(plan, work, twice):
    """The bubble as a part of the time of even pipeline ranks (lab 09)."""
    if plan.schedule == "zb-h2" or plan.pp == 1:
        return 0.0
    if plan.schedule == "zb-h1":
        weights = work.products[1] / 2
        return zb_h1_bubble(plan.pp, plan.micro_batches, work.forward,
                            work.backward + twice - weights, weights)
    return flush_bubble(plan.pp, plan.micro_batches, plan.virtual)


def held_numbers(model, plan):
    """(dense parameters, parameters of experts) that the fullest GPU of the first stage holds."""
    layers = max(plan.stages(model.layers))
    dense = layers * model.block + min(layers, model.dense) * model.dense_ffn + model.embedding
    sparse = max(0, layers - min(layers, model.dense)) if model.experts else 0
    return dense / plan.tp, sparse * model.experts * model.expert / plan.ep


def step_time(model, plan, machine, constants=CONSTANTS):
    """The Step of this plan: parts in seconds, whose sum is its total."""
    c, M, P = constants, plan.micro_batches, plan.pp
    kinds = [(number, *layer_parts(model, plan, machine, c, sparse))
             for number, sparse in ((model.layers - model.sparse_layers, False),
                                    (model.sparse_layers, True)) if number]
    head = compute.head_work(model, plan, machine, c)

    def summed(part, last=0.0):  # of a step, on the average pipeline rank
        return M / P * (sum(number * part(*parts) for number, *parts in kinds) + last)

    products = summed(lambda work, *_: sum(work.products), sum(head.products))
    attention = summed(lambda work, *_: sum(work.attention))
    other = summed(lambda work, *_: sum(work.other), sum(head.other))
    recompute = summed(lambda work, twice, left: twice)
    left = {axis: summed(lambda work, twice, left, axis=axis: left[axis])
            for axis in ("tensor", "context", "expert", "weights")}
    busy = products + attention + other + recompute + sum(left.values())
    sent = M * exposed(c.pipeline_exposed * traffic.pipeline_seconds(model, plan, machine, c),
                       busy / M, "pipeline" in plan.hides, c)
    bubble = bubble_seconds(model, plan, kinds[-1][1:3], head, busy, sent)
    data, optimizer = update_seconds(model, plan, machine, c, busy / M)
    nodes = max(1.0, plan.gpus / machine.node)
    rest = c.step_seconds + c.waiting * math.log2(nodes) * (busy + bubble)
    return Step(products, attention, other, recompute, **left, pipeline=sent, bubble=bubble,
                data=data, optimizer=optimizer, rest=rest)


def bubble_seconds(model, plan, layer, head, busy, sent):
    """Of a step, without work: the schedule's bubble, and waiting for the fullest rank."""
    M, P = plan.micro_batches, plan.pp
    part = bubble_part(plan, *layer)
    ends = head.forward + head.backward
    each = (busy * P / M - ends) / model.layers  # a layer and micro-batch
    fullest = max(n * each + (rank == P - 1) * ends
                  for rank, n in enumerate(plan.stages(model.layers)))
    return (busy + sent) * part / (1 - part) + max(0.0, M * fullest - busy)


def update_seconds(model, plan, machine, c, piece):
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
    return data, c.optimizer_bytes * mine / machine.memory_bandwidth
