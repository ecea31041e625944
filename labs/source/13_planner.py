# %% [markdown]
# # 13 The planner: does it fit, how fast, what does it cost
#
# > 180 minutes · difficulty 4/5 · **laptop**: everything · **GPUs**: the same cells; and a measured file of your own nodes

# %% [markdown]
# ## 1. Story
#
# Llama 3 405B took 30.84 million GPU hours on up to 16,384 H100s (its model card; arXiv 2407.21783). At two dollars an hour, a layout that is 10% slower costs six million dollars more. At that size nobody finds the layout by trying. You compute it first.
#
# You have all the parts: how many bytes the states take (lab 06), what each axis sends (labs 02 to 12), how many micro-batches are in flight and how large the bubble is (lab 09). In this lab you add them up, to one number of bytes and one of seconds. Then you do what few planners do: you compare these numbers with about seven hundred published training runs, and see how far off they are.
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
# Each mark is a published run: the step time that its authors measured, against the one that the planner predicts. The runs range from one layer on 8 GPUs to Llama 3 on 16,384. Both axes are logarithmic, and the band is 20% to each side.

# %%
from ranklab.plots import planner as plots
from ranklab.projects import planner as project

plots.published(project.predicted())

# %% [markdown]
# ## 3. Smallest working code
#
# The smallest planner measures a link once and predicts another message. Two ranks all-reduce 4 MB. That gives the *bus bandwidth*, the bytes that each rank sends per second (lab 02), and from it the time for 16 MB.

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
# How far off is it on your machine? Bandwidth is not one number. It grows with the size of the message, and it depends on what else is running. So the planner uses a curve, from published sweeps of NCCL.

# %% [markdown]
# ## 4. Build it
#
# Three frozen dataclasses describe the question. A `Model` has the sizes of a transformer, a `Machine` is a GPU with its links, and a `Plan` is a layout with the tool that runs it. `usual(tool, machine)` gives the fields of a Plan that the tool decides by itself, for example which messages it hides behind computing and which kernels it has.

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
# **Predict.** Megatron-LM with bf16 keeps 18 bytes for each parameter: 2 for the weight, 4 for the gradient that accumulates over micro-batches (the *main gradient*), and 12 for Adam (a float32 copy and two moments). The distributed optimizer divides the last 12 among the data ranks. Take the plan above: 70.55 billion parameters, tensor 4 x pipeline 4 x data 16. If all parameters were spread evenly, how many GB of states would a GPU hold?

# %%
check(planner_states_gb=...)

# %% [markdown]
# They are not quite even. The first stage has the embedding and the most micro-batches in flight. The last stage has the head and the logits. Which stage is fullest depends on the plan, so look at several.
#
# Given, each for one GPU:
#
# - `numbers_of(model, plan, rank)`: (parameters, parameters of experts) of a pipeline rank. All data and context ranks have the first kind. The second kind is on fewer GPUs: each expert is on `plan.copies * plan.tp // plan.ep` of them.
# - `states(plan, tool, numbers, ranks)`: (weights, gradients, optimizer) in bytes, if the plan shards over `ranks` ranks. It does not know about `plan.offload`, which moves the optimizer to the host, so that it takes no memory of the GPU.
# - `kept_bytes(model, plan, tool)`: what *one* layer keeps of *one* micro-batch until its backward. A fourth argument, `"none"`, gives the bytes without any recomputation.
# - `in_flight(plan, rank)`: how many micro-batches wait on that rank at the worst moment (lab 09).
# - `buffer_bytes(model, plan, tool, numbers)`: gathered weights, buckets, messages. Here `numbers` is the first of the two, because experts are not gathered.
#
# `plan.tokens` counts the tokens of a micro-batch on one context rank, and `plan.sharders` the ranks over which states are sharded. Two numbers are fitted to measurements: CUDA and NCCL take `constants.context_bytes`, and the gaps between tensors take the part `constants.gaps` of activations and logits. You don't need `machine`; it is there because step_time has the same arguments.

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
# Your function on three trainings that really ran, so all three did fit: Llama 3 405B on 80 GB (FSDP beside tensor and pipeline ranks, as torchtitan does it), GLM-130B on 40 GB, and BLOOM-176B on 80 GB.

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
# **Predict.** A node has 8 H100s, each with its own network card of 400 Gbit/s. All GPUs of 16 such nodes take part in one all-reduce. What is the highest bus bandwidth (bytes that each rank sends per second) it can reach, in GB/s? NVLink is not the limit here.

# %%
check(planner_bus_gb=...)

# %% [markdown]
# For each micro-batch, a GPU computes its share of the layers. Whatever it waits for comes on top. These functions are given. They return seconds, without the messages that hide behind computing:
#
# - `layer_seconds(model, plan, machine, c)`: {part: seconds} of **all** layers for **one** micro-batch. The parts are products, attention, other, recompute, and the messages along tensor, context, expert, weights.
# - `head_seconds(...)`: the same for the head and the loss. The parts are products and other.
# - `sent_seconds(model, plan, machine, beside, c)`: the messages of one micro-batch between stages. `beside` is the time that a GPU is busy with one micro-batch: all the parts above, with their messages.
# - `bubble_part(model, plan, machine, c)`: the bubble of a pipeline with even stages, as a part of its *whole* time, the bubble included.
# - `update_seconds(model, plan, machine, beside, c)`: (data, optimizer), once per step. `beside` is the same as above.
#
# Three things are left for you. First the *average* GPU: pp stages share the layers and the head. Then the bubble. Then what the average hides: everyone waits for the fullest stage. `plan.stages(model.layers)` gives the number of layers of each stage, and the last stage also has the head. This waiting counts as bubble, too. A `Step` has the parts of layer_seconds by their names, and pipeline, bubble, data, optimizer, rest.

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
# Where does a step's time go? Your functions on four plans for Llama 3 70B on 256 H100s. Before you look, guess: which plan waits most, and which doesn't fit?

# %%
plans = {"16 x 4 x 4": plan,
         "16 x 4 x 4, 5 virtual": replace(plan, virtual=5, schedule="interleaved"),
         "4 x 8 x 8": replace(plan, dp=4, tp=8, pp=8, micro_batches=256),
         "256, FSDP, recompute": Plan(dp=256, sequence=8192, micro_batches=4, zero=3,
                                      recompute="full", **usual("torchtitan", dgx))}
plots.steps({f"{name}: {memory_per_gpu(llama, each, dgx).total / 1e9:.0f} GB":
             step_time(llama, each, dgx) for name, each in plans.items()})

# %% [markdown]
# A GPU has 86 GB. Virtual stages make the bubble smaller, but keep more micro-batches in flight. A planner that knew only time would choose a plan that does not fit.
#
# And now the truth: your two formulas on published runs. On a quarter of them, chosen by a hash of their names, nothing was fitted. The rest are the runs that were used for the fit:

# %% tags=["nbval-check-output"]
print(project.errors(memory_per_gpu, step_time))

# %% [markdown]
# No row is dropped because of its error. But it is easy to fool yourself: if you look at all rows while you shape the model, you have fitted it to all of them, whatever the hash says. So there is a harder test. Each *source* is left out of the fit in turn, because your cluster will be a new source. Then the median error over all rows is 9%, and 90% of the rows are below 21% (memory: 2% and 9%). `python -m ranklab.projects.planner fit` prints it, source by source, in a minute or two.

# %% [markdown]
# ### 4.3 What a token costs
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 4 lines
#
# **Predict.** You train a 13B model on sequences of 2,048 tokens (Llama 2's size). You can rent 40 GB A100s at 2.74 dollars an hour and reach 50% MFU, or A10Gs at 1.006 dollars an hour and reach 35%. An A100 has 312 TFLOP/s, an A10G 70. How many times as much does a token cost on the A10Gs?

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
# Your function, with the last published prices. The last column is the MFU that each GPU needs to match the cost of H100s at 40%.

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
# Before you rent L4s: nothing says that they reach 40%. They have 24 GB and no NVLink, so a 13B model needs many of them, and its messages go over PCIe.

# %% [markdown]
# ### 4.4 What more GPUs bring
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 12 lines
#
# **Predict.** A pipeline has 8 stages and runs 1F1B. The batch has 512 sequences, in micro-batches of 1, so with 4 data ranks each pipeline gets 128 micro-batches. Now take 64 data ranks and the same batch. Which part of the whole time is bubble?

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
# This is what teams see when scaling "stops". The network is not to blame. With 256 data ranks each pipeline has only two micro-batches for its four stages.

# %% [markdown]
# ### 4.5 `search_layouts` - open
# > difficulty 5/5 · importance 5/5 · 50 minutes · about 12 lines
#
# Find the fastest plan that fits. `layouts(model, machine, gpus, sequence, batch, tool)` yields the plans that the library tries: between a hundred and several thousand for each tool, in about a second. A loop over them passes the check, which takes you ten minutes. The other forty are for beating the library. It doesn't look everywhere: a plan may recompute only some of its layers (`recomputed`), shard over a part of the ranks (`shard`), or use another ZeRO stage. On one of the check's orders there is a plan that is a tenth faster than the library's. The check prints your seconds beside the library's.
#
# `usual(tool, machine)` gives the fields of a Plan that the tool decides; leave them as they are. You may choose dp, tp, pp, cp, ep, virtual (with `schedule="interleaved"`), micro_batch, micro_batches, zero, shard, recompute, recomputed, outermost and offload (DeepSpeed only); sequence_parallel needs tp above 1. `refuse(plan, ...)` raises a ValueError if the tool can't run the plan. Call it as often as you like.

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
# Your search on 10 billion parameters and two sites of 32 A100s, with slower and slower links between the sites. What does it send across the slow link?

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
# Over a fast link it sends gradients, because data parallelism has no bubble. Over a slow link it sends the few small messages of a pipeline.

# %% [markdown]
# ## 5. The real thing
#
# DeepSpeed estimates states, too. For ZeRO-2 on 4 nodes of 8 GPUs its estimate and ours must be equal. Each GPU holds 2 bytes for every weight. Another 18 bytes per parameter are shared by the 32 GPUs: gradients in 16 bits, their sums and the weights in 32 bits, and two moments.

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
# For ZeRO-3 it counts 18 bytes. It leaves out each rank's share of the 2-byte weights, which makes 20 (`stage3.py` of DeepSpeed 0.19.8). Read how an estimate is made before you believe it, and that includes ours.

# %% [markdown]
# The course's own trainer can be counted instead of estimated. One process plays the first of 64 ranks: it runs the real code of lab 12 on fake tensors, in a fake process group.

# %% tags=["nbval-check-output"]
print(project.counted())

# %% [markdown]
# And here is the chosen plan in the form that the tools read. Planning ends here, and someone starts the job.

# %%
from ranklab.planner.export import deepspeed_json, megatron_arguments

for tool, words in (("megatron", megatron_arguments), ("deepspeed", deepspeed_json)):
    print(words(llama, search_layouts(llama, dgx, 256, 8192, 1024, tools=(tool,))[0].plan))

# %% [markdown]
# ## 6. Project
#
# **Six orders.** Each order is a model, a machine and some constraints, and the planner checks the constraints. First write a plan for one of them by hand, and look at what fails:

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
# **Your turn.** Change one thing in an order. First write down what will happen. Ideas: `far=0.1e9` bytes/s between the sites, `sequence=4096`, `batch=256`, `memory_bytes=40e9`, `network=5e9`.

# %%
print(project.run(**mine, only="10b", far=0.1e9))

# %% [markdown]
# ## 7. Measure
#
# Prediction beside measurement, for each source. A row is *usable* if it publishes a metric and doesn't contradict itself. It is *used* if it says enough to be predicted. The column `pairs` takes two layouts of one model on the same GPUs whose times differ by more than 5%, and counts how often the planner named the faster one. If you want to choose a layout, that number matters more than the error.

# %%
print(project.scores())

# %% [markdown]
# What can you decide with errors of this size? Whether a model fits with room to spare, what it costs roughly, and whether one layout is much worse than another. But if two layouts are 3% apart, run both for twenty steps.

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
# `measure` finds out what *your* GPUs and links can do: the best matrix product, a copy, all-reduces inside a node and between nodes. It writes a file for `--on node.json`. Before you rent a thousand GPUs, run 20 steps of the plan on a few, compare, and only then rent the rest.
#
# We have run nothing of this lab on GPUs. The numbers were published by others, and each row names its source.

# %% [markdown]
# ## 10. What we left out
#
# - **Measured kernels.** Planners that time each operator on one GPU come within about 5%. Ours knows one rate for each kind of GPU, and that matrix products are cut into tiles.
# - **Congestion**, other jobs, slow nodes: the constants are averages over other people's clusters.
# - **TPUs** and torus networks: the published rows are there, but not used.
# - **Learning.** A larger batch makes a step more efficient, but the model may then need more tokens.
#
# Next: **14_resilience**. All these times assume that nothing fails, and on thousands of GPUs something fails every few hours.
