"""What a layout sends, by formulas. memory.py computes what it holds, the planner its seconds.

All formulas are for the first rank: the first stage, data rank 0, tensor rank 0. As in the trainer,
weights and gradients are float32, and autocast runs matrix products in job.precision.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from ranklab.expert_parallel.layer import MoEConfig
from ranklab.expert_parallel.traffic import even_bytes
from ranklab.formulas.context_parallel import ring_bytes
from ranklab.formulas.tensor_parallel import summed_bytes
from ranklab.hybrid.shares import hidden_bytes, mlp_numbers, parameters_of, shares, vocabulary_rows
from ranklab.models.gpt import GPTConfig


@dataclass(frozen=True)
class Job:
    """The model and batch to train, independent of the layout.

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
        """The tokens in a micro-batch."""
        return self.micro_batch * self.config.n_ctx

    @property
    def width(self):
        """The bytes of a number in the inputs and outputs of matrix products."""
        return 4 if self.precision == "fp32" else 2

    def on_a_rank(self, layout):
        """Return the job with the shorter sequences of one context rank."""
        n_ctx = self.config.n_ctx // layout.cp
        return replace(self, config=replace(self.config, n_ctx=n_ctx)) if layout.cp > 1 else self

    def micro_batches(self, layout):
        """Return the number of micro-batches that go through each pipeline in a step."""
        return self.batch // (layout.dp * layout.ep * self.micro_batch)


def layout_traffic(job, layout):
    """Return {"data": bytes, "tensor": bytes, "pipeline": bytes} that the first rank sends in a
    step; with ep also "expert", and with cp also "context".

    These are the bytes that Traffic counts, except for small messages: the number of targets, the
    norm of all gradients (8 bytes each), loads of experts; and for rounding, if a ring's tensor
    does not divide evenly. With zero=3 and virtual stages a run sends some percent more, because
    parameters outside blocks are gathered for each stage. The formulas assume that all experts are
    chosen equally often, and that no token is dropped.
    """
    config, share, tokens = job.config, shares(job.config, layout)[0], job.tokens
    job = job.on_a_rank(layout)
    pieces, C = job.micro_batches(layout), config.n_embd
    tied = 4 * vocabulary_rows(config, layout) * C * (share.embedding != share.head)
    R = layout.dp * layout.cp if layout.zero == 3 else 1
    nbytes = Counter({"data": 0, "tensor": 0, "pipeline": 0})
    nbytes.update(gradient_bytes(job, layout, share))
    nbytes["tensor"] += pieces * ring(layout.tp, tensor_sums(job, layout, share))
    nbytes["pipeline"] += pieces * hidden_bytes(job, layout) * share.messages + tied // R
    if layout.cp > 1:
        blocks = pieces * share.blocks
        sizes = tokens, config.n_head // layout.tp, config.head_size, layout.cp, job.width
        nbytes["context"] += blocks * ring_bytes(*sizes)
        if layout.recompute:
            nbytes["context"] += blocks * ring_bytes(*sizes, backward=False)
    if layout.ep > 1:
        nbytes["expert"] += pieces * share.blocks * expert_bytes(job, layout)
    return dict(nbytes)


def gradient_bytes(job, layout, share):
    """Return {axis: bytes} of gradients and weights; bytes that travel along several axes together
    count as "data".
    """
    block, root = parameters_of(job.config, layout, share)
    n, nbytes = share.blocks * block + root, Counter()
    experts = share.blocks * mlp_numbers(job.config, layout)[1] if layout.ep > 1 else 0
    for axes, numbers in ((layout.axes_of_gradients, n - experts),
                          (layout.axes_of_experts, experts)):
        R = math.prod(layout.mesh.axes[axis] for axis in axes)
        gradients = 2 * numbers  # an all-reduce, or a reduce-scatter and an all-gather of weights
        if layout.zero == 3:  # for each micro-batch blocks are gathered twice, the root once
            M = job.micro_batches(layout)
            gradients = numbers and 3 * M * n - M * root + (layout.pp - 1) * root
        several = [axis for axis in axes if layout.mesh.axes[axis] > 1]
        nbytes[several[0] if len(several) == 1 else "data"] += 4 * (R - 1) * gradients // R
    return nbytes


def expert_bytes(job, layout):
    """Return the bytes that a rank sends to other expert ranks, in one block for a micro-batch.

    Rows are sent there and back in the compute type, and so are their gradients in backward. Before
    that, ranks tell each other how many rows they will send.
    """
    rows = even_bytes(job.tokens, job.config.top_k, job.config.n_embd, layout.ep, job.width, False)
    counts = 8 * job.config.n_expert * (layout.ep - 1) // layout.ep
    return 2 * rows + counts + layout.recompute * (rows + counts)


def ring(ranks, nbytes):
    """Return the bytes that each rank sends in an all-reduce."""
    return int(2 * (ranks - 1) / ranks * nbytes)


def tensor_sums(job, layout, share):
    """Return the bytes of the tensor ranks' all-reduces for a micro-batch."""
    sequence, outputs = layout.sequence_parallel, job.width * job.tokens * job.config.n_embd
    extra = 0  # of a block
    if layout.recompute:  # attention's sum is needed again; the MLP's is not
        extra = outputs / 2 + 4 * job.tokens * job.config.n_embd if sequence else outputs
    if isinstance(job.config, MoEConfig):  # its output is float32; a router's gradient is summed
        extra += (4 - job.width) * job.tokens * job.config.n_embd
        extra += 4 * job.config.n_expert * job.config.n_embd
    return share.blocks * extra + summed_bytes(
        job.config.n_embd, job.tokens, share.blocks, share.embedding, share.head, sequence,
        leaving=job.width)
