"""Seconds to compute one layer, and the head, for one micro-batch on one GPU.

A product takes time for its FLOPs at a fraction of the best rate, for its bytes at the memory's
rate, and for a launch. So small and thin products are slower by their shape, without a table.
"""

import math
from typing import NamedTuple

COPY = 0.85  # of the memory's bandwidth, in a plain copy
TILE = 128  # side of the tile of results that a processor computes at once
LAUNCH = 4e-6  # seconds of a kernel on top of FLOPs and bytes
SCORE = 8  # bytes of a score: written by a product, read and written by softmax, read by a product
LOGIT = 16  # of a logit: 16 bits written and read, float32 written and read, its gradient written
ADAM = 38  # of a parameter: 16 read, 14 written; the gradient also for its norm, and made zero
FUSED = 0.4  # of the bytes of experts' tokens, where messages sort them


class Work(NamedTuple):
    """Seconds of a layer (or the head) for a micro-batch: (forward, backward) of each kind.

    rerun  seconds of the part of forward that runs twice
    """

    products: tuple = (0.0, 0.0)
    attention: tuple = (0.0, 0.0)
    other: tuple = (0.0, 0.0)
    rerun: float = 0.0

    @property
    def forward(self):
        return self.products[0] + self.attention[0] + self.other[0]

    @property
    def backward(self):
        return self.products[1] + self.attention[1] + self.other[1]

    @property
    def busy(self):
        return self.forward + self.backward + self.rerun


def product_rate(machine, c, precision="bf16"):
    """Return the FLOP/s of a large matrix product in this precision."""
    if precision == "bf16" or not machine.fp8:
        return machine.rate(precision) * (c.product_hopper if machine.fp8 else c.product)
    part = {"fp8-rowwise": c.product_rows, "nvfp4": c.product_fp4}.get(precision, c.product)
    return machine.rate(precision) * part


def product_seconds(M, K, N, machine, rate, count=1, summed=False):
    """Return the seconds of `count` products (M, K) @ (K, N) in one launch.

    rate    FLOP/s of a large product
    summed  the result is added up in float32
    """
    nbytes = 2 * (M * K + K * N) + (8 if summed else 2) * M * N
    computing = 2 * M * K * N / rate * waves(M, N, machine, count)
    return count * (computing + nbytes / (COPY * machine.memory_bandwidth)) + LAUNCH


def waves(M, N, machine, count=1):
    """Return how many times longer `count` results (M, N) take than on fully busy processors: in
    the last wave of tiles some processors are idle (NVIDIA's guide to matrix multiplication: wave
    quantization).
    """
    tiles = count * math.ceil(M / TILE) * math.ceil(N / TILE)
    full_waves = math.ceil(tiles / machine.processors)
    return full_waves * machine.processors * TILE**2 / (count * M * N)


def linear_seconds(M, K, N, machine, rate, count=1, frozen=False):
    """Return (forward, backward) of M tokens through a K x N matrix; frozen: no weight gradient."""
    forward = product_seconds(M, K, N, machine, rate, count)
    inputs = product_seconds(M, N, K, machine, rate, count)
    weights = 0 if frozen else product_seconds(K, M, N, machine, rate, count, True)
    return forward, inputs + weights


def add(*pairs):
    """Return the sum of (forward, backward) pairs."""
    return tuple(map(sum, zip(*pairs)))


def layer_work(model, plan, machine, c, sparse=False):
    """Return the Work of a layer on each tensor rank; sparse: a layer with experts."""
    shapes = model.products(plan.tp)
    if model.experts and not sparse:
        shapes = shapes + dense_products(model, plan)
    rate = product_rate(machine, c, plan.precision)
    products = add(*(linear_seconds(plan.tokens, K, N, machine, rate, frozen=plan.frozen)
                     for K, N in shapes))
    if sparse:
        products = add(products, expert_seconds(model, plan, machine, rate))
    work = Work(products, attention_seconds(model, plan, machine, c),
                other_seconds(model, plan, machine, c, sparse))
    return work._replace(rerun=rerun_seconds(work, plan))


def dense_products(model, plan):
    """Return [(K, N)] of the MLP of a dense layer in a model with experts, on a tensor rank."""
    ffn = model.ffn / plan.tp
    return [(model.hidden, (model.matrices - 1) * ffn), (ffn, model.hidden)]


def expert_seconds(model, plan, machine, rate):
    """Return (forward, backward) of a GPU's experts, which share the tokens of all ranks evenly."""
    count = max(1, model.experts // plan.ep)
    tokens = plan.tokens * model.top_k / plan.tp / count
    h, ffn = model.hidden, model.expert_ffn
    return add(*(linear_seconds(tokens, K, N, machine, rate, count, plan.frozen)
                 for K, N in ((h, (model.matrices - 1) * ffn), (ffn, h))))


def attention_seconds(model, plan, machine, c):
    """Return (forward, backward) of attention's core, causal. FlashAttention computes only the
    needed half, and 2.5 times as much in backward. The unfused kernel computes all scores, and
    moves them through memory.
    """
    sequence = plan.attended or model.attended(plan.sequence)
    pairs = plan.tokens * sequence * model.heads / plan.tp  # of a query and a key
    flops = 4 * pairs * model.head_size
    if plan.attention != "unfused":
        best = c.flash_hopper if machine.peak_fp8 else c.flash
        part = c.flash_tuned if plan.attention == "tuned" else best
        seconds = flops / 2 / (machine.bf16 * part)
        return seconds + LAUNCH, 2.5 * seconds + 2 * LAUNCH
    uneven = c.misaligned if model.head_size % 8 else 1.0
    computing = uneven * flops / product_rate(machine, c)
    moving = pairs * SCORE / (COPY * machine.memory_bandwidth)
    return computing + moving + 4 * LAUNCH, 2 * computing + 1.5 * moving + 8 * LAUNCH


def other_seconds(model, plan, machine, c, sparse=False):
    """Return (forward, backward) of memory-bound work: norms, activations, residuals, dropout,
    casts.

    A layer keeps 34 bytes per number. Tensor ranks divide 24 of them, and all of them with sequence
    parallelism (Korthikanti et al. 2022, equations 2 and 4). The work is divided in the same way.
    """
    t = plan.tp
    part = 1 / t if plan.sequence_parallel else 10 / 34 + 24 / 34 / t
    nbytes = plan.tokens * model.hidden * c.other_bytes * part
    if sparse:  # of each expert's token: sorted, its activation, and added up
        routed = plan.tokens * model.top_k / t
        experts = c.expert_bytes * (FUSED if plan.fused_experts else 1)
        nbytes += routed * experts * (model.hidden / 4 + model.matrices * model.expert_ffn)
    seconds = nbytes / (COPY * machine.memory_bandwidth)
    return seconds / 3 + 4 * LAUNCH, seconds * 2 / 3 + 6 * LAUNCH


def head_work(model, plan, machine, c):
    """Return the Work of the last product and the loss: products in bf16, logits in float32."""
    vocab = model.vocab / plan.tp
    logits = plan.tokens * vocab * LOGIT / (COPY * machine.memory_bandwidth)
    products = linear_seconds(plan.tokens, model.hidden, vocab, machine,
                              product_rate(machine, c), frozen=plan.frozen)
    return Work(products, other=(logits / 2, logits / 2))


def rerun_seconds(work, plan):
    """Return the seconds of the part of a layer's forward that runs twice."""
    seconds = {"none": 0.0, "full": work.forward, "selective": work.attention[0],
               "operators": work.products[0] / 2 + work.other[0]}[plan.recompute]
    return plan.recomputed * seconds


def optimizer_seconds(numbers, plan, machine):
    """Return the seconds of the optimizer's step for this many parameters, sharded or not."""
    numbers = 0 if plan.frozen else numbers / (plan.sharders if plan.zero else 1)
    if plan.offload:  # 28 bytes a parameter in the host's memory, by DeepSpeed's vectorised Adam
        shared = min(machine.node, plan.gpus) / machine.host_memory
        return numbers * (4 / machine.host + 28 * shared)
    return ADAM * numbers / machine.memory_bandwidth
