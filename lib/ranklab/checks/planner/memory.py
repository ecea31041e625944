"""memory_per_gpu: each part of the fullest rank's memory, for many kinds of plans."""

from dataclasses import replace
from typing import NamedTuple

from ranklab.checks.planner.parts import in_gb, parts_of
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.constants import CONSTANTS, Constants
from ranklab.planner.memory import (
    GpuMemory, buffer_bytes, in_flight, kept_bytes, memory_per_gpu, numbers_of, ours, states,
)
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan

OTHER = replace(CONSTANTS, context_bytes=0.7e9, gaps=0.11)
PIPED = Plan(dp=2, tp=2, pp=4, micro_batches=16, zero=1, sequence_parallel=True)
SMALL = Model(8, 256, 8, 1024, 512, tied=True)


class Case(NamedTuple):
    """A plan for a model, or a model's name; tool: the one to use instead of plan.tool."""

    name: str
    model: str | Model
    plan: Plan
    constants: Constants = CONSTANTS
    tool: str | None = None

    def __str__(self):
        tool = f", tool={self.tool!r}" if self.tool else ""
        return f"{self.name} ({self.plan.tool} {self.plan.words()}{tool})"


ONE_GPU = (Case("one GPU", "llama2-7b", Plan(micro_batches=4)),)
PLANS = (
    Case("two stages, all micro-batches wait", "llama-1b", Plan(
        dp=2, pp=2, micro_batch=8, micro_batches=6, schedule="gpipe", recompute="full"), OTHER),
    Case("126 layers on 4 stages", "llama-405b", replace(PIPED, tp=8), OTHER),
    Case("experts in stages", "deepseek-v3", Plan(
        dp=32, tp=2, pp=10, ep=4, micro_batch=4, micro_batches=16, zero=1), OTHER),
    Case("4 stages, ZeRO-1", "llama2-13b", PIPED),
    Case("two stages, few micro-batches", "gpt3-175b", Plan(dp=4, tp=8, pp=2), OTHER),
    Case("a tied head", "bloom-176b", replace(PIPED, pp=5, micro_batch=2), OTHER),
    Case("a large head", "llama-8b", Plan(dp=2, pp=4, micro_batches=2, micro_batch=8, zero=1,
                                          recompute="full"), OTHER),
    Case("virtual stages", "llama-70b", replace(PIPED, virtual=5, schedule="interleaved")),
    Case("context ranks", "llama-70b", Plan(dp=2, cp=4, tp=4, sequence=32768, zero=1), OTHER),
    Case("recompute", "gpt3-175b", replace(PIPED, recompute="full", micro_batches=3)),
    Case("recompute, 96 layers on 10 stages", "gpt3-175b", replace(
        PIPED, pp=10, recompute="full", micro_batches=4), OTHER),
    Case("attention's core again", "llama2-13b", replace(
        PIPED, attention="unfused", recompute="selective"), OTHER),
    Case("20 layers on 9 stages, recompute", replace(MODELS["llama2-13b"], layers=20), replace(
        PIPED, pp=9, micro_batches=4, recompute="full"), OTHER),
    Case("half of the layers recomputed", "llama-70b", replace(
        PIPED, recompute="full", recomputed=0.5), OTHER),
    Case("half of the products recomputed", "llama-8b", Plan(
        dp=8, zero=3, recompute="operators", tool="torchtitan"), OTHER),
    Case("FSDP, not compiled", "llama-8b", Plan(dp=8, zero=3, fused=False, tool="torchtitan"),
         OTHER),
    Case("shards in a node", "llama-8b", Plan(dp=32, shard=8, zero=3, tool="torchtitan")),
    Case("DeepSpeed's ZeRO-2", "llama-8b", Plan(dp=16, zero=2, tool="deepspeed"), OTHER),
    Case("DeepSpeed's ZeRO-2, recompute", "llama-8b", Plan(
        dp=16, zero=2, recompute="full", tool="deepspeed"), OTHER),
    Case("the optimizer on the host", "llama2-7b", Plan(
        dp=4, zero=3, offload=True, tool="deepspeed")),
    Case("experts", "mixtral-8x7b", Plan(dp=8, ep=8, zero=1)),
    Case("experts on 32 ranks each", "mixtral-8x7b", Plan(
        dp=8, tp=8, ep=2, zero=1, sequence_parallel=True), OTHER),
    Case("experts, FSDP", "qwen3-30b-a3b", Plan(
        dp=16, cp=2, pp=2, ep=4, zero=3, micro_batches=4, tool="torchtitan"), OTHER),
)
TOOLS = tuple(Case("another tool", "llama-8b", Plan(dp=8, zero=1, tool=of, recompute=recompute),
                   tool=tool) for tool, of, recompute in (
    ("deepspeed", "megatron", "none"), ("torchtitan", "deepspeed", "none"),
    ("torchtitan", "megatron", "full")))
TRAINER = (Case("the course's trainer", SMALL, Plan(dp=2), OTHER, tool="ours"),
           Case("the course's trainer", SMALL, Plan(dp=2, micro_batches=2, tool="ours"), OTHER))


def _see(fn, case):
    model = MODELS.get(case.model, case.model)
    memory = fn(model, case.plan, find_node("h100-dgx"), case.tool, case.constants)
    yield parts_of(memory, GpuMemory, in_gb, first=("activations", "logits"))


def of_all_ranks(model, plan, machine, tool=None, constants=CONSTANTS):
    """Compute every stage, and add up its parts one by one."""
    tool = tool or plan.tool
    if tool == "ours":
        return ours(model, plan, constants)
    stages, memories = plan.stages(model.layers), []
    for rank in range(plan.pp):
        numbers, experts = numbers_of(model, plan, rank)
        parts = states(plan, tool, numbers, min(plan.shard or plan.dp * plan.cp, plan.dp * plan.cp))
        if experts:
            of_experts = states(plan, tool, experts, plan.dp * plan.cp * plan.tp // plan.ep)
            parts = [a + b for a, b in zip(parts, of_experts)]
        activations = stages[rank] * in_flight(plan, rank) * kept_bytes(model, plan, tool)
        if plan.recompute != "none":
            activations += 2 * kept_bytes(model, plan, tool, "none")
        logits = 0.0
        if rank == plan.pp - 1:
            logits = plan.tokens * model.vocab / plan.tp * {"torchtitan": 12}.get(tool, 8)
        memories.append(GpuMemory(
            parts[0], parts[1], 0.0 if plan.offload else parts[2], activations, logits,
            buffer_bytes(model, plan, tool, numbers), constants.context_bytes,
            constants.gaps * (activations + logits)))
    return max(memories, key=lambda memory: memory.total)


def eighteen_bytes(model, plan, machine, tool=None, constants=CONSTANTS):
    share = model.parameters / plan.tp / plan.pp
    return GpuMemory(2 * share, 4 * share, 12 * share / plan.dp, 0, 0, 0, 0, 0)


RANKS = "{0, min(1, plan.pp - 1), stages.index(max(stages)), plan.pp - 1}"
AGAIN = '2 * kept_bytes(model, plan, tool, "none") if plan.recompute != "none" else 0'
HELD = "in_flight(plan, rank) * stages[rank] * layer_bytes + rerun_bytes"
LOGITS = "        logits *= rank == plan.pp - 1\n"
BYTES = '(12 if tool == "torchtitan" else 8)'
SPARSE = "states(plan, tool, experts, max(1, plan.copies * plan.tp // plan.ep))"
OF_SHARDERS = "numbers, plan.sharders)"
GAPS = "constants.gaps * (activations + logits)"
BUFFERS = "buffer_bytes(model, plan, tool, numbers), const"
MOST = "max(memories, key=lambda memory: memory.total)"
TOOL = "tool, memories = tool or plan.tool, []"
UNEVEN = "Stages can be uneven, so any of them can be the fullest: check every rank."
OF_STAGE = "Stages can be uneven: a rank has plan.stages(model.layers)[rank] layers."
COUNTED = ("kept_bytes already covers all tokens of a micro-batch, on one tensor rank: use it as "
           "it is.")
EACH_KIND = "Count the recomputed layer for every kind of recompute, in every tool."
SOME_LOGITS = "A logit needs 8 bytes: 16 bits, a float32 copy, and a 16-bit gradient."
CONTEXT = "Take the numbers for context and allowance from the argument `constants`."
ONE_RANK = "Return the GpuMemory of one rank."
BY_TOOL = "The argument `tool` takes precedence wherever a tool is needed; None means plan.tool."
MEMORY = Proof(
    memory_per_gpu,
    Stage("right on one GPU", _see, ONE_GPU, oracle=of_all_ranks),
    Stage("right with stages, virtual stages, context ranks, recompute, a tied head, experts", _see,
          PLANS, oracle=of_all_ranks),
    Stage("right for Megatron, torchtitan and DeepSpeed; `tool` overrides the plan's", _see, TOOLS,
          oracle=of_all_ranks),
    Stage("right for the course's own trainer", _see, TRAINER, oracle=of_all_ranks,
          note="Keep the given line."),
    mistakes=(
        Slip("Another rank is fuller, here the last one, which has the head and the logits: check "
             "every rank, and return the one with the largest total.",
             (RANKS, "{0}"), (MOST, "max(memories, key=lambda memory: memory.activations)"),
             (MOST, "min(memories, key=lambda memory: memory.total)"),
             (MOST, "max(memories, key=lambda memory: memory.weights)")),
        Slip("This is the last stage, but the first one has the most micro-batches in flight: "
             "check every rank, and return the fullest.", (RANKS, "{plan.pp - 1}")),
        Slip(UNEVEN, (RANKS, "{0, min(1, plan.pp - 1), plan.pp - 1}"), (RANKS, "{0, plan.pp - 1}"),
             (RANKS, "{0, min(1, plan.pp - 1), min(2, plan.pp - 1), plan.pp - 1}")),
        Slip("This takes the largest value of each part, from different ranks. Return the parts of "
             "a single rank: the one with the largest total.",
             (MOST, "GpuMemory(*(max(part) for part in zip(*(vars(each).values() "
                                "for each in memories))))")),
        Slip(ONE_RANK, (MOST, f"{MOST}.total"), (MOST, "memories")),
        Slip("Not all micro-batches are in flight at once: only in_flight(plan, rank) of them are.",
             ("in_flight(plan, rank)", "plan.micro_batches")),
        Slip("A stage can run several forwards before its first backward: in_flight(plan, rank) "
             "micro-batches are in flight.", ("in_flight(plan, rank) * ", "")),
        Slip("Later stages have fewer micro-batches in flight: use in_flight(plan, rank).",
             ("in_flight(plan, rank)", "in_flight(plan, 0)")),
        Slip("A GPU holds only the layers of its stage: plan.stages(model.layers)[rank].",
             ("* stages[rank]", "* model.layers")),
        Slip(OF_STAGE, ("* stages[rank]", "* (model.layers / plan.pp)"),
             ("* stages[rank]", "* (model.layers // plan.pp)"),
             ("* stages[rank]", "* -(-model.layers // plan.pp)")),
        Slip(COUNTED, ("in_flight(plan, rank)", "plan.micro_batch * in_flight(plan, rank)"),
             ("* layer_bytes", "* layer_bytes / plan.tp")),
        Slip("With recompute, a layer has all its activations again during its backward: add "
             "kept_bytes(model, plan, tool, 'none') for one layer, and its gradients.",
             (HELD, HELD.removesuffix(" + rerun_bytes"))),
        Slip("During its backward a layer also has gradients, as large as the recomputed "
             "activations: count these bytes twice.", (AGAIN, AGAIN.removeprefix("2 * "))),
        Slip("A layer recomputes everything that it would keep without recompute: "
             "kept_bytes(model, plan, tool, 'none').",
             (AGAIN, AGAIN.replace(', "none")', ")"))),
        Slip("Only one layer of one micro-batch is recomputed at a time: add it once.",
             (HELD, "in_flight(plan, rank) * (stages[rank] * layer_bytes + rerun_bytes)"),
             (HELD, "in_flight(plan, rank) * stages[rank] * (layer_bytes + rerun_bytes)"),
             (HELD, HELD.replace("+ rerun_bytes", "+ stages[rank] * rerun_bytes"))),
        Slip("Nothing is recomputed if plan.recompute is 'none'.",
             (AGAIN, '2 * kept_bytes(model, plan, tool, "none")')),
        Slip(EACH_KIND, (AGAIN, AGAIN.replace('!= "none" else', '== "full" else')),
             (AGAIN, AGAIN.replace('!= "none" else', 'not in ("none", "selective") else')),
             (AGAIN, AGAIN.replace('!= "none" else', '!= "none" and tool != "deepspeed" else'))),
        Slip("The last stage also holds the logits of one micro-batch.",
             (LOGITS, "        logits = 0\n")),
        Slip("Count the logits of only one micro-batch: its backward follows right after the loss.",
             (LOGITS, "        logits *= in_flight(plan, rank) * (rank == plan.pp - 1)\n"),
             (LOGITS, "        logits *= plan.micro_batches * (rank == plan.pp - 1)\n")),
        Slip("Only the last stage has logits.", (LOGITS, "")),
        Slip("Tensor ranks split the logits: model.vocab / plan.tp.",
             (" * model.vocab / plan.tp", " * model.vocab")),
        Slip("Context ranks also split the logits: each of them has plan.tokens tokens of a "
             "micro-batch.",
             ("plan.tokens * model.vocab", "plan.sequence * plan.micro_batch * model.vocab")),
        Slip("In torchtitan a logit needs 12 bytes: torch's own loss has its gradient in float32.",
             (BYTES, "8")),
        Slip(SOME_LOGITS, (BYTES, "4"), (BYTES, "2"), (BYTES, "6")),
        Slip("Context ranks have the same weights, so states are sharded over them as well: "
             "plan.sharders.",
             (OF_SHARDERS, "numbers, plan.dp)")),
        Slip("plan.shard can be less than all copies: states are sharded over plan.sharders ranks.",
             (OF_SHARDERS, "numbers, plan.copies)")),
        Slip("States are sharded only over ranks with the same weights: plan.sharders, not all "
             "GPUs.",
             (OF_SHARDERS, "numbers, plan.gpus)")),
        Slip("An expert is on copies * tp // ep GPUs, and its states are sharded over them.",
             (SPARSE, "states(plan, tool, experts, plan.sharders)"),
             (SPARSE, SPARSE.replace("max(1, plan.copies * plan.tp // plan.ep)",
                                     "min(plan.sharders, plan.copies * plan.tp // plan.ep)")),
             (SPARSE, "states(plan, tool, experts, plan.ep)"),
             (SPARSE, SPARSE.replace("plan.copies * plan.tp // plan.ep",
                                     "plan.copies // plan.ep"))),
        Slip("numbers_of returns two counts. The second one is for the experts, which have states "
             "as well.",
             (SPARSE, "(0, 0, 0)")),
        Slip("With plan.offload the optimizer is on the host.", (" * (not plan.offload)", "")),
        Slip("Gradients and weights stay on the GPU: plan.offload moves only the optimizer.",
             ("weights, gradients, optimizer *",
                        "weights, gradients * (not plan.offload), optimizer *")),
        Slip("The allowance is constants.gaps times (activations + logits).",
             (GAPS, "0.0"), (GAPS, "constants.gaps * activations"),
             (GAPS, "constants.gaps * (weights + activations + logits)")),
        Slip(CONTEXT, (GAPS, "CONSTANTS.gaps * (activations + logits)"),
             ("    layer_bytes = ", "    constants = CONSTANTS\n    layer_bytes = ")),
        Slip("CUDA and NCCL take some memory, too: constants.context_bytes.",
             (" constants.context_bytes,", " 0.0,")),
        Slip("Add the buffers: buffer_bytes(model, plan, tool, numbers).",
             (BUFFERS, "0.0, const")),
        Slip("Pass buffer_bytes only the parameters of this rank that are outside experts.",
             (BUFFERS, "buffer_bytes(model, plan, tool, numbers + experts), const"),
             (BUFFERS, "buffer_bytes(model, plan, tool, model.parameters), const")),
        Slip(BY_TOOL, (TOOL, "tool, memories = plan.tool, []"),
             ("kept_bytes(model, plan, tool)\n", "kept_bytes(model, plan, plan.tool)\n"),
             (AGAIN, AGAIN.replace("plan, tool,", "plan, plan.tool,")),
             (BYTES, BYTES.replace("tool ==", "plan.tool ==")),
             ("dense = states(plan, tool,", "dense = states(plan, plan.tool,"),
             (BUFFERS, BUFFERS.replace("tool", "plan.tool"))),
        Slip("Memory is more than 2 + 4 + 12 bytes per parameter: activations, logits, buffers, "
             "context and gaps need memory, too.", eighteen_bytes),
    ), hints=(
        "What does a GPU hold once, what for each layer, and what for each micro-batch in flight?",
        "For each pipeline rank, add up the states of both kinds of parameters; micro-batches in "
        "flight times layers times the bytes that one layer keeps, plus one more layer with "
        "recompute; and logits on the last rank. Then return the GpuMemory with the largest total.",
        "dense = states(plan, tool, numbers, plan.sharders); sparse = states(plan, tool, experts, "
        "max(1, plan.copies * plan.tp // plan.ep)); activations = in_flight(plan, rank) * layers * "
        "kept + again; the optimizer times (not plan.offload)",
    ))
