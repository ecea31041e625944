"""memory_per_gpu: the bytes that the fullest GPU holds, in the tool that is advised.

Megatron-LM: bf16 weights, float32 main gradients and optimizer: 18 bytes a parameter, 6 + 12/d with
the distributed optimizer; 2 fewer where gradients are reduced in 16 bits (grad_reduce_in_fp32).
DeepSpeed: ZeRO's 16 bytes (lab 06), and float32 sums of gradients with BF16_Optimizer. torchtitan:
FSDP2 of float32 weights. Ours: lab 12's layout_memory, of its trainer.
"""

from dataclasses import dataclass

from ranklab.pipeline_parallel.formulas import (
    gpipe_in_flight, interleaved_in_flight, one_f_one_b_in_flight, zb_h1_in_flight,
)
from ranklab.planner.constants import CONSTANTS
from ranklab.zero.memory import zero_memory

# Bytes of a parameter: weight, main gradient, optimizer. That is 18, and 6 + 12/d with the
# distributed optimizer on d data ranks (Megatron Core's guide, "Distributed Optimizer").
MEGATRON = (2, 4, 12)


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU.

    logits      of the last stage: 16 bits, float32 for the loss, and their gradient
    buffers     weights gathered for a layer, gradients on their way, messages, and what an
                optimizer that is not fused makes for its step
    context     CUDA and NCCL
    allowance   gaps between tensors: a part of what comes and goes
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

    def seen(self, kind="nvidia-smi"):
        """Bytes as nvidia-smi counts them; as torch "reserves" them: without the context; or as it
        has "allocated" them: without gaps, too.
        """
        return self.total - (kind != "nvidia-smi") * self.context - (
            kind == "allocated") * self.allowance


def memory_per_gpu(model, plan, machine, tool=None, constants=CONSTANTS):
    """The GpuMemory of the pipeline rank that holds most.

    states       sharded over plan.sharders; those of experts over the ranks with the same experts
    activations  of the layers of a stage, for each micro-batch in flight; with recompute also what
                 one layer keeps while it is computed again, and gradients as large
    logits       8 bytes each on the last stage: 16 bits, float32, and a gradient in 16 bits; 12 in
                 torch's own loss, whose gradient is in float32
    tool         megatron, torchtitan, deepspeed or ours; None: plan.tool
    lab          13
    """
    tool, found = tool or plan.tool, []
    if tool == "ours":
        return ours(model, plan, constants)
    kept = kept_bytes(model, plan, tool)
    again = 2 * kept_bytes(model, plan, tool, "none") if plan.recompute != "none" else 0
    stages = plan.stages(model.layers)
    # of ranks with as many layers the first has most micro-batches in flight
    for rank in {0, min(1, plan.pp - 1), stages.index(max(stages)), plan.pp - 1}:
        numbers, experts = numbers_of(model, plan, rank)
        dense = states(plan, tool, numbers, plan.sharders)
        sparse = states(plan, tool, experts, max(1, plan.copies * plan.tp // plan.ep))
        activations = in_flight(plan, rank) * stages[rank] * kept + again
        logits = (12 if tool == "torchtitan" else 8) * plan.tokens * model.vocab / plan.tp
        logits *= rank == plan.pp - 1
        weights, gradients, optimizer = map(sum, zip(dense, sparse))
        found.append(GpuMemory(
            weights, gradients, optimizer * (not plan.offload), activations, logits,
            buffer_bytes(model, plan, tool, numbers), constants.context_bytes,
            constants.gaps * (activations + logits)))
    return max(found, key=lambda memory: memory.total)


def fits(model, plan, machine, tool=None, constants=CONSTANTS):
    """Whether it fits into a GPU."""
    return memory_per_gpu(model, plan, machine, tool, constants).total <= machine.memory_bytes


def numbers_of(model, plan, rank):
    """(parameters of layers and embeddings, of experts) that a GPU of this pipeline rank has."""
    layers = plan.stages(model.layers)[rank]
    dense = min(layers, model.dense) if rank == 0 else 0
    ends = (rank == 0) + (rank == plan.pp - 1)
    ends = min(ends, 1) if model.tied else ends
    numbers = (layers * model.block + dense * model.dense_ffn + ends * model.embedding) / plan.tp
    sparse = layers - dense if model.experts else 0
    return numbers, sparse * model.experts * model.expert / plan.ep


def states(plan, tool, numbers, ranks):
    """(weights, gradients, optimizer) in bytes, of so many parameters."""
    if plan.frozen:
        return 2 * numbers, 0.0, 0.0
    if tool == "torchtitan":  # also with ZeRO 2, which keeps weights gathered: see buffer_bytes
        return tuple(zero_memory(3 if plan.zero else 0, numbers, ranks, 4, 4, 8))
    if tool == "deepspeed":
        sums = 4 if plan.gradient_bytes == 4 else 0  # BF16_Optimizer adds up in float32
        return tuple(zero_memory(plan.zero, numbers, ranks, 2, 2 + sums, 12))
    weight, _, optimizer = MEGATRON
    return tuple(zero_memory(plan.zero, numbers, ranks, weight, plan.gradient_bytes, optimizer))


def kept_bytes(model, plan, tool, recompute=None):
    """Bytes of a layer that wait for the backward of one micro-batch (Korthikanti et al. 2022,
    equations 1 to 6, with the sizes of this model; FlashAttention keeps no scores).

    torch.compile computes norms and the gate's product again, and keeps what they are made of.
    Transformer Engine keeps the inputs of FP8 products as FP8; attention's output in both forms.
    """
    t, h, recompute = plan.tp, model.hidden, recompute or plan.recompute
    split = t if plan.sequence_parallel else 1
    full = 2 * h / split
    ffn = model.top_k * model.expert_ffn + model.shared * model.expert_ffn or model.ffn
    again = tool == "torchtitan" and plan.fused and model.gated
    small = tool == "megatron" and plan.precision != "bf16"
    outside = (4 if again else 8 if model.gated else 10) * h - 2 * h * small
    inside = 2 * (2 * model.width + 2 * model.kv_heads * model.head_size) + model.width * small
    inside += (6 if model.gated and not again else 4) * ffn - ffn * small
    inside += (1 if small else 2) * h * model.top_k
    scores = 5 * model.heads * plan.sequence if plan.attention == "unfused" else 4 * model.heads
    whole = outside / split + (inside + scores) / t
    each = {"none": whole, "full": full, "selective": outside / split + inside / t,
            "operators": outside / split / 2 + inside / t / 2}[recompute]
    share = plan.recomputed if recompute != "none" else 1.0
    return plan.tokens * (share * each + (1 - share) * whole)


def in_flight(plan, rank):
    """Micro-batches whose activations of a rank's whole share wait at the worst moment (lab 09)."""
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
    """Gathered weights and gradients of two layers (ZeRO-3, FSDP), or a bucket; messages; what
    DeepSpeed's optimizer makes for its step: the gradient in float32 and two results of Adam.

    With sequence parallelism x is whole in a layer: twice gathered, and twice before its sum.

    With a pipeline torchtitan gathers a stage's weights once a step, and reduces its gradients
    once; with ZeRO 2 it gathers once, too, and reduces each micro-batch's.
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
    """The GpuMemory of the course's own trainer, by lab 12's formula. Without gaps: labs/jobs/ asks
    torch for expandable segments.

    error  ValueError where it has no such model
    """
    from ranklab.hybrid import layout_memory  # here: lab 12 asks this file what fits
    from ranklab.planner.own import own_job

    found = layout_memory(*own_job(model, plan))
    return GpuMemory(found.parameters, found.gradients, found.optimizer_state, found.activations,
                     0.0, found.total - found.parameters - found.gradients - found.optimizer_state
                     - found.activations, c.context_bytes, 0.0)
