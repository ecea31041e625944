"""memory_per_gpu: the bytes that the fullest GPU holds, in the tool of the plan.

Megatron-LM: bf16 weights, float32 main gradients and optimizer: 18 bytes a parameter, 6 + 12/d with
the distributed optimizer on d data ranks. With 16-bit gradients, 2 fewer: the float32 copy that
the optimizer then makes of its share exists only during its step, after activations are freed.
DeepSpeed: ZeRO's 16 bytes (lab 06), and float32 sums of gradients with BF16_Optimizer. torchtitan:
FSDP2 with float32 weights. Ours: layout_memory of lab 12's trainer.
"""

from dataclasses import dataclass

from ranklab.formulas.pipeline_parallel import (
    gpipe_in_flight, interleaved_in_flight, one_f_one_b_in_flight, zb_h1_in_flight,
)
from ranklab.formulas.zero import zero_memory
from ranklab.planner.constants import CONSTANTS

# Bytes of a parameter: weight, main gradient, optimizer. With 16-bit gradients Megatron's guide has
# 20, and 4 + 16/d (Megatron-LM d98e8a6, docs/user-guide/features/dist_optimizer.md): it counts the
# float32 copy (distrib_optimizer.py: shard_model_grad.float()) that zero_grad frees before the next
# forward. Measured peaks are 0.9% off without the copy, and 5.9% with it (runs_zero_bubble.csv).
MEGATRON = (2, 4, 12)


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU.

    logits      of the last stage: 16 bits, float32 for the loss, and their gradient
    buffers     weights gathered for a layer, gradients in transit, messages, and temporary
                tensors of an unfused optimizer
    context     CUDA and NCCL
    allowance   gaps between tensors: a fraction of activations and logits
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    context: float
    allowance: float

    @property
    def total(self):
        return sum(vars(self).values())

    def reading(self, kind="nvidia-smi"):
        """Return the bytes as nvidia-smi counts them. Torch's "reserved" bytes lack the context,
        and its "allocated" bytes also lack the gaps.
        """
        return self.total - (kind != "nvidia-smi") * self.context - (
            kind == "allocated") * self.allowance


def memory_per_gpu(model, plan, machine, tool=None, constants=CONSTANTS):
    """Return the GpuMemory of the pipeline rank that holds the most.

    states       sharded over plan.sharders, but experts over the ranks with the same experts
    activations  of the layers of a stage, for each micro-batch in flight; with recompute also what
                 one layer keeps when it runs again without recomputation, and as much again for
                 the gradients
    logits       8 bytes each on the last stage: 16 bits, float32, and a gradient in 16 bits; 12
                 bytes with torch's own loss, which has a gradient in float32 besides
    tool         megatron, torchtitan, deepspeed or ours; None: plan.tool
    Lab: 13
    """
    tool, memories = tool or plan.tool, []
    if tool == "ours":
        return ours(model, plan, constants)
    layer_bytes = kept_bytes(model, plan, tool)
    rerun_bytes = 2 * kept_bytes(model, plan, tool, "none") if plan.recompute != "none" else 0
    stages = plan.stages(model.layers)
    # among ranks with equally many layers the first has the most micro-batches in flight
    for rank in {0, min(1, plan.pp - 1), stages.index(max(stages)), plan.pp - 1}:
        numbers, experts = numbers_of(model, plan, rank)
        dense = states(plan, tool, numbers, plan.sharders)
        sparse = states(plan, tool, experts, max(1, plan.copies * plan.tp // plan.ep))
        activations = in_flight(plan, rank) * stages[rank] * layer_bytes + rerun_bytes
        logits = (12 if tool == "torchtitan" else 8) * plan.tokens * model.vocab / plan.tp
        logits *= rank == plan.pp - 1
        weights, gradients, optimizer = map(sum, zip(dense, sparse))
        memories.append(GpuMemory(
            weights, gradients, optimizer * (not plan.offload), activations, logits,
            buffer_bytes(model, plan, tool, numbers), constants.context_bytes,
            constants.gaps * (activations + logits)))
    return max(memories, key=lambda memory: memory.total)


def fits(model, plan, machine, tool=None, constants=CONSTANTS):
    """Return whether the plan fits on a GPU, with no memory kept free."""
    return memory_per_gpu(model, plan, machine, tool, constants).total <= machine.memory_bytes


def numbers_of(model, plan, rank):
    """Return (parameters outside experts, parameters of experts) on a GPU of this pipeline rank.
    """
    layers = plan.stages(model.layers)[rank]
    dense = model.dense_of(layers, rank == 0)
    ends = (rank == 0) + (rank == plan.pp - 1)
    ends = min(ends, 1) if model.tied else ends
    numbers = (layers * model.block + dense * model.dense_ffn + ends * model.embedding) / plan.tp
    sparse = layers - dense if model.experts else 0
    return numbers, sparse * model.experts * model.expert / plan.ep


def states(plan, tool, numbers, ranks):
    """Return (weights, gradients, optimizer) in bytes, of `numbers` parameters over `ranks` ranks.
    """
    if plan.frozen:
        return 2 * numbers, 0.0, 0.0
    if tool == "torchtitan":  # also with ZeRO 2; its gathered weights are in buffer_bytes
        return tuple(zero_memory(3 if plan.zero else 0, numbers, ranks, 4, 4, 8))
    if tool == "deepspeed":
        sums = 4 if plan.gradient_bytes == 4 else 0  # BF16_Optimizer adds up in float32
        return tuple(zero_memory(plan.zero, numbers, ranks, 2, 2 + sums, 12))
    weight, _, optimizer = MEGATRON
    return tuple(zero_memory(plan.zero, numbers, ranks, weight, plan.gradient_bytes, optimizer))


def kept_bytes(model, plan, tool, recompute=None):
    """Return the bytes of a layer saved for the backward of one micro-batch (Korthikanti et al.
    2022, equations 1 to 6, with the sizes of this model; FlashAttention keeps no scores).

    torch.compile recomputes norms and the gate's product, and keeps only their inputs.
    Transformer Engine keeps the inputs of FP8 products as FP8, and attention's output in both
    forms.
    """
    t, h, recompute = plan.tp, model.hidden, recompute or plan.recompute
    ffn = model.top_k * model.expert_ffn + model.shared * model.expert_ffn or model.ffn
    compiled = tool == "torchtitan" and plan.fused and model.gated
    fp8 = tool == "megatron" and plan.precision != "bf16"
    # of a token: norms, inputs and residuals, which tensor ranks share with sequence parallelism
    replicated = (4 if compiled else 8 if model.gated else 10) * h - 2 * h * fp8
    # of a token: attention and MLP, which tensor ranks always share
    split = 2 * (2 * model.width + 2 * model.kv_heads * model.head_size) + model.width * fp8
    split += (6 if model.gated and not compiled else 4) * ffn - ffn * fp8
    split += (1 if fp8 else 2) * h * model.top_k
    scores = 5 * model.heads * plan.sequence if plan.attention == "unfused" else 4 * model.heads
    ranks = t if plan.sequence_parallel else 1
    whole = replicated / ranks + (split + scores) / t
    per_token = {"none": whole, "full": 2 * h / ranks,
                 "selective": replicated / ranks + split / t,
                 "operators": replicated / ranks / 2 + split / t / 2}[recompute]
    share = plan.recomputed if recompute != "none" else 1.0
    return plan.tokens * (share * per_token + (1 - share) * whole)


def in_flight(plan, rank):
    """Return the largest number of micro-batches in flight on a rank, for its whole share of the
    layers (lab 09).
    """
    P, M, V = plan.pp, plan.micro_batches, plan.virtual
    if P == 1:
        return 1
    if V > 1:
        return interleaved_in_flight(P, M, V)[rank] / V
    counts = {"gpipe": gpipe_in_flight, "zb-h1": zb_h1_in_flight}
    if plan.schedule == "zb-h2":  # twice 1F1B's (Qi et al. 2023, table 2)
        return min(2 * P - 1, M)
    return counts.get(plan.schedule, one_f_one_b_in_flight)(P, M)[rank]


def buffer_bytes(model, plan, tool, numbers):
    """Return the bytes of two layers' gathered weights and one layer's gradients (ZeRO-3, FSDP), or
    of a bucket; of messages; and of temporary tensors of DeepSpeed's optimizer: the gradient in
    float32 and two results of Adam.

    With sequence parallelism a layer holds the whole x: twice gathered, and twice before its sum.

    With a pipeline, torchtitan gathers a stage's weights and reduces its gradients once a step.
    With ZeRO 2 it also gathers once, but reduces the gradients of each micro-batch.
    """
    messages = plan.tokens * model.hidden * (4 * (plan.pp > 1) + 8 * plan.sequence_parallel)
    block = max(model.block, model.embedding) / plan.tp
    if tool == "deepspeed" and not plan.offload:
        messages += 12 * numbers / (plan.sharders if plan.zero else 1)
    if tool == "torchtitan" and plan.zero == 2:
        return 2 * numbers + plan.gradient_bytes * block + messages
    if tool == "torchtitan" and plan.zero and plan.pp > 1:
        return (2 + plan.gradient_bytes) * numbers + messages
    if plan.zero == 3:
        return 2 * 2 * block + plan.gradient_bytes * block + messages
    bucket = min(numbers, 250e6) * plan.gradient_bytes * (plan.copies > 1)
    return bucket + messages


def ours(model, plan, c):
    """Return the GpuMemory of the course's own trainer, by lab 12's formula. It has no gaps,
    because labs/jobs/ asks torch for expandable segments.

    Raises ValueError if the trainer lacks such a model.
    """
    from ranklab.hybrid import layout_memory  # here: it needs torch, and the planner does not
    from ranklab.planner.hybrid_jobs import hybrid_job

    memory = layout_memory(*hybrid_job(model, plan))
    states = memory.parameters + memory.gradients + memory.optimizer_state
    return GpuMemory(memory.parameters, memory.gradients, memory.optimizer_state,
                     memory.activations, 0.0, memory.total - states - memory.activations,
                     c.context_bytes, 0.0)
