"""The check of memory_per_gpu: each part of the fullest rank's memory, for many kinds of plans."""

from dataclasses import fields, replace
from functools import partial

from ranklab.checks.planner.parts import each_is_right
from ranklab.checks.trial import called_with, explain
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
    "two stages, all micro-batches wait": ("llama-1b", Plan(
        dp=2, pp=2, micro_batch=8, micro_batches=6, schedule="gpipe", recompute="full"), OTHER),
    "4 stages, ZeRO-1": ("llama2-13b", PIPED, CONSTANTS),
    "two stages, few micro-batches": ("gpt3-175b", Plan(dp=4, tp=8, pp=2, micro_batches=1), OTHER),
    "a tied head": ("bloom-176b", replace(PIPED, pp=5, micro_batch=2), OTHER),
    "a large head": ("llama-8b", Plan(dp=2, pp=4, micro_batches=2, micro_batch=8, zero=1,
                                      recompute="full"), OTHER),
    "virtual stages": ("llama-70b", replace(PIPED, virtual=5, schedule="interleaved"), CONSTANTS),
    "126 layers on 4 stages": ("llama-405b", replace(PIPED, tp=8), OTHER),
    "context ranks": ("llama-70b", Plan(dp=2, cp=4, tp=4, sequence=32768, zero=1), OTHER),
    "recompute": ("gpt3-175b", replace(PIPED, recompute="full", micro_batches=3), CONSTANTS),
    "recompute, 96 layers on 10 stages": ("gpt3-175b", replace(
        PIPED, pp=10, recompute="full", micro_batches=4), OTHER),
    "attention's core again": ("llama2-13b", replace(
        PIPED, attention="unfused", recompute="selective"), OTHER),
    "20 layers on 9 stages, recompute": (replace(MODELS["llama2-13b"], layers=20), replace(
        PIPED, pp=9, micro_batches=4, recompute="full"), OTHER),
    "half of the layers again": ("llama-70b", replace(PIPED, recompute="full", recomputed=0.5),
                                 OTHER),
    "half of the products again": ("llama-8b", Plan(dp=8, zero=3, recompute="operators",
                                                    tool="torchtitan"), OTHER),
    "FSDP, not compiled": ("llama-8b", Plan(dp=8, zero=3, fused=False, tool="torchtitan"), OTHER),
    "shards in a node": ("llama-8b", Plan(dp=32, shard=8, zero=3, tool="torchtitan"), CONSTANTS),
    "DeepSpeed's ZeRO-2": ("llama-8b", Plan(dp=16, zero=2, tool="deepspeed"), OTHER),
    "DeepSpeed's ZeRO-2, recompute": ("llama-8b", Plan(
        dp=16, zero=2, recompute="full", tool="deepspeed"), OTHER),
    "the optimizer on the host": ("llama2-7b", Plan(dp=4, zero=3, offload=True, tool="deepspeed"),
                                  CONSTANTS),
    "experts": ("mixtral-8x7b", Plan(dp=8, ep=8, zero=1), CONSTANTS),
    "experts on 32 ranks each": ("mixtral-8x7b", Plan(
        dp=8, tp=8, ep=2, zero=1, sequence_parallel=True), OTHER),
    "experts, FSDP": ("qwen3-30b-a3b", Plan(
        dp=16, cp=2, pp=2, ep=4, zero=3, micro_batches=4, tool="torchtitan"), OTHER),
    "experts in stages": ("deepseek-v3", Plan(dp=32, tp=2, pp=10, ep=4, micro_batch=4,
                                              micro_batches=16, zero=1), OTHER),
}
SLIPS = {  # name: (what is done instead, hint)
    "the first stage": "The last stage has the head and the logits: take the fullest.",
    "the last stage": "The first stage has most micro-batches in flight: take the fullest.",
    "the first, second and last stage": "Stages need not be even: any of them may be the fullest.",
    "the largest of each part": "Return the parts of one rank, the one with the largest total.",
    "all micro-batches": "Not all micro-batches wait: in_flight(plan, rank).",
    "one micro-batch": "A stage runs forward for more micro-batches before the first comes "
                       "back: in_flight(plan, rank).",
    "as many in flight as on the first stage": "Later stages have fewer: in_flight(plan, rank).",
    "all layers": "A GPU has the layers of its stage: plan.stages(model.layers)[rank].",
    "as many layers on each stage": "Stages need not be even: plan.stages(model.layers)[rank].",
    "without what is computed again": "With recompute, one layer has all its activations again "
                                      "in its backward: kept_bytes(model, plan, tool, 'none').",
    "activations without their gradients": "In its backward a layer also has gradients, as large as"
                                           " what it computed again: count it twice.",
    "again for each micro-batch": "Only one layer of one micro-batch is computed again at a time.",
    "again with full recompute only": "Count it with each kind of recompute.",
    "computed again without recompute": "Count it only if plan.recompute is not 'none'.",
    "no logits": "The last stage has them, 8 bytes each, for one micro-batch.",
    "logits of all micro-batches": "Count one micro-batch: its loss runs backward at once.",
    "logits on all stages": "Only the last stage has them.",
    "whole logits": "Tensor ranks share them: model.vocab / plan.tp.",
    "8 bytes a logit": "It is 12 in torchtitan: torch's own loss has its gradient in float32.",
    "sharded over dp": "Context ranks have the same weights, too: use plan.sharders.",
    "sharded over all copies": "plan.shard may be less: use plan.sharders.",
    "experts sharded as all else": "An expert is on copies * tp // ep GPUs.",
    "experts forgotten": "numbers_of gives two numbers. The second one has states, too.",
    "the optimizer on the GPU": "With plan.offload it is on the host.",
    "no gaps": "The allowance is constants.gaps times (activations + logits).",
    "gaps of activations alone": "The allowance is constants.gaps times (activations + logits).",
    "the constants of the library": "Take them from the argument `constants`.",
    "the tool of the plan": "The argument `tool` comes first; None means plan.tool.",
}


def right(model, plan, tool, c, slip=""):
    """The GpuMemory, found by asking every stage; or what this slip gets."""
    c = CONSTANTS if slip == "the constants of the library" else c
    tool = plan.tool if slip == "the tool of the plan" else tool
    is_again = {"without what is computed again": False, "computed again without recompute": True,
                "again with full recompute only": plan.recompute == "full"}.get(
                    slip, plan.recompute != "none")
    again, found = 2 * is_again * kept_bytes(model, plan, tool, "none"), []
    share = {"sharded over dp": plan.dp, "sharded over all copies": plan.copies}.get(
        slip, plan.sharders)
    same = share if slip == "experts sharded as all else" else plan.copies * plan.tp // plan.ep
    for rank, layers in enumerate(plan.stages(model.layers)):
        numbers, experts = numbers_of(model, plan, rank)
        experts *= slip != "experts forgotten"
        weights, gradients, optimizer = map(sum, zip(
            states(plan, tool, numbers, share), states(plan, tool, experts, max(1, same))))
        waiting = {"all micro-batches": plan.micro_batches, "one micro-batch": 1,
                   "as many in flight as on the first stage": in_flight(plan, 0)}.get(
                       slip, in_flight(plan, rank))
        layers = {"all layers": model.layers, "as many layers on each stage":
                  model.layers / plan.pp}.get(slip, layers)
        activations = waiting * layers * kept_bytes(model, plan, tool)
        activations += again * {"activations without their gradients": 0.5,
                                "again for each micro-batch": waiting}.get(slip, 1)
        logits = plan.tokens * model.vocab * (12 if tool == "torchtitan" and slip != (
            "8 bytes a logit") else 8)
        logits /= 1 if slip == "whole logits" else plan.tp
        logits *= waiting if slip == "logits of all micro-batches" else 1
        logits *= slip != "no logits" and (slip == "logits on all stages" or rank == plan.pp - 1)
        optimizer *= not plan.offload or slip == "the optimizer on the GPU"
        gaps = {"no gaps": 0.0, "gaps of activations alone": activations}.get(
            slip, activations + logits)
        found.append(GpuMemory(weights, gradients, optimizer, activations, logits, buffer_bytes(
            model, plan, tool, numbers), c.context_bytes, c.gaps * gaps))
    if slip == "the largest of each part":
        return GpuMemory(*(max(getattr(each, field.name) for each in found)
                           for field in fields(GpuMemory)))
    asked = {"the first stage": found[:1], "the last stage": found[-1:],
             "the first, second and last stage": found[:2] + found[-1:]}
    return max(asked.get(slip, found), key=lambda memory: memory.total)


def check_memory_per_gpu(memory_per_gpu):
    node = find_node("h100-dgx")
    cases = {f"{name} ({plan.tool} {plan.words()})": (
        partial(memory_per_gpu, MODELS.get(model, model), plan, node, None, c),
        partial(right, MODELS.get(model, model), plan, plan.tool, c)) for name, (model, plan, c)
        in CASES.items()}
    for tool, of, recompute in (("deepspeed", "megatron", "none"),
                                ("torchtitan", "deepspeed", "none"),
                                ("torchtitan", "megatron", "full")):
        asked = MODELS["llama-8b"], Plan(dp=8, zero=1, tool=of, recompute=recompute)
        cases[f"tool={tool!r} for a plan of {of}, {recompute} recompute"] = (
            partial(memory_per_gpu, *asked, node, tool), partial(right, *asked, tool, CONSTANTS))
    for number, _ in enumerate(each_is_right(cases, SLIPS, "in GB", 1e9)):
        if number == 0:
            yield "right on one GPU"
    yield "right with stages, virtual stages, context ranks, recompute, a tied head, experts"
    yield "right for Megatron, torchtitan and DeepSpeed; `tool` overrides the plan's"
    small = Model(8, 256, 8, 1024, 512, tied=True)
    for tool, plan in (("ours", Plan(dp=2)), (None, Plan(dp=2, micro_batches=2, tool="ours"))):
        with called_with(f"tool={tool!r}, a plan of {plan.tool}"):
            got = memory_per_gpu(small, plan, node, tool, OTHER)
        explain("the course's trainer: the total", float(got.total),
                float(ours(small, plan, OTHER).total), hint="Keep the line that is given.")
    yield "right for the course's own trainer"
