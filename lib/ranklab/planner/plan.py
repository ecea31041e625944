"""A plan: the layout of a training run and its tool, without the model and the machine."""

import functools
import itertools
import math
import operator
from dataclasses import dataclass
from typing import NamedTuple

TOOLS = ("megatron", "torchtitan", "deepspeed", "ours")
RECOMPUTE = ("none", "selective", "operators", "full")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2")


class Span(NamedTuple):
    """The number of ranks of a group: in all, in one node, and in one island of nodes."""

    ranks: int
    node: int
    island: int


@dataclass(frozen=True)
class Plan:
    """dp x tp x pp x cp GPUs; tensor ranks are neighbours, then context, data, pipeline ranks.

    sequence, micro_batch  tokens in a sequence, sequences in one forward
    micro_batches          number that each pipeline runs in a step
    ep         number of data and context ranks that share the experts
    virtual    stages of a pipeline rank
    zero       0 to 3: optimizer state, gradients, weights are sharded (3 is FSDP)
    shard      over how many ranks; 0: all data and context ranks. The others hold copies
    recompute  none; selective: attention's core (Megatron); operators: half of the products
               (torchtitan's "op"); full: each block's forward
    recomputed the share of the blocks to which `recompute` applies
    attention  flash; tuned: kernels for H100 and later (cuDNN's, FlashAttention 3); unfused: the
               scores of all pairs go through memory (before 2022)
    attended   tokens of each sequence, if several are packed into one; 0: not packed
    precision  of matrix products: bf16, fp8, fp8-rowwise, mxfp8, nvfp4
    gradient_bytes  per number in the reduction of gradients
    gathered_bytes  per number of a block's weights in an all-gather: 2, or 1 if they are FP8
    hides      axes whose traffic overlaps computing: data, tensor, context, expert, pipeline;
               "tensor backward": only the tensor messages of input gradients
    fused      norms, activations and casts are fused (compiled, or the tool's kernels)
    fused_experts  tokens are sorted by expert in the kernels that send them (2026)
    graphs     kernels are launched from CUDA graphs, and not one by one from the host
    frozen     only adapters are trained, and not the weights (LoRA)
    outermost  the axis whose ranks are furthest apart: pipeline or data
    offload    the optimizer and its states are on the host (ZeRO-Offload)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence: int = 2048
    micro_batch: int = 1
    micro_batches: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    shard: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    recomputed: float = 1.0
    attention: str = "flash"
    attended: int = 0
    precision: str = "bf16"
    gradient_bytes: int = 4
    gathered_bytes: int = 2
    hides: tuple = ("data",)
    fused: bool = True
    fused_experts: bool = False
    graphs: bool = False
    frozen: bool = False
    tool: str = "megatron"
    outermost: str = "pipeline"
    offload: bool = False

    def __post_init__(self):
        for name in ("dp", "tp", "pp", "cp", "ep", "virtual", "micro_batch", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name, values in (("tool", TOOLS), ("recompute", RECOMPUTE), ("schedule", SCHEDULES),
                            ("outermost", ("pipeline", "data"))):
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(values)}")
        if self.zero not in range(4):
            raise ValueError(f"zero={self.zero} must be 0, 1, 2 or 3")

    @property
    def gpus(self):
        return self.dp * self.tp * self.pp * self.cp

    @property
    def copies(self):
        """The number of ranks with the same weights: all of the data and context axes."""
        return self.dp * self.cp

    @property
    def sharders(self):
        """The number of ranks that share sharded states."""
        return min(self.shard or self.copies, self.copies)

    @property
    def batch(self):
        """Sequences per step."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def tokens(self):
        """The tokens of a micro-batch on one context rank."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def rerun_share(self):
        """The share of the blocks whose whole forward, messages included, runs twice."""
        return self.recomputed * (self.recompute == "full")

    def words(self):
        """Return dp x tp x pp and options: "16 x 8 x 2, zero 1, full recompute, micro-batch 2"."""
        share = f" of {self.recomputed:.0%}" if self.recomputed < 1 else ""
        options = {f"cp {self.cp}": self.cp > 1, f"ep {self.ep}": self.ep > 1,
                f"{self.virtual} virtual": self.virtual > 1, f"zero {self.zero}": self.zero > 0,
                f"sharded over {self.shard}": self.shard > 0, "offload": self.offload,
                f"{self.recompute} recompute{share}": self.recompute != "none",
                f"micro-batch {self.micro_batch}": self.micro_batch > 1,
                f"{self.outermost} outermost": self.outermost != "pipeline"}
        return ", ".join([f"{self.dp} x {self.tp} x {self.pp}",
                          *(words for words, holds in options.items() if holds)])

    def stages(self, layers):
        """Return the layers of each pipeline rank, as evenly as possible. If two more layers would
        make them even, the first and last rank have one fewer, because they have the embedding and
        the head.
        """
        return stages(layers, self.pp)

    def span(self, axis, machine):
        """Return the Span of a group of this axis. "weights": the ranks with the same share of the
        weights (data and context); "shard": the ranks that share sharded states.
        """
        sizes = {"tensor": self.tp, "context": self.cp, "data": self.dp, "pipeline": self.pp}
        group = (axis,) if axis in sizes else ("context", "data")
        ranks = {"expert": self.ep, "weights": self.copies, "shard": self.sharders}.get(
            axis) or sizes[axis]
        if ranks == 1:
            return Span(1, 1, 1)
        order = ["tensor", "context", "data", "pipeline"]  # neighbours first
        if self.outermost == "data":
            order[2:] = ["pipeline", "data"]
        strides = dict(zip(order, itertools.accumulate((sizes[name] for name in order),
                                                       operator.mul, initial=1)))

        if axis == "expert":  # tensor ranks may share the experts as well
            sizes["data"] = self.gpus

        def ranks_in(row):  # ranks of a group in the same `row` GPUs
            product = math.prod(min(sizes[name], math.ceil(row / strides[name])) for name in group)
            return max(1, min(ranks, product, math.ceil(row / strides[group[0]])))

        return Span(ranks, ranks_in(machine.node),
                    ranks_in(machine.island) if machine.island else ranks)


@functools.cache
def stages(layers, pp):
    """Return Plan.stages as a tuple."""
    even, extra = divmod(layers, pp)
    if pp > 2 and extra and (layers + 2) % pp == 0:
        return (even, *(even + 1,) * (pp - 2), even)
    middle = range(max(1, (pp - extra) // 2), max(1, (pp - extra) // 2) + extra)
    return tuple(even + (rank % pp in middle or rank + pp in middle) for rank in range(pp))
