"""What a layout costs, by formulas: bytes held, bytes sent, seconds of a step.

All of it is of the first rank: the first stage, data rank 0, tensor rank 0. Weights, gradients and
Adam's moments are float32 (autocast), as the trainer has them. Layouts with zero=3 are lab 07's.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ranklab import hardware
from ranklab.hybrid.layout import Layout
from ranklab.meter import Memory
from ranklab.models.gpt import GPTConfig
from ranklab.pipeline_parallel.stages import gpt_costs, split_stages
from ranklab.pipeline_parallel.actions import places
from ranklab.pipeline_parallel.formulas import flush_bubble, zb_h1_bubble
from ranklab.ranks import shard_range

EFFICIENCY = 0.65  # of a GPU's peak, in the matrix products of a large GPT
SPARE = 2e9  # bytes of a GPU for CUDA, NCCL, and gaps between tensors


@dataclass(frozen=True)
class Job:
    """What is trained, whatever the layout.

    batch        sequences of n_ctx tokens in a step, over all ranks
    micro_batch  sequences in one forward
    precision    of matrix products: "bf16", "fp16" or "fp32"
    """

    config: GPTConfig
    batch: int
    micro_batch: int = 1
    precision: str = "bf16"

    @property
    def tokens(self):
        """Of a micro-batch."""
        return self.micro_batch * self.config.n_ctx

    @property
    def width(self):
        """Bytes of a number that a matrix product takes and gives."""
        return 4 if self.precision == "fp32" else 2

    def micro_batches(self, layout):
        """How many go through each pipeline in a step."""
        return self.batch // (layout.dp * self.micro_batch)


@dataclass(frozen=True)
class Cluster:
    """GPUs in a row, and what joins them.

    links  levels from the inside: (so many ranks in a row, bytes/s of each rank in and out). Ranks
           0 to 7 share a node, 0 to 127 a rack; the last level joins all
    """

    gpus: int
    gpu: hardware.Device = hardware.A100
    links: tuple = ((8, 300e9), (128, 25e9))

    @property
    def room(self):
        """Bytes of a GPU that a job may take."""
        return self.gpu.memory_bytes - SPARE

    def bandwidth(self, mesh, axis):
        """Bytes/s along an axis of a Mesh: those of the innermost level that no group crosses."""
        names = list(mesh.axes)
        span = 1  # ranks in a row from the first of a group to the last, with those between
        for name in names[names.index(axis):]:
            span *= mesh.axes[name]
        for ranks, speed in self.links:
            if ranks % span == 0 or ranks >= mesh.size:
                return speed
        return self.links[-1][1]


# --- what the first rank has ----------------------------------------------------------------------

class Share(NamedTuple):
    """What of the model a rank of the pipeline has."""

    stages: dict  # number of a stage -> blocks in it
    embedding: bool
    head: bool
    messages: int  # that it sends for each micro-batch, forward and backward together

    @property
    def blocks(self):
        return sum(self.stages.values())


def shares(config, layout):
    """The Share of each rank of the pipeline."""
    return _shares(config, layout.pp, layout.virtual, layout.schedule)


@functools.lru_cache(maxsize=256)  # a search asks for the same pipeline again and again
def _shares(config, pp, virtual, schedule):
    place = places(actions_of(pp, virtual, schedule, 2 * pp))
    layers, last, found = _split(config, len(place)), max(place), []
    for rank in range(pp):
        mine = [stage for stage in place if place[stage] == rank]
        blocks = {stage: len(layers[stage]) - (stage == 0) - (stage == last) for stage in mine}
        messages = [place.get(stage + step, rank) != rank for stage in mine for step in (1, -1)]
        found.append(Share(blocks, 0 in mine, last in mine, sum(messages)))
    return found


@functools.lru_cache(maxsize=64)
def _split(config, stages):
    return split_stages(gpt_costs(config), stages)


@functools.lru_cache(maxsize=256)
def actions_of(pp, virtual, schedule, pieces):
    return Layout(pp=pp, virtual=virtual, schedule=schedule).new_schedule()(pp, pieces)


def vocabulary_rows(config, layout):
    """Rows of the embedding on the first tensor rank."""
    return len(shard_range(config.vocab_size, 0, layout.tp))


def parameters_of(config, layout, share):
    """(in a block, in all that is in no block): how many numbers a rank with this Share has."""
    C = config.n_embd
    matrix = vocabulary_rows(config, layout) * C * (share.embedding or share.head)
    return 12 * C * C // layout.tp + 2 * C, matrix + C * share.head


# --- bytes sent -----------------------------------------------------------------------------------

def layout_traffic(job, layout):
    """{"data": bytes, "tensor": bytes, "pipeline": bytes} that the first rank sends in a step.

    As Traffic counts them, but for what is small: the number of targets, the norm of all gradients
    (8 bytes each), and the rounding of rings that do not divide. With zero=3 and virtual stages it
    is some percent more, because what is in no block is gathered for each stage.
    """
    config, share = job.config, shares(job.config, layout)[0]
    pieces, C, dp = job.micro_batches(layout), config.n_embd, layout.dp
    hidden = 4 * job.tokens * C // (layout.tp if layout.sequence_parallel else 1)
    tied = 4 * vocabulary_rows(config, layout) * C * (share.embedding != share.head)
    block, root = parameters_of(config, layout, share)
    n = share.blocks * block + root
    gradients = 2 * n  # an all-reduce, or a reduce-scatter of them and an all-gather of weights
    if layout.zero == 3:  # gathered twice, reduced once, for each micro-batch
        gradients = 3 * pieces * n + (layout.pp - 1) * root
    return {"data": 4 * (dp - 1) * gradients // dp,
            "tensor": pieces * ring(layout.tp, tensor_sums(job, layout, share)),
            "pipeline": pieces * hidden * share.messages + tied // (dp if layout.zero == 3 else 1)}


def ring(ranks, nbytes):
    """Bytes that each rank sends in an all-reduce."""
    return int(2 * (ranks - 1) / ranks * nbytes)


def tensor_sums(job, layout, share):
    """Bytes that a micro-batch has in all-reduces of the tensor ranks. The two halves of one, with
    sequence parallelism, count as one.
    """
    x, sequence = job.tokens * job.config.n_embd, layout.sequence_parallel
    enters, leaves = 4 * x, job.width * x  # autocast: a product gives 2 bytes, a norm 4
    block = 2 * (enters + leaves)
    if layout.recompute:  # what attention needs once more; the MLP's sum is not needed again
        block += leaves / 2 + enters if sequence else leaves
    norms = 4 * job.config.n_embd * (2 * share.blocks + share.head) * sequence
    loss = 12 * job.tokens * share.head
    return share.blocks * block + 4 * x * (share.embedding + share.head) + norms + loss


# --- bytes held -----------------------------------------------------------------------------------

def layout_memory(job, layout):
    """The Memory of the first rank at the largest of all moments(): states as they are, but for a
    few bytes for each tensor, activations within a few percent.

    Gradients count twice: fresh from autograd, and in the buckets in which they will travel.
    """
    return max(moments(job, layout).values(), key=lambda memory: memory.total)


def moments(job, layout):
    """{moment: Memory}: where the first rank may hold most."""
    config, share = job.config, shares(job.config, layout)[0]
    x, V, C = job.tokens * config.n_embd, vocabulary_rows(config, layout), config.n_embd
    tp, e, again = layout.tp, job.width, layout.recompute
    outside = 4 * x // (tp if layout.sequence_parallel else 1)  # hidden states, in float32
    copies, inside = block_bytes(job, layout)
    kept = outside if again else inside + copies  # of a block, for backward
    waiting = in_flight(job, layout, share, kept)
    gradient = 16 * C * C // tp  # of the MLP's matrix
    casts = 6 * x if e == 2 else 0  # of what comes in and goes out; with what was cast
    found = {
        "a block runs backward": inside + copies + max(gradient, casts) if again
        else outside + gradient,
        "a block runs forward": 0 if again else outside + 2 * e * x,
        "the loss runs backward": share.head * 12 * V * job.tokens,  # the logits; float32, thrice
        # Within a stage's forward autocast makes one copy of each matrix, and keeps it.
        "a stage runs forward": again * (max(share.stages.values()) * copies + outside
                                         + 2 * e * x + 4 * e * x // tp),
    }
    return {name: states(job, layout, share, waiting + n) for name, n in found.items()}


def states(job, layout, share, activations):
    """The Memory of a rank with this Share."""
    config, dp = job.config, layout.dp
    block, root = parameters_of(config, layout, share)
    n = 4 * (share.blocks * block + root)
    tables = 8 * config.n_ctx * config.head_size * share.blocks  # of rotary positions
    if layout.zero == 3:  # whole: a block, its gradients, the next block, and what is in no block
        return Memory(n // dp, n // dp, 2 * n // dp, tables, 4 * (root + 3 * block), 0, activations)
    return Memory(n, n, 2 * n // (dp if layout.zero else 1), tables, 0, n, activations)


def block_bytes(job, layout):
    """(autocast's copies of a block's matrices, all else that it keeps for its backward)"""
    config, tp = job.config, layout.tp
    x, e = job.tokens * config.n_embd, job.width
    outside = 8 * (x + 2 * job.tokens)  # inputs of two norms, and their mean and deviation
    # In float32 q, k and v have one input; autocast casts it for each of them.
    entering = 8 * x
    inside = 12 * x * e + 4 * job.tokens * config.n_head  # q, k, v, output; the MLP's; log-sums
    copies = 0 if e == 4 else 24 * config.n_embd**2 // tp
    return copies, outside // (tp if layout.sequence_parallel else 1) + entering + inside // tp


def in_flight(job, layout, share, kept):
    """Bytes that wait for backward at the schedule's worst moment, and outputs on their way."""
    x = 4 * job.tokens * job.config.n_embd // (layout.tp if layout.sequence_parallel else 1)
    C, V = job.config.n_embd, vocabulary_rows(job.config, layout)
    last = 2 * x + 4 * V * job.tokens + (2 * V * C if job.width == 2 else 0)  # head and loss
    pieces, P = job.micro_batches(layout), layout.pp
    of_stage = {stage: blocks * kept + x for stage, blocks in share.stages.items()}
    if share.head:
        of_stage[max(of_stage)] += last
    enough = pieces if layout.schedule == "gpipe" else min(pieces, 2 * P)  # to fill the pipeline
    held = most = 0
    for action in actions_of(P, layout.virtual, layout.schedule, enough)[0]:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * of_stage[action.stage]
        most = max(most, held)
    # Messages live on until they are waited for.
    sent = min(P, enough - P) * x if P > 1 and layout.schedule != "gpipe" and enough > P else 0
    return most + sent + 16 * job.batch // layout.dp * job.config.n_ctx


# --- seconds --------------------------------------------------------------------------------------

class Seconds(NamedTuple):
    """Where a step's time goes."""

    computing: float
    bubble: float
    tensor: float
    pipeline: float
    data: float

    @property
    def total(self):
        return sum(self)


def layout_seconds(job, layout, cluster):
    """Seconds of a step, by what it is spent on.

    The slowest rank of the pipeline computes at EFFICIENCY of its GPU's peak. Tensor ranks wait for
    each of their messages, so these are part of a stage's work, and the bubble grows with them.
    Hybrid sends gradients when the pipeline is empty: data traffic is exposed as a whole, and
    messages of the first stage are taken to be.
    Left out: latency, the optimizer's step, norms and other work that memory bounds, stragglers.
    """
    pieces, peak = job.micro_batches(layout), cluster.gpu.peak_flops(dtype_of(job.precision))
    flops = slowest_flops(job.config, layout) * job.tokens / layout.tp
    computing = pieces * flops / (EFFICIENCY * peak)
    sent = layout_traffic(job, layout)
    seconds = {axis: sent[axis] / cluster.bandwidth(layout.mesh, axis) for axis in sent}
    part = bubble_of(layout, pieces)
    bubble = (computing + seconds["tensor"]) * part / (1 - part)
    return Seconds(computing, bubble, **{axis: seconds[axis]
                                         for axis in ("tensor", "pipeline", "data")})


def dtype_of(precision):
    return torch.float32 if precision == "fp32" else torch.bfloat16


def bubble_of(layout, pieces):
    """The bubble: a part of the time of all ranks."""
    if layout.schedule in ("zb-h1", "zb-v"):
        return zb_h1_bubble(layout.pp, pieces)
    return flush_bubble(layout.pp, pieces, layout.virtual)


def slowest_flops(config, layout):
    """FLOPs of a token, forward and backward, on the rank of the pipeline that has most."""
    _, block, *_, head = gpt_costs(config)
    times = 4 if layout.recompute else 3
    return max(share.blocks * block * times + share.head * head * 3
               for share in shares(config, layout))
