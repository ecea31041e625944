"""layouts: every Plan that a tool can run for a model on these GPUs, with today's usual options."""

import itertools
from dataclasses import fields, replace

from ranklab.planner.machine import dtype_of
from ranklab.planner.plan import Plan

ADVISED = ("megatron", "torchtitan", "deepspeed")
MOST_VIRTUAL = 10  # stages of a pipeline rank
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
LONG = 4096  # tokens: context ranks share a sequence only if each has this many
# The options of each tool in these plans; `hides`: the messages that it then overlaps.
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
    """Yield the Plans of `gpus` GPUs with a batch of `batch` sequences.

    dp x tp x pp x cp is gpus; tp stays in a node, and divides heads and key heads; virtual stages
    need micro-batches in rounds of pp; ep divides the experts, and the ranks with different
    tokens; micro-batches fill the batch. DeepSpeed has ZeRO 2 and 3 only without a pipeline,
    because its engine refuses the combination. FSDP shards over all ranks, or over a node (HSDP).
    """
    for division in divisions(model, machine, gpus, sequence, batch, tool):
        yield from variants(model, division)


def divisions(model, machine, gpus, sequence, batch, tool):
    """Yield a Plan for each way to divide the GPUs and the model, with micro-batches of one
    sequence, one stage for each rank, and no recompute.
    """
    options = usual(tool, machine)
    for tp, cp, pp in itertools.product(divisors(gpus), repeat=3):
        dp, rest = divmod(gpus, tp * pp * cp)
        if rest or batch % dp or not is_divisible(
                model, machine, gpus, sequence, tp, cp, pp, tool):
            continue
        for ep, (zero, shard, offload), outer in itertools.product(
                experts(model, dp * cp, tool), shards(model, machine, dp * cp, tp, pp, tool),
                outers(machine, dp, pp)):
            yield Plan(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, sequence=sequence,
                       micro_batches=batch // dp, zero=zero, shard=shard, offload=offload,
                       sequence_parallel=tp > 1, outermost=outer, **options)


def variants(model, division):
    """Yield a division's Plan with all micro-batches, virtual stages and kinds of recompute."""
    tool, pp = division.tool, division.pp
    for micro, virtual, recompute in itertools.product(
            MICRO_BATCHES, virtuals(model, pp, tool), RECOMPUTE[tool]):
        pieces, remainder = divmod(division.micro_batches, micro)
        if not remainder and (virtual == 1 or pieces % pp == 0):
            yield replace(division, micro_batch=micro, micro_batches=pieces, virtual=virtual,
                          schedule="interleaved" if virtual > 1 else "1f1b", recompute=recompute)


def usual(tool, machine):
    """Return {field of a Plan: value}: this tool's defaults today on this machine."""
    return {**USUAL[tool], "tool": tool, "attention": kernels(machine)}


def kernels(machine):
    """Return the kind of attention kernels on these GPUs."""
    if dtype_of(machine.accelerator) == "fp16":
        return "unfused"
    return "tuned" if machine.peak_fp8 else "flash"


def is_divisible(model, machine, gpus, sequence, tp, cp, pp, tool):
    """Return whether the tool can divide the model in this way."""
    if tool == "deepspeed" and (tp > 1 or cp > 1):
        return False
    if tool == "ours" and (sequence % tp or machine.node % tp):  # refuse_misfits of lab 12
        return False
    in_node = tp <= machine.node and (machine.node % tp == 0 or gpus <= machine.node)
    tensor = in_node and model.heads % tp == 0 and model.kv_heads % tp == 0
    context = cp == 1 or sequence % (2 * cp * tp) == 0 and sequence // cp >= LONG
    return tensor and context and pp <= model.layers


def virtuals(model, pp, tool):
    """Return the possible numbers of stages of a rank: several, if no rank then has more layers.

    For example, 61 layers on 16 ranks are 4 on most, as one stage or two of 2, but not as three.
    """
    if pp == 1 or tool == "deepspeed":
        return (1,)
    fullest = -(-model.layers // pp)
    return [n for n in range(1, MOST_VIRTUAL + 1)
            if pp * n <= model.layers and n * -(-model.layers // (pp * n)) == fullest]


def experts(model, ranks, tool):
    """Return the possible numbers of ranks that share the experts."""
    if not model.experts or tool == "deepspeed":
        return (1,)
    return [ep for ep in divisors(model.experts) if ranks % ep == 0]


def shards(model, machine, ranks, tp, pp, tool):
    """Return [(ZeRO's stage, ranks that share, 0: all, whether the optimizer is on the host)]:
    Megatron's distributed optimizer, FSDP and HSDP, DeepSpeed's ZeRO.
    """
    if ranks == 1:  # ZeRO-Offload (arXiv 2101.06840) needs no second rank
        return [(0, 0, False)] + [(2, 0, True)] * (tool == "deepspeed" and pp == 1)
    near, rest = divmod(machine.node, tp)  # data ranks of a node
    hybrid = not (rest or model.experts or pp > 1 or ranks % near) and 1 < near < ranks
    return {"megatron": [(1, 0, False)], "ours": [(0, 0, False), (1, 0, False), (3, 0, False)],
            "torchtitan": [(2, 0, False)] * (pp > 1) + [(3, 0, False)]
            + [(3, near, False)] * hybrid,
            "deepspeed": [(1, 0, False)] if pp > 1 else [
                (zero, 0, offload) for zero in (1, 2, 3) for offload in (False, True)]}[tool]


def outers(machine, dp, pp):
    """Return the possible outermost axes: with islands of nodes it matters which axis spans them.
    """
    return ("pipeline", "data") if machine.island and dp > 1 and pp > 1 else ("pipeline",)


def divisors(n):
    """Return the divisors of n, the smallest first."""
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


FREE = ("dp", "tp", "pp", "cp", "ep", "sequence", "micro_batch", "micro_batches", "virtual",
        "schedule", "zero", "shard", "sequence_parallel", "recompute", "recomputed", "outermost",
        "offload")


def refuse(plan, model, machine, gpus, sequence, batch):
    """Raise a ValueError that explains why no tool runs this plan, if none does."""
    default = Plan(**usual(plan.tool, machine))
    fixed = {field.name for field in fields(Plan)} - set(FREE)
    names = [name for name in sorted(fixed) if getattr(plan, name) != getattr(default, name)]
    stages_of_zero = {"megatron": (0, 1), "torchtitan": (0, 2, 3), "deepspeed": (0, 1, 2, 3),
                      "ours": (0, 1, 3)}[plan.tool]
    pieces, stages = plan.micro_batches, plan.pp * plan.virtual
    rules = {
        f"{plan.gpus} GPUs, not {gpus}": plan.gpus != gpus,
        f"sequences of {plan.sequence} tokens, not {sequence}": plan.sequence != sequence,
        f"a batch of {plan.batch}, not {batch}": plan.batch != batch,
        f"tp={plan.tp} must divide {model.heads} heads and {model.kv_heads} key heads":
        model.heads % plan.tp or model.kv_heads % plan.tp,
        f"tp={plan.tp} must stay in a node of {machine.node}": plan.tp > machine.node or (
            machine.node % plan.tp and gpus > machine.node),
        f"{model.layers} layers are too few for {stages} stages": stages > model.layers,
        f"virtual={plan.virtual} on {plan.pp} ranks makes the fullest rank fuller: {model.layers} "
        "layers": plan.virtual > 1 and plan.virtual not in virtuals(model, plan.pp, plan.tool),
        f"schedule={plan.schedule!r} with virtual={plan.virtual}":
        plan.schedule != ("interleaved" if plan.virtual > 1 else "1f1b"),
        f"virtual={plan.virtual} needs pp above 1, and a multiple of it as micro-batches, not "
        f"{pieces}": plan.virtual > 1 and (plan.pp == 1 or pieces % plan.pp),
        f"cp={plan.cp} must leave each context rank {LONG} tokens or more": plan.cp > 1 and (
            sequence % (2 * plan.cp * plan.tp) or sequence // plan.cp < LONG),
        f"ep={plan.ep} must divide {model.experts} experts and {plan.copies} ranks":
        plan.ep > 1 and (not model.experts or model.experts % plan.ep or plan.copies % plan.ep),
        f"{plan.tool} has no zero={plan.zero}": plan.zero not in stages_of_zero,
        f"shard={plan.shard} must divide {plan.copies} ranks": plan.shard and (
            plan.shard < 1 or plan.copies % plan.shard),
        f"recomputed={plan.recomputed} is not between 0 and 1": not 0 <= plan.recomputed <= 1,
        f"{plan.tool} has no recompute={plan.recompute!r}": plan.recompute not in
        RECOMPUTE[plan.tool],
        f"sequence_parallel={plan.sequence_parallel} with tp={plan.tp}":
        plan.sequence_parallel != (plan.tp > 1),
        "DeepSpeed's engine has no tensor or context ranks here, and a pipeline with zero=1 at "
        "most": plan.tool == "deepspeed" and (plan.tp > 1 or plan.cp > 1 or plan.ep > 1
                                              or plan.pp > 1 and plan.zero > 1),
        f"{plan.tool} keeps its optimizer on the GPU": plan.offload and (
            plan.tool != "deepspeed" or not plan.zero),
        f"{plan.tool} has {', '.join(names)} as usual(tool, machine) says": bool(names)}
    for rule, holds in rules.items():
        if holds:
            raise ValueError(f"{plan.words()}: {rule}")
