"""What a layout costs, by formulas: bytes sent, seconds of a step. Bytes held are in memory.py.

All of it is of the first rank: the first stage, data rank 0, tensor rank 0. Weights and gradients
are float32, and autocast has matrix products in job.precision, as the trainer does it.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ranklab import hardware
from ranklab.context_parallel.formulas import ring_bytes
from ranklab.expert_parallel.layer import MoEConfig
from ranklab.expert_parallel.traffic import even_bytes
from ranklab.hybrid.shares import (
    hidden_bytes, mlp_numbers, parameters_of, shares, vocabulary_rows,
)
from ranklab.mesh import Mesh
from ranklab.models.gpt import GPTConfig
from ranklab.pipeline_parallel.formulas import flush_bubble, zb_h1_bubble
from ranklab.pipeline_parallel.stages import gpt_costs
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


# --- bytes sent -----------------------------------------------------------------------------------

def layout_traffic(job, layout):
    """{"data": bytes, "tensor": bytes, "pipeline": bytes} that the first rank sends in a step; with
    ep "expert" and with cp "context", too.

    As Traffic counts them, but for what is small: the number of targets, the norm of all gradients
    (8 bytes each), loads of experts, and the rounding of rings that do not divide. With zero=3 and
    virtual stages it is some percent more, because what is in no block is gathered for each stage.
    All experts are taken to be chosen as often, and no token to be dropped.
    """
    config, share, whole = job.config, shares(job.config, layout)[0], job.tokens
    job = job.on_a_rank(layout)
    pieces, C = job.micro_batches(layout), config.n_embd
    tied = 4 * vocabulary_rows(config, layout) * C * (share.embedding != share.head)
    R = layout.dp * layout.cp if layout.zero == 3 else 1
    sent = Counter({"data": 0, "tensor": 0, "pipeline": 0})
    sent.update(gradient_bytes(job, layout, share))
    sent["tensor"] += pieces * ring(layout.tp, tensor_sums(job, layout, share))
    sent["pipeline"] += pieces * hidden_bytes(job, layout) * share.messages + tied // R
    if layout.cp > 1:
        blocks, heads = pieces * share.blocks, config.n_head // layout.tp
        keys = blocks * ring_bytes(whole, heads, config.head_size, layout.cp, job.width)
        if layout.recompute:
            keys += blocks * ring_bytes(whole, heads, config.head_size, layout.cp, job.width, False)
        sent["context"] += keys
    if layout.ep > 1:
        sent["expert"] += pieces * share.blocks * expert_bytes(job, layout)
    return dict(sent)


def gradient_bytes(job, layout, share):
    """{axis: bytes}: what travels along several axes together is "data"'s."""
    block, root = parameters_of(job.config, layout, share)
    n, sent = share.blocks * block + root, Counter()
    experts = share.blocks * mlp_numbers(job.config, layout)[1] if layout.ep > 1 else 0
    for axes, numbers in ((layout.axes_of_gradients, n - experts),
                          (layout.axes_of_experts, experts)):
        R = math.prod(layout.mesh.axes[axis] for axis in axes)
        gradients = 2 * numbers  # an all-reduce, or a reduce-scatter and an all-gather of weights
        if layout.zero == 3:  # gathered twice, reduced once, for each micro-batch
            gradients = numbers and 3 * job.micro_batches(layout) * n + (layout.pp - 1) * root
        several = [axis for axis in axes if layout.mesh.axes[axis] > 1]
        sent[several[0] if len(several) == 1 else "data"] += 4 * (R - 1) * gradients // R
    return sent


def expert_bytes(job, layout):
    """That a rank sends in a block for a micro-batch to those that have other experts.

    Rows go there and come back as matrix products take and give them; in backward gradients do.
    Before, ranks tell how many rows they send.
    """
    rows = even_bytes(job.tokens, job.config.top_k, job.config.n_embd, layout.ep, job.width, False)
    counts = 8 * job.config.n_expert * (layout.ep - 1) // layout.ep
    return 2 * rows + counts + layout.recompute * (rows + counts)


def ring(ranks, nbytes):
    """Bytes that each rank sends in an all-reduce."""
    return int(2 * (ranks - 1) / ranks * nbytes)


def tensor_sums(job, layout, share):
    """Bytes that a micro-batch has in all-reduces of the tensor ranks."""
    sequence, leaves = layout.sequence_parallel, job.width * job.tokens * job.config.n_embd
    more = 0
    if layout.recompute:  # what attention needs once more; the MLP's sum is not needed again
        more = leaves / 2 + 4 * job.tokens * job.config.n_embd if sequence else leaves
    if isinstance(job.config, MoEConfig):  # float32 leaves it, and a router's gradient is summed
        more += (4 - job.width) * job.tokens * job.config.n_embd
        more += 4 * job.config.n_expert * job.config.n_embd
    return share.blocks * more + summed_bytes(
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
    expert: float = 0.0
    context: float = 0.0

    @property
    def total(self):
        return sum(self)


def layout_seconds(job, layout, cluster):
    """The Seconds of a step.

    The slowest rank of the pipeline computes at EFFICIENCY of its GPU's peak. Each micro-batch, of
    whatever size, reads and writes all weights and gradients once more: so larger ones take less
    time, and more memory. Tensor and expert ranks wait for each of their messages. The bubble grows
    with all of that. Messages along the other axes are taken to be exposed as a whole: Hybrid sends
    gradients when the pipeline is empty, but part of the first stage's messages travels while it
    computes.
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
    waits = exposed["tensor"] + exposed.get("expert", 0)
    bubble = (computing + weights + waits) * part / (1 - part)
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
