# %% [markdown]
# # 13 The planner: does it fit, how fast, what does it cost
#
# > 180 minutes · difficulty 4/5 · **laptop**: everything · **GPUs**: the same cells; and a measured file of your own nodes

# %% [markdown]
# ## 1. Story
#
# Llama 3 405B took 30.84 million GPU hours on up to 16,384 H100s (its model card; arXiv 2407.21783). At two dollars an hour a layout that is 10% slower costs six million more. Nobody tries out layouts at that size. They are computed first.
#
# You have all the parts: what states hold (lab 06), what each axis sends (02 to 12), how many micro-batches wait and how large the bubble is (09). This lab adds them up to one number of bytes and one of seconds. Then it does what few planners do: it holds them against some seven hundred published training runs, and says how far off it is.
#
# The lab needs labs 06, 08, 09; 12 helps.

# %%
from dataclasses import fields, replace

import torch
import torch.distributed as dist

from ranklab import answer, check, device, hint, launch, questions
from ranklab.planner import Plan, find_node
from ranklab.planner.catalog import MODELS
from ranklab.planner.constants import CONSTANTS
from ranklab.planner.space import usual
from ranklab.planner.step import Step

# %% [markdown]
# ## 2. Picture
#
# Each mark is a published run: what the planner says of its step time, beside what its authors measured. They range from one layer on 8 GPUs to Llama 3 on 16,384. Both axes are logarithmic; the band is 20% to each side.

# %%
from ranklab.plots import planner as plots
from ranklab.projects import planner as project

plots.published(project.predicted())

# %% [markdown]
# ## 3. Smallest working code
#
# The smallest planner: measure a link once, and predict something else. Two ranks, an all-reduce of 4 MB. Its *bus bandwidth*, the bytes that each rank sends by the second (lab 02), predicts one of 16 MB.

# %%
import time


def all_reduce_seconds(megabytes):
    x = torch.ones(int(megabytes * 1e6) // 4, device=device())
    seconds = []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        x[0].item()  # a GPU has finished
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def both():
    small, large = all_reduce_seconds(4), all_reduce_seconds(16)
    bus = 2 * (2 - 1) / 2 * 4e6 / small
    return f"{bus / 1e9:.2f} GB/s; 16 MB: said {16e6 / bus * 1e3:.1f} ms, took {large * 1e3:.1f} ms"


print(launch(both, ranks=2)[0])

# %% [markdown]
# How far off is it on your machine? Bandwidth is not one number: it grows with the message, and differs with what else runs. The planner takes NCCL's published sweeps as a curve.

# %% [markdown]
# ## 4. Build it
#
# Three frozen dataclasses say what is asked. A `Model` has the sizes of a transformer, a `Machine` is a GPU with its links, and a `Plan` is a layout with the tool that runs it. `usual(tool, machine)` gives the fields of a Plan that a tool sets by itself: which messages it runs beside computing, which kernels it has.

# %% tags=["nbval-check-output"]
llama, dgx = MODELS["llama-70b"], find_node("h100-dgx")
plan = Plan(dp=16, tp=4, pp=4, sequence=8192, micro_batches=64, zero=1, sequence_parallel=True,
            **usual("megatron", dgx))
print(f"{llama.parameters / 1e9:.1f} billion parameters in {llama.layers} layers")
print(f"{plan.gpus} GPUs, {plan.batch} sequences in a step, layers of each stage: "
      f"{plan.stages(llama.layers)}")
print(f"a GPU: {dgx.peak_flops / 1e12:.0f} TFLOP/s, {dgx.memory_bytes / 1e9:.0f} GB (80 GiB); "
      f"{dgx.node} in a node at {dgx.link / 1e9:.0f} GB/s, {dgx.network / 1e9:.0f} between nodes")

# %% [markdown]
# ### 4.1 What a GPU holds
# > difficulty 4/5 · importance 5/5 · 30 minutes · about 18 lines
#
# **Predict.** Megatron-LM with bf16 has 18 bytes for each parameter: the weight 2, the gradient that is added up over micro-batches 4 (the *main gradient*), and Adam 12 (a float32 copy and two moments). The distributed optimizer divides the last 12 by the data ranks. The plan above: 70.55 billion parameters, tensor 4 x pipeline 4 x data 16. Assume that all parameters are spread evenly. How many GB of states has a GPU?

# %%
check(planner_states_gb=...)

# %% [markdown]
# It isn't quite even. The first stage has the embedding, the last one the head, and the last one has the logits, too. The first one has most micro-batches in flight. Which one is fullest depends on the plan, so ask several.
#
# Given, each for one GPU:
#
# - `numbers_of(model, plan, rank)`: (parameters, parameters of experts) of a pipeline rank. The first are on all data and context ranks, the second on fewer: an expert is on `plan.copies * plan.tp // plan.ep` GPUs.
# - `states(plan, tool, numbers, ranks)`: (weights, gradients, optimizer) in bytes, where what the plan shards lies over so many ranks. It does not know of `plan.offload`: then the optimizer is on the host, and takes nothing of the GPU.
# - `kept_bytes(model, plan, tool)`: what *one* layer keeps of *one* micro-batch until its backward. With a fourth argument, `"none"`, as if nothing were computed again.
# - `in_flight(plan, rank)`: how many micro-batches wait there at the worst moment (lab 09).
# - `buffer_bytes(model, plan, tool, numbers)`: gathered weights, buckets, messages. `numbers` are the first of the two: experts are not gathered here.
#
# `plan.tokens` are those of a micro-batch on one context rank, `plan.sharders` the ranks over which states are sharded. Two of the numbers are fitted: CUDA and NCCL take `constants.context_bytes`, and gaps between tensors `constants.gaps` of activations and logits. The `machine` isn't needed; it stands there because step_time has the same arguments.

# %%
from ranklab.planner.memory import (
    GpuMemory, buffer_bytes, in_flight, kept_bytes, numbers_of, ours, states,
)


def memory_per_gpu(model, plan, machine, tool=None, constants=CONSTANTS):
    """The GpuMemory of the pipeline rank that holds most.

    states       sharded over plan.sharders; those of experts over the ranks with the same experts
    activations  of the layers of a stage, for each micro-batch in flight; with recompute also what
                 one layer keeps while it is computed again, and gradients as large
    logits       8 bytes each on the last stage: 16 bits, float32, and a gradient in 16 bits; 12 in
                 torchtitan: torch's own loss has its gradient in float32
    tool         megatron, torchtitan, deepspeed or ours; None: plan.tool
    """
    if (tool or plan.tool) == "ours":
        return ours(model, plan, constants)
    raise NotImplementedError("exercise 4.1: about 18 lines")


# %%
memory_per_gpu = check(memory_per_gpu)

# %% [markdown]
# Three trainings that ran, by your function. All three did fit: Llama 3 405B on 80 GB (FSDP beside tensor and pipeline ranks, as torchtitan does it), GLM-130B on 40 GB, BLOOM-176B on 80 GB.

# %% tags=["nbval-check-output"]
for name, cards, each in project.TRAINED:
    found = memory_per_gpu(MODELS[name], each, find_node(cards))
    parts = {field.name: getattr(found, field.name) / 1e9 for field in fields(found)}
    print(f"{name:11}{found.total / 1e9:4.0f} of {find_node(cards).memory_bytes / 1e9:.0f} GB: "
          + ", ".join(f"{part} {n:.0f}" for part, n in parts.items() if n >= 1.5))

# %% [markdown]
# ### 4.2 How long a step takes
# > difficulty 5/5 · importance 5/5 · 40 minutes · about 14 lines
#
# **Predict.** A node has 8 H100s, and beside each GPU a network card of 400 Gbit/s. An all-reduce goes over all GPUs of 16 such nodes. At how many GB/s of bus bandwidth (bytes that each rank sends, by the second) can it run at most? NVLink is no limit here.

# %%
check(planner_bus_gb=...)

# %% [markdown]
# A GPU does its share of the layers for each micro-batch. What it waits for comes on top. Given, all in seconds, and what computing hides is left out already:
#
# - `layer_seconds(model, plan, machine, c)`: {part: seconds} of **all** layers for **one** micro-batch: products, attention, other, recompute, and messages of the axes tensor, context, expert, weights.
# - `head_seconds(...)`: the same of the head and the loss: products and other.
# - `sent_seconds(model, plan, machine, beside, c)`: of one micro-batch's messages between stages; `beside` is the time that a GPU is busy with one micro-batch: all the parts above, messages too.
# - `bubble_part(model, plan, machine, c)`: the bubble as a part of the *whole* time of a pipeline of even stages, the bubble included.
# - `update_seconds(model, plan, machine, beside, c)`: (data, optimizer): once a step; `beside` as above.
#
# Three things are yours. Take the *average* GPU first: pp stages share the layers, and the head. Then the bubble. Then what the average hides: all wait for the fullest stage, `plan.stages(model.layers)` says who has how many layers, and the last one has the head. That waiting is a bubble, too. A `Step` has the parts of layer_seconds by their names, and pipeline, bubble, data, optimizer, rest.

# %%
from ranklab.planner.step import (
    bubble_part, head_seconds, layer_seconds, sent_seconds, update_seconds,
)


def step_time(model, plan, machine, constants=CONSTANTS):
    """The Step of this plan, on the average GPU: parts in seconds, whose sum is its total.

    A GPU computes its share of the layers for each micro-batch; the head is the last stage's.
    bubble     the schedule's part of (busy + sent + bubble), and waiting for the fullest stage
    optimizer  with gradients once a step, beside the work of one micro-batch
    rest       constants.step_seconds
    """
    c, M, P = constants, plan.micro_batches, plan.pp
    raise NotImplementedError("exercise 4.2: about 14 lines")


# %%
step_time = check(step_time)

# %% [markdown]
# Where does a step go? By your functions, for four plans of Llama 3 70B on 256 H100s. Before you look: which one waits most, and which doesn't fit?

# %%
plans = {"16 x 4 x 4": plan,
         "16 x 4 x 4, 5 virtual": replace(plan, virtual=5, schedule="interleaved"),
         "4 x 8 x 8": replace(plan, dp=4, tp=8, pp=8, micro_batches=256),
         "256, FSDP, recompute": Plan(dp=256, sequence=8192, micro_batches=4, zero=3,
                                      recompute="full", **usual("torchtitan", dgx))}
plots.steps({f"{name}: {memory_per_gpu(llama, each, dgx).total / 1e9:.0f} GB":
             step_time(llama, each, dgx) for name, each in plans.items()})

# %% [markdown]
# A GPU has 86 GB. Virtual stages make the bubble smaller, and keep more micro-batches in flight: a planner that knew time alone would take what does not fit.
#
# And now the truth. Your two formulas, on published runs that nothing was fitted on (a quarter of all, chosen by a hash of their names) and on the others:

# %% tags=["nbval-check-output"]
print(project.errors(memory_per_gpu, step_time))

# %% [markdown]
# A row is never dropped for its error. But it is easy to fool oneself: whoever looks at all rows while the model is shaped has fitted it to all of them, whatever a hash says. So each *source* is left out of the fit in turn, too, because your cluster will be a new source: then the median over all rows is 9%, and 90% are below 21% (memory: 2% and 9%). `python -m ranklab.projects.planner fit` prints it, source by source; it takes a minute or two.

# %% [markdown]
# ### 4.3 What a token costs
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 4 lines
#
# **Predict.** A 13B model with sequences of 2,048 (Llama 2's) on A100s of 40 GB at 50% MFU, 2.74 dollars an hour; or on A10Gs at 35%, 1.006 dollars an hour. An A10G has 70 TFLOP/s, an A100 312. How many times as much does a token cost on the A10Gs?

# %%
check(planner_a10_times=...)

# %%
def cost_per_token(model, sequence, machine, mfu, price):
    """Dollars of a token that is trained on, on one of these GPUs or on many at this MFU.

    mfu    of the bf16 peak, attention counted in full
    price  dollars of a GPU for an hour
    error  ValueError where the MFU is 0 or less, or more than 1
    """
    raise NotImplementedError("exercise 4.3: about 4 lines")


# %%
cost_per_token = check(cost_per_token)

# %% [markdown]
# By your function, with the last published prices. The last column: the MFU that each needs to match H100s at 40%.

# %% tags=["nbval-check-output"]
from ranklab.planner.cost import price_of

llama_13b = MODELS["llama2-13b"]
h100 = cost_per_token(llama_13b, 2048, dgx, 0.4, price_of("H100-SXM-80GB")[0])
for cards in ("h100-dgx", "a100-40gb-dgx", "a10-pcie", "l4-pcie"):
    node = find_node(cards)
    price, source = price_of(node.accelerator)
    each = cost_per_token(llama_13b, 2048, node, 0.4, price)
    print(f"{cards:14} {price:5.2f} $/h  {1e6 * each:.3f} $ a million tokens at 40%; "
          f"needs {0.4 * each / h100:4.0%} to match  ({source.split(' on')[0]})")

# %% [markdown]
# Before you rent L4s: nothing says that they reach 40%. They have 24 GB and no NVLink, so a 13B lies on many of them, and messages go over PCIe.

# %% [markdown]
# ### 4.4 What more GPUs bring
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 12 lines
#
# **Predict.** 8 stages, 1F1B, a batch of 512 sequences in micro-batches of 1. With 4 data ranks each pipeline has 128 micro-batches. With 64 data ranks, and the same batch, how large is the bubble, as a part of all time?

# %%
check(planner_bubble=...)

# %% [markdown]
# *Strong* scaling keeps the batch, because a larger one may learn less from each token. *Weak* scaling lets it grow.

# %%
def scaling_curve(model, plan, machine, counts, weak=False):
    """[(GPUs, tokens/s of all, efficiency)]: the plan with other numbers of data ranks.

    efficiency  tokens/s of a GPU beside those of the first of `counts`
    weak        a pipeline keeps its micro-batches, and the batch grows; else the batch stays, and
                each pipeline has fewer
    error       ValueError where tp x pp x cp does not divide the GPUs, or dp x micro-batch does not
                divide the batch
    """
    raise NotImplementedError("exercise 4.4: about 12 lines")


# %%
scaling_curve = check(scaling_curve)

# %%
small = replace(plan, dp=2, micro_batches=256)
counts = [32 * 2**n for n in range(8)]
plots.scaling({"the batch grows": scaling_curve(llama, small, dgx, counts, weak=True),
               "the batch stays": scaling_curve(llama, small, dgx, counts)})

# %% [markdown]
# This is what teams see when scaling "stops". The network isn't at fault: with 256 data ranks a pipeline has two micro-batches, and four stages.

# %% [markdown]
# ### 4.5 `search_layouts` - open
# > difficulty 5/5 · importance 5/5 · 50 minutes · about 12 lines
#
# Ten minutes to pass; the rest is for beating the library. Find the fastest plan that fits. `layouts(model, machine, gpus, sequence, batch, tool)` yields what the library asks, some thousand plans for each tool, in about a second. A loop over them passes. But the library doesn't look everywhere: a plan may recompute only a share of its layers (`recomputed`), shard over fewer ranks than all (`shard`), have another ZeRO stage. **So it can be beaten**, on one of the check's orders by a tenth. The check prints your seconds beside the library's.
#
# What a tool does by itself is fixed: `usual(tool, machine)` gives those fields of a Plan. Free are dp, tp, pp, cp, ep, virtual (with `schedule="interleaved"`), micro_batch, micro_batches, zero, shard, recompute, recomputed, outermost and offload (DeepSpeed's); sequence_parallel goes with tp above 1. `refuse(plan, ...)` raises a ValueError where a tool can't run a plan: ask it as often as you like.

# %%
from ranklab.planner.search import Found, NoLayout
from ranklab.planner.space import ADVISED, layouts, refuse


### BEGIN SOLUTION
from ranklab.planner.search import refusal


### END SOLUTION
def search_layouts(model, machine, gpus, sequence, batch, tools=ADVISED, watch=iter):
    """[Found]: layouts of these tools that fit in a GPU, the fastest first.

    Found is (plan, memory_per_gpu(...), step_time(...)). The check takes the first one: it passes
    refuse(plan, model, machine, gpus, sequence, batch), fits, and is at most 2% slower than the
    library's first.
    batch  sequences of a step, over all GPUs
    watch  shows progress: for plan in watch(plans)
    error  NoLayout, a ValueError, with the GB of the smallest layout, where none fits
    """
    raise NotImplementedError("exercise 4.5: about 12 lines, and more to beat the library")


# %%
search_layouts = check(search_layouts)

# %% [markdown]
# By your search: 10 billion parameters on two sites of 32 A100s, with ever slower links between them. What goes across the slow link?

# %%
from ranklab.planner import model_of_size
from ranklab.planner.why import why

ten, a100 = model_of_size(10e9), find_node("a100-dgx")
for far in (25, 5, 1.25, 0.3):  # GB/s of a GPU between the sites
    sites = replace(a100, island=32, far=far * 1e9)
    best = search_layouts(ten, sites, 64, 2048, 512)[0]
    spans = {axis: best.plan.span(axis, sites) for axis in ("weights", "pipeline")}
    across = [axis for axis, span in spans.items() if span.island < span.ranks]
    print(f"{far:5} GB/s: {best.step.total:.2f} s  {best.plan.tool} {best.plan.words()}\n"
          f"            across: {', '.join(across)}; {why(best.plan, best.step, sites)}")

# %% [markdown]
# Fast links carry gradients, because data ranks alone need no bubble. Over slow ones go the few messages of a pipeline.

# %% [markdown]
# ## 5. The real thing
#
# DeepSpeed estimates states, too. For ZeRO-2 on 4 nodes of 8 its estimate and ours must be equal: 2 bytes for each parameter's weight, and the 32 GPUs share 18: gradients in 16 bits, their sums and the weights in 32, and two moments.

# %%
from ranklab.zero.deepspeed_engine import quiet_deepspeed

quiet_deepspeed()
from deepspeed.runtime.zero import stage3, stage_1_and_2

# %% tags=["nbval-check-output"]
llama_8b = MODELS["llama-8b"]
N = int(llama_8b.parameters)
estimates = {2: stage_1_and_2.estimate_zero2_model_states_mem_needs(N, 8, 4, False)[1],
             3: stage3.estimate_zero3_model_states_mem_needs(N, 0, 8, 4, False)[1]}
for stage, estimate in estimates.items():
    said = sum(states(Plan(dp=32, zero=stage), "deepspeed", N, 32))
    print(f"ZeRO-{stage}: DeepSpeed's estimate {estimate / 1e9:.2f} GB, ours {said / 1e9:.2f} GB")

# %% [markdown]
# For ZeRO-3 it counts 18 bytes, and leaves out that each rank also holds its share of the 2-byte weights: 20 in all (`stage3.py` of DeepSpeed 0.19.8). Read an estimate before you believe it: ours as well.

# %% [markdown]
# The course's own trainer can be counted instead of estimated. One process poses as the first of 64: a fake process group, fake tensors, and the real code of lab 12.

# %% tags=["nbval-check-output"]
print(project.counted())

# %% [markdown]
# And the chosen plan, as what the tools read. This is the end of planning: someone starts it.

# %%
from ranklab.planner.export import deepspeed_json, megatron_arguments

for tool, words in (("megatron", megatron_arguments), ("deepspeed", deepspeed_json)):
    print(words(llama, search_layouts(llama, dgx, 256, 8192, 1024, tools=(tool,))[0].plan))

# %% [markdown]
# ## 6. Project
#
# **Six orders.** Each is a model, a machine and constraints, which the planner checks. First write a plan by hand for one of them, and look what fails:

# %% tags=["nbval-check-output"]
print(project.orders())

# %% tags=["nbval-check-output"]
print(project.grade("100b", Plan(dp=2, tp=8, pp=4, micro_batches=512, sequence_parallel=True)))

# %% [markdown]
# Now all of them, by your functions:

# %%
mine = {"memory": memory_per_gpu, "step": step_time, "cost": cost_per_token,
        "curve": scaling_curve, "search": search_layouts}
print(project.run(**mine))

# %% [markdown]
# **Your turn.** Change one thing in an order, and first write down what will happen: `far=0.1e9` bytes/s between the sites, `sequence=4096`, `batch=256`, `memory_bytes=40e9`, `network=5e9`.

# %%
print(project.run(**mine, only="10b", far=0.1e9))

# %% [markdown]
# ## 7. Measure
#
# Prediction beside measurement, for each source. *Usable* rows publish a metric and don't contradict themselves; *used* are those that say enough to be predicted. `pairs`: of two layouts of one model on the same GPUs, whose times differ by more than 5%, how often the faster one was named. For choosing that counts more than the error.

# %%
print(project.scores())

# %% [markdown]
# What can be decided with such errors? Whether it fits with room to spare, the order of costs, whether a layout is much worse than another. Not which of two that are 3% apart is better: run both, for twenty steps.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 13` in a terminal asks these and more, with other numbers each time.

# %%
questions("13_planner")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# ranklab plan --model llama-70b --gpus 256 --on h100-dgx --seq 8192 --batch 1024
# ranklab plan --params 13e9 --gpus 64 --on a100-dgx --seq 4096 --batch 512 --tokens 300e9 --price 2.5
# python -m ranklab.projects.planner score
# torchrun --nproc-per-node 8 -m ranklab.projects.planner measure --write node.json
# sbatch labs/jobs/planner.sbatch
# ```
#
# `measure` finds what *your* GPUs and links do: the best matrix product, a copy, all-reduces in a node and between nodes. It writes a file for `--on node.json`. A plan is worth a test on few GPUs: run 20 steps of it, compare, and only then rent the rest.
#
# Nothing of this lab was run on GPUs by us: the numbers are those that others have published, and each row names its source.

# %% [markdown]
# ## 10. What we left out
#
# - **Measured kernels.** Planners that time each operator on one GPU come within some 5%. Ours knows a rate for each kind of GPU, and that products go in tiles.
# - **Congestion**, other jobs, slow nodes: the constants are averages over other people's clusters.
# - **TPUs** and torus networks: their published rows are read, and not used.
# - **Learning.** A larger batch is faster, and may need more tokens.
#
# Next: **14_resilience**: what happens in the time that failures take.
