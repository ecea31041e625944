"""The check of memory_per_gpu: each part of the fullest rank's memory, for many kinds of plans."""

from dataclasses import fields, replace

from ranklab.checks.beside import expect
from ranklab.checks.trial import explain, is_near
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.constants import CONSTANTS
from ranklab.planner.memory import (
    GpuMemory, buffer_bytes, in_flight, kept_bytes, numbers_of, ours, states,
)
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan

OTHER = replace(CONSTANTS, context_bytes=0.7e9, gaps=0.11)
PIPED = Plan(dp=2, tp=2, pp=4, micro_batches=16, zero=1, sequence_parallel=True)
CASES = {
    "one GPU": ("llama2-7b", Plan(micro_batches=4), CONSTANTS),
    "two models on 4 stages, ZeRO-1": ("llama2-13b", PIPED, CONSTANTS),
    "two stages, few micro-batches": ("gpt3-175b", Plan(dp=4, tp=8, pp=2, micro_batches=1), OTHER),
    "a tied head": ("bloom-176b", replace(PIPED, pp=5, micro_batch=2), OTHER),
    "virtual stages": ("llama-70b", replace(PIPED, virtual=5, schedule="interleaved"), CONSTANTS),
    "context ranks": ("llama-70b", Plan(dp=2, cp=4, tp=4, sequence=32768, zero=1), OTHER),
    "recompute": ("gpt3-175b", replace(PIPED, recompute="full", micro_batches=3), CONSTANTS),
    "half of the layers again": ("llama-70b", replace(PIPED, recompute="full", recomputed=0.5),
                                 OTHER),
    "FSDP, not compiled": ("llama-8b", Plan(dp=8, zero=3, fused=False, tool="torchtitan"), OTHER),
    "DeepSpeed's ZeRO-2": ("llama-8b", Plan(dp=16, zero=2, tool="deepspeed"), CONSTANTS),
    "the optimizer on the host": ("llama2-7b", Plan(dp=4, zero=3, offload=True, tool="deepspeed"),
                                  CONSTANTS),
    "experts": ("mixtral-8x7b", Plan(dp=16, tp=2, ep=8, zero=1, sequence_parallel=True), CONSTANTS),
    "experts in stages": ("deepseek-v3", Plan(dp=32, pp=4, ep=16, micro_batches=8, zero=1), OTHER),
}
SLIPS = {  # name: (what is done instead, hint)
    "the first stage": "The last one has the head and the logits: take the fullest.",
    "the last stage": "The first one has most micro-batches in flight: ask several.",
    "all micro-batches": "Not all of them wait: in_flight(plan, rank).",
    "one micro-batch": "A stage runs forward for others before the first comes back: "
                       "in_flight(plan, rank).",
    "all layers": "A GPU has the layers of its stage: plan.stages(model.layers)[rank].",
    "without what is computed again": "With recompute one layer has all its activations back while "
                                      "its backward runs: kept_bytes(model, plan, tool, 'none').",
    "computed again without recompute": "Only where plan.recompute is not 'none'.",
    "logits on all stages": "Only the last stage has them.",
    "whole logits": "Tensor ranks share them: model.vocab / plan.tp.",
    "8 bytes a logit": "10 where plan.fused is False.",
    "sharded over dp": "Context ranks have the same weights: plan.sharders.",
    "experts sharded as all else": "An expert is on copies * tp // ep GPUs.",
    "experts forgotten": "numbers_of gives two numbers: the second has states, too.",
    "the optimizer on the GPU": "With plan.offload it is on the host.",
    "no gaps": "The allowance is constants.gaps times (activations + logits).",
    "the constants of the library": "Take them of the argument `constants`.",
    "the tool of the plan": "The argument `tool` goes first; None is plan.tool.",
}


def right(model, plan, tool, c, slip=""):
    """The GpuMemory, by asking every stage; or what this slip gets."""
    c = CONSTANTS if slip == "the constants of the library" else c
    tool = plan.tool if slip == "the tool of the plan" else tool
    again = kept_bytes(model, plan, tool, "none") * (
        plan.recompute != "none" and slip != "without what is computed again"
        or slip == "computed again without recompute")
    found = []
    for rank, layers in enumerate(plan.stages(model.layers)):
        numbers, experts = numbers_of(model, plan, rank)
        share = plan.dp if slip == "sharded over dp" else plan.sharders
        same = share if slip == "experts sharded as all else" else plan.copies * plan.tp // plan.ep
        held = zip(states(plan, tool, numbers, share), states(
            plan, tool, 0 if slip == "experts forgotten" else experts, max(1, same)))
        weights, gradients, optimizer = map(sum, held)
        waiting = {"all micro-batches": plan.micro_batches, "one micro-batch": 1}.get(
            slip, in_flight(plan, rank))
        layers = model.layers if slip == "all layers" else layers
        activations = waiting * layers * kept_bytes(model, plan, tool) + again
        logits = plan.tokens * model.vocab * (8 if plan.fused or slip == "8 bytes a logit" else 10)
        logits /= 1 if slip == "whole logits" else plan.tp
        logits *= slip == "logits on all stages" or rank == plan.pp - 1
        optimizer *= not plan.offload or slip == "the optimizer on the GPU"
        found.append(GpuMemory(
            weights, gradients, optimizer, activations, logits,
            buffer_bytes(model, plan, tool, numbers, c), c.context_bytes,
            c.gaps * (activations + logits) * (slip != "no gaps")))
    one = {"the first stage": found[0], "the last stage": found[-1]}
    return one.get(slip) or max(found, key=lambda memory: memory.total)


def check_memory_per_gpu(memory_per_gpu):
    node = find_node("h100-dgx")
    for name, (model, plan, c) in CASES.items():
        _compare(f"{name} ({plan.tool} {plan.words()})", memory_per_gpu, MODELS[model], plan,
                 plan.tool, (node, None, c), c)
        if name == "one GPU":
            yield "right on one GPU"
    yield "right with stages, virtual stages, context ranks, recompute, a tied head"
    yield "right for Megatron, torchtitan and DeepSpeed, with experts, with other constants"
    model, plan = MODELS["llama-8b"], Plan(dp=8, zero=1, tool="megatron")
    _compare("tool='deepspeed' for a plan of megatron", memory_per_gpu, model, plan, "deepspeed",
             (node, "deepspeed"), CONSTANTS)
    small, plan = Model(8, 256, 8, 1024, 512, tied=True), Plan(dp=2, micro_batches=2, tool="ours")
    explain("the course's trainer: the total", memory_per_gpu(small, plan, node).total,
            ours(small, plan, CONSTANTS).total, hint="Keep the line that is given.")
    yield "the argument `tool` goes before the plan's"


def _compare(where, memory_per_gpu, model, plan, tool, more, c):
    got, wanted = memory_per_gpu(model, plan, *more), right(model, plan, tool, c)
    expect(isinstance(got, GpuMemory), f"{where}: a {type(got).__name__} is returned",
           "Return the GpuMemory of one rank.")
    if _same(got, wanted):
        return
    for slip, advice in SLIPS.items():
        wrong = right(model, plan, tool, c, slip)
        expect(not _same(got, wrong) or _same(wrong, wanted), f"{where} is that of: {slip}", advice)
    for field in fields(GpuMemory):
        explain(f"{where}: {field.name}, in GB,", getattr(got, field.name) / 1e9,
                getattr(wanted, field.name) / 1e9)


def _same(got, wanted):
    return all(is_near(getattr(got, field.name), float(getattr(wanted, field.name)))
               for field in fields(GpuMemory))
