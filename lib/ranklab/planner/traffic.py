"""volumes: the bytes that each group of ranks sends, computed once. links.py has the seconds."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ranklab.formulas.context_parallel import ring_bytes
from ranklab.formulas.tensor_parallel import summed_bytes
from ranklab.planner.placement import place
from ranklab.planner.plan import Span

HOP = 10e-6  # seconds until the first byte of a message reaches the neighbour


class Message(NamedTuple):
    """One collective of a group, or one message to a neighbour in it (verb "send").

    nbytes  of the larger side, as in nccl-tests
    """

    verb: str
    nbytes: float
    span: Span


class Exchange(NamedTuple):
    """Messages of a group, `count` times.

    at_once  True: they use different links, and the longest counts; False: one after another
    latency  additional seconds
    """

    messages: tuple
    count: float = 1
    at_once: bool = False
    latency: float = 0.0


@dataclass(frozen=True)
class Volumes:
    """The messages of a rank in a step: tuples of Exchanges, empty for a group of one rank.

    dense_layer, sparse_layer  of each layer (with experts) and micro-batch, {part of a Step:
                     Exchanges}; sharded weights of experts are separate, as "expert weights"
    pipeline         of each micro-batch
    gradients, weights  once a step, if weights are not sharded by layers: (outside of experts, of
                     experts)
    parameters       numbers on the fullest GPU of the first stage: (outside of experts, of experts)
    """

    dense_layer: dict
    sparse_layer: dict
    pipeline: tuple
    gradients: tuple
    weights: tuple
    parameters: tuple


@functools.lru_cache(maxsize=1024)  # each part of a step reads them, and a fit reads them each time
def volumes(model, plan, machine):
    """Return the Volumes of a plan whose groups lie on this machine."""
    placement = place(plan, machine)
    dense, experts = parameters_per_gpu(model, plan)
    gradients, weights = zip(
        update_exchanges(dense, plan, placement.weights, placement, model.embedding / plan.tp),
        update_exchanges(experts, plan, placement.expert_copies, placement))
    return Volumes(
        layer_exchanges(model, plan, placement, False),
        layer_exchanges(model, plan, placement, True) if model.experts else {},
        pipeline_exchanges(model, plan, placement), gradients, weights, (dense, experts))


def parameters_per_gpu(model, plan):
    """Return (parameters outside experts, of experts) on the fullest GPU of the first stage."""
    layers = max(plan.stages(model.layers))
    dense = model.dense_of(layers, True)
    sparse = layers - dense if model.experts else 0
    numbers = layers * model.block + dense * model.dense_ffn + model.embedding
    return numbers / plan.tp, sparse * model.experts * model.expert / plan.ep


def layer_exchanges(model, plan, placement, sparse):
    """Return {part of a Step: Exchanges} of a layer and micro-batch, for the parts that send
    anything; sparse: a layer with experts.
    """
    numbers = model.block + model.dense_ffn * (not sparse)
    parts = {"tensor": tensor_exchanges(model, plan, placement),
             "context": context_exchanges(model, plan, placement),
             "weights": gather_exchanges(numbers / plan.tp, plan, placement)}
    if sparse:
        numbers = model.experts * model.expert / plan.ep
        parts |= {"expert": expert_exchanges(model, plan, placement),
                  "expert weights": gather_exchanges(numbers, plan, placement)}
    return {part: exchanges for part, exchanges in parts.items() if exchanges}


def tensor_exchanges(model, plan, placement):
    """Return the Exchanges of a layer and micro-batch between tensor ranks: all-reduces of x, or a
    reduce-scatter and an all-gather for each. A forward that runs twice sends twice.
    """
    if plan.tp == 1:
        return ()
    x = 2 * plan.tokens * model.hidden  # bytes
    total = summed_bytes(model.hidden, plan.tokens, 1, False, False, size=2, leaving=2)
    verbs = ("all_gather", "reduce_scatter") if plan.sequence_parallel else ("all_reduce",)
    return (Exchange(tuple(Message(verb, x, placement.tensor) for verb in verbs),
                     total / x / (1 + model.parallel) * (1 + plan.rerun_share / 2)),)


def context_exchanges(model, plan, placement):
    """Return the Exchanges of a layer and micro-batch between context ranks: keys, values and
    their gradients go around the ring.
    """
    if plan.cp == 1:
        return ()
    heads = max(1, model.kv_heads / plan.tp)
    total = ring_bytes(plan.sequence, heads, model.head_size, plan.cp)
    forward = ring_bytes(plan.sequence, heads, model.head_size, plan.cp, backward=False)
    nbytes = plan.micro_batch * (total + forward * plan.rerun_share)
    return (Exchange((Message("send", nbytes, placement.context),), latency=2 * plan.cp * HOP),)


def expert_exchanges(model, plan, placement):
    """Return the Exchanges of a layer with experts and a micro-batch: tokens go to their experts
    and back, forward and backward.

    A token goes once to each node with some of its experts, and from there once to each such rank.
    With N nodes (or ranks) and k experts these are N (1 - (1 - 1/N)^k) on average.
    """
    if plan.ep == 1:
        return ()
    span = placement.expert
    x = 2 * plan.tokens * model.hidden / plan.tp  # bytes
    nodes = max(1.0, span.ranks / span.node)
    near, far = (x * n * (1 - (1 - 1 / n) ** model.top_k) for n in (span.ranks, nodes))
    messages = [Message("all_to_all", near, Span(*3 * [span.node]))]
    if nodes > 1:
        messages.append(Message("all_to_all", far, span))
    return (Exchange(tuple(messages), 4 + 2 * plan.rerun_share, at_once=True),)


def gather_exchanges(numbers, plan, placement):
    """Return the Exchanges of this many sharded weights (ZeRO-3, FSDP) for each micro-batch.

    They are gathered for forward and for backward; gradients are reduced, over the shards and over
    the copies of the shards (HSDP).
    """
    if plan.copies == 1 or plan.zero < 3:
        return ()
    nbytes = plan.gradient_bytes * numbers
    weights = Exchange((Message("all_gather", plan.gathered_bytes * numbers, placement.shard),), 2)
    gradients = Exchange((Message("reduce_scatter", nbytes, placement.shard),
                          Message("all_reduce", nbytes / plan.sharders, placement.replicas)))
    return (weights,) if plan.frozen else (weights, gradients)


def update_exchanges(numbers, plan, span, placement, embedding=0):
    """Return (Exchanges of gradients, Exchanges of weights) once a step: an all-reduce, or with
    ZeRO 1 and 2 a reduce-scatter of gradients and an all-gather of weights.

    span  the Span of the ranks with these `numbers` weights
    embedding  how many of them belong to the embedding; these have 2 bytes in any all-gather
    """
    if plan.zero == 3 or plan.frozen or not numbers:
        return (), ()

    def exchanges(verb, nbytes, span):
        return (Exchange((Message(verb, nbytes, span),)),)

    nbytes = plan.gradient_bytes * numbers
    gathered = 2 * numbers - (2 - plan.gathered_bytes) * (numbers - embedding)
    if not plan.zero:
        return exchanges("all_reduce", nbytes, span), ()
    if plan.sharders < span.ranks:  # gradients over all; weights from the shards' group
        return (exchanges("all_reduce", nbytes, span),
                exchanges("all_gather", gathered, placement.shard))
    return (exchanges("reduce_scatter", nbytes, span),
            exchanges("all_gather", gathered, span))


def pipeline_exchanges(model, plan, placement):
    """Return the Exchanges of a micro-batch between stages: a rank sends each stage's output
    forward, and its gradient back. Each tensor rank sends a part, and then gathers the whole
    unless sequences are split.
    """
    if plan.pp == 1:
        return ()
    x = 2 * plan.tokens * model.hidden  # bytes
    messages = [Message("send", x / plan.tp, placement.pipeline)]
    if not plan.sequence_parallel:
        messages.append(Message("all_gather", x, placement.tensor))
    return (Exchange(tuple(messages), 2 * plan.virtual),)
