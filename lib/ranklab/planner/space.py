"""layouts: every Plan that a tool can run for a model on so many GPUs, as it is run today."""

import itertools
from dataclasses import replace

from ranklab.planner.plan import Plan

ADVISED = ("megatron", "torchtitan", "deepspeed")
MOST_VIRTUAL = 10  # stages of a pipeline rank
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
LONG = 4096  # tokens: a sequence is shared by context ranks where each has so many
# What each tool is told in these plans; `hides`: what it then runs beside computing.
USUAL = {
    # --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap
    "megatron": {"hides": ("data", "context", "tensor", "pipeline")},
    "torchtitan": {"hides": ("data", "context")},  # compiled
    "deepspeed": {"hides": ("data",), "gradient_bytes": 2},  # overlap_comm
    "ours": {"hides": (), "fused": False},
}
RECOMPUTE = {"megatron": ("none", "full"), "torchtitan": ("none", "operators", "full"),
             "deepspeed": ("none", "full"), "ours": ("none", "full")}


def layouts(model, machine, gpus, sequence, batch, tool="megatron"):
    """Yields the Plans of `gpus` GPUs with a batch of so many sequences.

    dp x tp x pp x cp is gpus; tp stays in a node, and divides heads and key heads; virtual stages
    need micro-batches in rounds of pp; ep divides the experts, and the ranks that have other
    tokens; micro-batches fill the batch. With DeepSpeed ZeRO 2 and 3 are without a pipeline, as its
    engine refuses both together. FSDP shards over all ranks, or over a node's (HSDP).
    """
    for division in divisions(model, machine, gpus, sequence, batch, tool):
        yield from variants(model, division)


def divisions(model, machine, gpus, sequence, batch, tool):
    """Yields a Plan for each way to divide the GPUs and the model: with micro-batches of one
    sequence, one stage of a rank, and no recompute.
    """
    usual = {**USUAL[tool], "attention": kernels(machine)}
    for tp, cp, pp in itertools.product(divisors(gpus), repeat=3):
        dp, rest = divmod(gpus, tp * pp * cp)
        if rest or batch % dp or not goes(
                model, machine, gpus, sequence, tp, cp, pp, tool):
            continue
        for ep, (zero, shard, offload), outer in itertools.product(
                experts(model, dp * cp, tool), shards(model, machine, dp * cp, tp, pp, tool),
                outers(machine, dp, pp)):
            yield Plan(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, sequence=sequence,
                       micro_batches=batch // dp, zero=zero, shard=shard, offload=offload,
                       sequence_parallel=tp > 1, tool=tool, outermost=outer, **usual)


def variants(model, division):
    """Yields a division's Plan with all micro-batches, virtual stages and kinds of recompute."""
    tool, pp = division.tool, division.pp
    for micro, virtual, recompute in itertools.product(
            MICRO_BATCHES, virtuals(model, pp, tool), RECOMPUTE[tool]):
        pieces, left = divmod(division.micro_batches, micro)
        if not left and (virtual == 1 or pieces % pp == 0):
            yield replace(division, micro_batch=micro, micro_batches=pieces, virtual=virtual,
                          schedule="interleaved" if virtual > 1 else "1f1b", recompute=recompute)


def kernels(machine):
    """Attention's, on these GPUs."""
    return "tuned" if machine.peak_fp8 else "flash"


def goes(model, machine, gpus, sequence, tp, cp, pp, tool):
    """Whether the model can be so divided."""
    if tool == "deepspeed" and (tp > 1 or cp > 1) or tool == "ours" and cp > 1 and sequence % cp:
        return False
    in_node = tp <= machine.node and (machine.node % tp == 0 or gpus <= machine.node)
    tensor = in_node and model.heads % tp == 0 and model.kv_heads % tp == 0
    context = cp == 1 or sequence % (2 * cp * tp) == 0 and sequence // cp >= LONG
    return tensor and context and pp <= model.layers


def virtuals(model, pp, tool):
    """Numbers of stages of a rank; more than one, where they then have no more layers than before.

    61 layers on 16 ranks: 4 on most, as one stage or as two of 2, but not as three.
    """
    if pp == 1 or tool == "deepspeed":
        return (1,)
    fullest = -(-model.layers // pp)
    return [each for each in range(1, MOST_VIRTUAL + 1)
            if pp * each <= model.layers and each * -(-model.layers // (pp * each)) == fullest]


def experts(model, ranks, tool):
    """Numbers of ranks that may share the experts."""
    if not model.experts or tool == "deepspeed":
        return (1,)
    return [each for each in divisors(model.experts) if ranks % each == 0]


def shards(model, machine, ranks, tp, pp, tool):
    """[(ZeRO's stage, ranks that share, 0: all, whether the optimizer is on the host)]: Megatron's
    distributed optimizer, FSDP and HSDP, DeepSpeed's ZeRO.
    """
    if ranks == 1:
        return [(0, 0, False)]
    near, rest = divmod(machine.node, tp)  # data ranks of a node
    hybrid = not (rest or model.experts or pp > 1 or ranks % near) and 1 < near < ranks
    return {"megatron": [(1, 0, False)], "ours": [(0, 0, False), (1, 0, False), (3, 0, False)],
            "torchtitan": [(2, 0, False)] * (pp > 1) + [(3, 0, False)]
            + [(3, near, False)] * hybrid,
            "deepspeed": [(1, 0, False)] if pp > 1 else [
                (zero, 0, offload) for zero in (1, 2, 3) for offload in (False, True)]}[tool]


def outers(machine, dp, pp):
    """Where islands of nodes differ from nodes, it matters which axis goes between them."""
    return ("pipeline", "data") if machine.island and dp > 1 and pp > 1 else ("pipeline",)


def divisors(n):
    return [each for each in range(1, n + 1) if n % each == 0]
