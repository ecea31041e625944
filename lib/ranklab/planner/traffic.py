"""Seconds that the messages of each axis take, before any is hidden beside computing."""

from ranklab.context_parallel.formulas import ring_bytes
from ranklab.planner.links import collective_seconds, message_seconds
from ranklab.planner.plan import Span
from ranklab.tensor_parallel.formulas import summed_bytes


def tensor_seconds(model, plan, machine, c):
    """Of one layer and micro-batch: all-reduces of x, or a reduce-scatter and an all-gather for
    each; a forward that runs twice sends twice.
    """
    if plan.tp == 1:
        return 0.0
    x = 2 * plan.tokens * model.hidden  # bytes
    total = summed_bytes(model.hidden, plan.tokens, 1, False, False, size=2, leaving=2)
    twice = plan.recomputed * (plan.recompute == "full")
    count = total / x / (1 + model.parallel) * (1 + twice / 2)
    span = plan.span("tensor", machine)
    if plan.sequence_parallel:
        return count * (collective_seconds("all_gather", x, span, machine, c)
                        + collective_seconds("reduce_scatter", x, span, machine, c))
    return count * collective_seconds("all_reduce", x, span, machine, c)


def context_seconds(model, plan, machine, c):
    """Of one layer and micro-batch: keys and values go round the ring, and their gradients."""
    if plan.cp == 1:
        return 0.0
    heads = max(1, model.kv_heads / plan.tp)
    back = ring_bytes(plan.sequence, heads, model.head_size, plan.cp)
    front = ring_bytes(plan.sequence, heads, model.head_size, plan.cp, backward=False)
    nbytes = plan.micro_batch * (back + front * plan.recomputed * (plan.recompute == "full"))
    span = plan.span("context", machine)
    return 2 * plan.cp * 10e-6 + message_seconds(nbytes, span, machine, c)


def expert_seconds(model, plan, machine, c):
    """Of one layer with experts: tokens go to their experts and back, forward and backward.

    A token goes once to each node with some of its experts, and from there once to each such rank.
    With N nodes (or ranks) and k experts these are N (1 - (1 - 1/N)^k) on average.
    """
    if plan.ep == 1:
        return 0.0
    count = 4 + 2 * plan.recomputed * (plan.recompute == "full")
    span = plan.span("expert", machine)
    x = 2 * plan.tokens * model.hidden / plan.tp  # bytes
    nodes = max(1.0, span.ranks / span.node)
    near, far = (x * n * (1 - (1 - 1 / n) ** model.top_k) for n in (span.ranks, nodes))
    return count * max(
        collective_seconds("all_to_all", near, Span(*3 * [span.node]), machine, c),
        collective_seconds("all_to_all", far, span, machine, c) if nodes > 1 else 0.0)


def gather_seconds(numbers, plan, machine, c):
    """Of one layer's sharded weights (ZeRO-3, FSDP), for each micro-batch: they are gathered for
    forward and for backward, and gradients are reduced. 0 on one rank.
    """
    if plan.copies == 1 or plan.zero < 3:
        return 0.0
    span = plan.span("shard", machine)
    weights = collective_seconds("all_gather", 2 * numbers, span, machine, c)
    nbytes = plan.gradient_bytes * numbers
    gradients = collective_seconds("reduce_scatter", nbytes, span, machine, c)
    return 2 * weights + (0 if plan.frozen else gradients + replicas(nbytes, plan, machine, c))


def replicas(nbytes, plan, machine, c):
    """Seconds of the sum over copies of the shards (HSDP)."""
    whole = plan.span("weights", machine)
    span = Span(*(max(1, each // plan.sharders) for each in whole))
    return collective_seconds("all_reduce", nbytes / plan.sharders, span, machine, c)


def data_seconds(numbers, plan, machine, c, ranks=0):
    """(of gradients, of weights) once a step, if weights are not sharded by layers: an all-reduce,
    or with ZeRO 1 and 2 a reduce-scatter of gradients and an all-gather of weights.

    ranks  how many take part; 0: all that have the same weights
    """
    if plan.zero == 3 or plan.frozen or not numbers:
        return 0.0, 0.0
    span = plan.span("weights", machine)
    span = Span(*(min(ranks, each) for each in span)) if ranks else span
    nbytes = plan.gradient_bytes * numbers
    if not plan.zero:
        return collective_seconds("all_reduce", nbytes, span, machine, c), 0.0
    if plan.sharders < span.ranks:  # gradients over all; weights from the shards' group
        gathered = plan.span("shard", machine)
        return (collective_seconds("all_reduce", nbytes, span, machine, c),
                collective_seconds("all_gather", 2 * numbers, gathered, machine, c))
    return (collective_seconds("reduce_scatter", nbytes, span, machine, c),
            collective_seconds("all_gather", 2 * numbers, span, machine, c))


def pipeline_seconds(model, plan, machine, c):
    """Of one micro-batch on a rank, which sends each stage's result on, and its gradient back.
    Tensor ranks each send a part, and gather it again unless they have split sequences.
    """
    if plan.pp == 1:
        return 0.0
    x = 2 * plan.tokens * model.hidden  # bytes
    seconds = message_seconds(x / plan.tp, plan.span("pipeline", machine), machine, c)
    if not plan.sequence_parallel:
        tensor = plan.span("tensor", machine)
        seconds += collective_seconds("all_gather", x, tensor, machine, c)
    return 2 * plan.virtual * seconds
