"""What a layout costs, by formulas: bytes sent, seconds of a step. Bytes held are in memory.py.

All of it is of the first rank: the first stage, data rank 0, tensor rank 0. Weights and gradients
are float32, and autocast has matrix products in job.precision, as the trainer does it.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ranklab import hardware
from ranklab.context_parallel.formulas import ring_bytes
from ranklab.hybrid.layout import Layout
from ranklab.mesh import Mesh
from ranklab.models.gpt import GPTConfig
from ranklab.pipeline_parallel.actions import places
from ranklab.pipeline_parallel.formulas import flush_bubble, zb_h1_bubble
from ranklab.pipeline_parallel.stages import gpt_costs, split_stages
from ranklab.ranks import shard_range
from ranklab.tensor_parallel.formulas import summed_bytes

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

    def on_a_rank(self, layout):
        """The job with sequences of the tokens that a context rank has of them."""
        n_ctx = self.config.n_ctx // layout.cp
        return replace(self, config=replace(self.config, n_ctx=n_ctx)) if layout.cp > 1 else self

    def micro_batches(self, layout):
        """How many go through each pipeline in a step."""
        return self.batch // (layout.dp * layout.ep * self.micro_batch)


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
    def memory_budget(self):
        """Bytes of a GPU that a job may take."""
        return self.gpu.memory_bytes - SPARE

    def bandwidth(self, mesh, axis):
        """Bytes/s that each rank sends along an axis of a Mesh: of the narrowest level that any of
        its groups crosses.

        Where several ranks of a group share a node, each has a card, and NCCL sends a part of the
        ring's bytes through each. A pipeline's message has one sender, and takes one card.
        """
        return _bandwidth(self.links, tuple(mesh.axes.items()), axis)


@functools.lru_cache(maxsize=4096)  # a search asks for the same few meshes again and again
def _bandwidth(links, axes, axis):
    narrowest = math.inf
    for ranks in Mesh(dict(axes)).all_along(axis):
        before = 1  # ranks in a row that the level below joins
        for row, speed in links:
            cards = 1 if axis == "pipeline" else len(ranks) // len({r // before for r in ranks})
            narrowest = min(narrowest, cards * speed)
            if len({rank // row for rank in ranks}) == 1:
                break
            before = row
    return narrowest


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


def hidden_bytes(job, layout):
    """A micro-batch's hidden states between two layers, on a rank: they are float32."""
    return 4 * job.tokens * job.config.n_embd // (layout.tp if layout.sequence_parallel else 1)


def parameters_of(config, layout, share):
    """(in a block, in all that is in no block): how many numbers a rank with this Share has."""
    C = config.n_embd
    matrix = vocabulary_rows(config, layout) * C * (share.embedding or share.head)
    return 12 * C * C // layout.tp + 2 * C, matrix + C * share.head


# --- bytes sent -----------------------------------------------------------------------------------

def layout_traffic(job, layout):
    """{"data": bytes, "tensor": bytes, "pipeline": bytes} that the first rank sends in a step; with
    cp "context", too, which has the gradients where dp is 1.

    As Traffic counts them, but for what is small: the number of targets, the norm of all gradients
    (8 bytes each), and the rounding of rings that do not divide. With zero=3 and virtual stages it
    is some percent more, because what is in no block is gathered for each stage.
    """
    config, share, whole = job.config, shares(job.config, layout)[0], job.tokens
    job = job.on_a_rank(layout)
    pieces, C, R = job.micro_batches(layout), config.n_embd, layout.dp * layout.cp
    tied = 4 * vocabulary_rows(config, layout) * C * (share.embedding != share.head)
    block, root = parameters_of(config, layout, share)
    n = share.blocks * block + root
    gradients = 2 * n  # an all-reduce, or a reduce-scatter of them and an all-gather of weights
    if layout.zero == 3:  # gathered twice, reduced once, for each micro-batch
        gradients = 3 * pieces * n + (layout.pp - 1) * root
    sent = {"data": 4 * (R - 1) * gradients // R,
            "tensor": pieces * ring(layout.tp, tensor_sums(job, layout, share)),
            "pipeline": pieces * hidden_bytes(job, layout) * share.messages
                        + tied // (R if layout.zero == 3 else 1)}
    if layout.cp > 1:
        blocks, heads = pieces * share.blocks, config.n_head // layout.tp
        keys = blocks * ring_bytes(whole, heads, config.head_size, layout.cp, job.width)
        if layout.recompute:
            keys += blocks * ring_bytes(whole, heads, config.head_size, layout.cp, job.width, False)
        sent["context"] = keys + (sent["data"] if layout.dp == 1 else 0)
        sent["data"] *= layout.dp > 1
    return sent


def ring(ranks, nbytes):
    """Bytes that each rank sends in an all-reduce."""
    return int(2 * (ranks - 1) / ranks * nbytes)


def tensor_sums(job, layout, share):
    """Bytes that a micro-batch has in all-reduces of the tensor ranks."""
    sequence, leaves = layout.sequence_parallel, job.width * job.tokens * job.config.n_embd
    again = 0
    if layout.recompute:  # what attention needs once more; the MLP's sum is not needed again
        again = leaves / 2 + 4 * job.tokens * job.config.n_embd if sequence else leaves
    return share.blocks * again + summed_bytes(
        job.config.n_embd, job.tokens, share.blocks, share.embedding, share.head, sequence,
        leaving=job.width)


# --- seconds --------------------------------------------------------------------------------------

class Seconds(NamedTuple):
    """Where a step's time goes."""

    computing: float
    weights: float  # casts of them, and sums of their gradients: once for each micro-batch
    bubble: float
    tensor: float
    pipeline: float
    data: float

    @property
    def total(self):
        return sum(self)


def layout_seconds(job, layout, cluster):
    """The Seconds of a step.

    The slowest rank of the pipeline computes at EFFICIENCY of its GPU's peak. Each micro-batch, of
    whatever size, reads and writes all weights and gradients once more: so larger ones take less
    time, and more memory. Tensor ranks wait for each of their messages. The bubble grows with both.
    Messages along the other axes are taken to be exposed as a whole: Hybrid sends gradients when
    the pipeline is empty, but part of the first stage's messages travels while it computes.
    Left out: latency, the optimizer's step, norms and other work that memory bounds, stragglers.
    """
    pieces, share = job.micro_batches(layout), shares(job.config, layout)[0]
    peak = cluster.gpu.peak_flops(torch.float32 if job.precision == "fp32" else torch.bfloat16)
    flops = pieces * job.tokens * slowest_flops(job.config, layout) / layout.tp
    computing = flops / (EFFICIENCY * peak)
    block, root = parameters_of(job.config, layout, share)
    # A sum reads two float32 and writes one. Autocast reads 4 bytes and writes 2, or the reverse.
    nbytes = (12 + 12 * (job.width == 2)) * (share.blocks * block + root)
    weights = pieces * nbytes / cluster.gpu.memory_bandwidth
    exposed = {axis: nbytes / cluster.bandwidth(layout.mesh, axis)
               for axis, nbytes in layout_traffic(job, layout).items()}
    part = bubble_of(layout, pieces)
    bubble = (computing + weights + exposed["tensor"]) * part / (1 - part)
    return Seconds(computing, weights, bubble, **exposed)


def bubble_of(layout, pieces):
    """The bubble, as a part of the time of all ranks; ZB-V's is taken to be ZB-H1's."""
    if layout.schedule in ("zb-h1", "zb-v"):
        return zb_h1_bubble(layout.pp, pieces)
    return flush_bubble(layout.pp, pieces, layout.virtual)


def slowest_flops(config, layout):
    """FLOPs of a token, forward and backward, on the rank of the pipeline that has most."""
    _, block, *_, head = gpt_costs(config)
    times = 4 if layout.recompute else 3
    return max(share.blocks * block * times + share.head * head * 3
               for share in shares(config, layout))
