# %% [markdown]
# # 13 The planner: does it fit, how fast, what does it cost
#
# > 170 minutes, 30 more to beat the library in 4.6, 35 more with Further · difficulty 4/5 · **laptop**: everything · **GPUs**: the same cells; and a measured file of your own nodes

# %% [markdown]
# ## 1. Story
#
# Llama 3 405B took 30.84 million GPU hours on up to 16,384 H100s (its model card; arXiv 2407.21783). At two dollars an hour, a layout that is 10% slower costs six million dollars more. At that size nobody finds the layout by trial and error. You compute it first.
#
# You already know all the parts: how many bytes the states take (lab 06), what each axis sends (labs 02 to 12), how many micro-batches are in flight and how large the bubble is (lab 09). In this lab you add them up into two numbers, the bytes on a GPU and the seconds of a step. Then you do what few planners do: you compare these numbers with 655 published step times, and see how far off they are.
#
# The lab needs labs 06, 08, 09; 12 helps.

# %%
from dataclasses import fields, replace

import torch
import torch.distributed as dist

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab.planner import Plan, find_node
from ranklab.planner.catalog import MODELS
from ranklab.planner.constants import CONSTANTS
from ranklab.planner.space import usual
from ranklab.planner.step import Step

begin("13_planner")

# %% [markdown]
# ## 2. Picture
#
# Each mark is a published run, with the step time that its authors measured and the one that the planner predicts. The runs range from one layer on 8 GPUs to Llama 3 on 16,384. Both axes are logarithmic, and inside the band a prediction is off by less than 20%.

# %%
from ranklab.plots import planner as plots
from ranklab.projects import planner as project

plots.published(project.predicted())

# %% [markdown]
# Look at the runs with names, far below the band. A planner knows only what it models, so where something else slows a run down, it predicts too short a step.

# %% [markdown]
# ## 3. Smallest working code
#
# The smallest planner measures a link once, and then predicts the time of another message. Two ranks all-reduce 4 MB. That gives the *bus bandwidth*, the bytes that each rank sends per second (lab 02). The time for 16 MB follows from it.

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
# How far off is the prediction on your machine? Bandwidth is not one number. It grows with the size of the message, and it depends on what else is running. So the planner uses a curve, from published measurements of NCCL over many message sizes.

# %% [markdown]
# ## 4. Build it
#
# Three frozen dataclasses describe the question. A `Model` has the sizes of a transformer, a `Machine` is a GPU with its links, and a `Plan` is a layout together with the tool that runs it: Megatron-LM, torchtitan, DeepSpeed or the course's own trainer. `usual(tool, machine)` gives the fields of a Plan that the tool decides by itself, for example which messages it hides behind computing and which kernels it has.

# %% tags=["nbval-check-output"]
llama, dgx = MODELS["llama-70b"], find_node("h100-dgx")
plan = Plan(dp=16, tp=4, pp=4, sequence=8192, micro_batches=64, zero=1, sequence_parallel=True,
            **usual("megatron", dgx))
print(f"{llama.parameters / 1e9:.1f} billion parameters in {llama.layers} layers")
print(f"{plan.gpus} GPUs, {plan.batch} sequences in a step, layers of each stage: "
      f"{plan.stages(llama.layers)}")
print(f"a GPU: {dgx.peak_flops / 1e12:.0f} TFLOP/s, {dgx.memory_bytes / 1e9:.1f} GB "
      f"({dgx.memory_bytes / 2**30:.1f} GiB); {dgx.node} in a node at {dgx.link / 1e9:.0f} GB/s, "
      f"{dgx.network / 1e9:.0f} between nodes")

# %% [markdown]
# ### 4.1 What a token costs
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 4 lines
#
# *After this you can turn an MFU and a price into dollars for a token, and compare two GPUs by it.*
#
# **Predict.** You train a 13B model (Llama 2's size) on sequences of 2,048 tokens. You can rent 40 GB A100s at 2.74 dollars an hour and reach an MFU of 50% (the part of the peak that the model's own FLOPs use, lab 01), or A10Gs at 1.006 dollars an hour and reach 35%. An A100 has 312 TFLOP/s, and an A10G has 70. How many times as much does a token cost on the A10Gs?

# %%
check(planner_a10_times=...)

# %%
def cost_per_token(model, sequence, machine, mfu, price):
    """Return the dollars that a training token costs at this MFU, on one of these GPUs or many.

    mfu    fraction of machine.peak_flops; model.flops_per_token has all FLOPs of a token
    price  dollars per GPU and hour
    Raises: ValueError if the MFU is 0 or less, or more than 1.
    """
    raise NotImplementedError("exercise 4.1: about 4 lines")


# %%
cost_per_token = check(cost_per_token)

# %% [markdown]
# Now use your function with the latest published prices. "Needs ... to match" is the MFU at which a GPU costs as little as H100s at 40%.

# %% tags=["nbval-check-output"]
from ranklab.planner.cost import price_of

llama_13b = MODELS["llama2-13b"]
h100 = cost_per_token(llama_13b, 2048, dgx, 0.4, price_of("H100-SXM-80GB")[0])
for cards in ("h100-dgx", "a100-40gb-dgx", "a10-pcie", "l4-pcie"):
    node = find_node(cards)
    price, source = price_of(node.accelerator)
    cost = cost_per_token(llama_13b, 2048, node, 0.4, price)
    print(f"{cards:14} {price:5.2f} $/h  {1e6 * cost:.3f} $ a million tokens at 40%; "
          f"needs {0.4 * cost / h100:4.0%} to match  ({source.split(' on')[0]})")

# %% [markdown]
# Before you rent L4s, remember that nothing says they reach 40%. They have 24 GB and no NVLink, so a 13B model needs many of them, and its messages go over PCIe.

# %% [markdown]
# ### 4.2 A planner of five lines
# > difficulty 2/5 · importance 5/5 · 15 minutes · about 5 lines
#
# *After this you can estimate the time of a step by hand, and say how far off such an estimate is.*
#
# **Predict.** Llama 3 405B was trained on 15.6 trillion tokens. Count 6 FLOPs for each parameter and token, and let an H100 (989 TFLOP/s) reach 40% of its peak. How many million GPU hours is that?

# %%
check(planner_gpu_hours=...)

# %% [markdown]
# Most plans begin like this. Now write the rule for one step of any plan. Three things count. All GPUs share the FLOPs of the batch, and blocks that recompute run their forward twice. A busy GPU reaches a part of its peak, the *efficiency*: choose one number for all runs. (The MFU is lower: it counts the waiting, and not the second forward.) And a pipeline waits: P stages with M micro-batches and v virtual stages add (P - 1) / (v M) of the busy time (lab 09).
#
# The check then compares your rule with all published runs of dense models in bf16. Change the efficiency until half of the runs are within 15%.

# %%
def rough_step_seconds(model, plan, machine):
    """Return the seconds of a step by a rule of thumb: FLOPs, one efficiency, a bubble.

    FLOPs       model.flops_per_token(plan.sequence) for each token of the batch, divided among
                all GPUs; with forwards=2 if plan.recompute is "full"
    efficiency  the fraction of machine.peak_flops that a busy GPU reaches: one number for all
                runs, which you choose
    bubble      (P - 1) / (v M) of the busy time, in addition to it: plan.pp stages, plan.virtual,
                plan.micro_batches (lab 09)
    It must be within 15% for half of the published runs of dense models in bf16. More terms are
    welcome, as long as each of the rules above still holds within 10%.
    """
    raise NotImplementedError("exercise 4.2: about 5 lines")


# %%
rough_step_seconds = check(rough_step_seconds)

# %% [markdown]
# Your five lines are within 15% of half of 434 measured steps, and all that they know of a cluster is the number of its GPUs and their peak. Where are they wrong? The table has a line for each source. A plus means that half of its runs are predicted too long by at least this much, a minus too short. The last column is the error of the library's `step_time`.

# %% tags=["nbval-check-output"]
print(project.rough_errors(rough_step_seconds))

# %% [markdown]
# What is missing? Surely the messages. So add the gradients of each GPU, 16 bits sent around a ring over the network, as if nothing hid them:

# %% tags=["nbval-check-output"]
def with_gradients(model, plan, machine):
    seconds = 2 * 2 * model.parameters / (plan.tp * plan.pp) / machine.network
    return rough_step_seconds(model, plan, machine) + seconds * (plan.gpus > machine.node)


print(project.rough_errors(with_gradients))

# %% [markdown]
# It gets worse: two sources are now predicted at more than twice their time. Their tools send gradients while the GPUs compute (lab 03), and published layouts are those that somebody had already tuned. So a better planner must know *which* messages are hidden. It must also know that small matrix products run slower than large ones, and that tensor ranks wait for each other in every layer. `step_time` in 4.4 has a part for each of these. But a plan that does not fit has no step time, so memory comes first.

# %% [markdown]
# ### 4.3 What a GPU holds
# > difficulty 4/5 · importance 5/5 · 30 minutes · about 18 lines
#
# *After this you can compute by hand what each GPU of a layout holds, and say whether it fits.*
#
# **Predict.** Megatron-LM with bf16 keeps 18 bytes for each parameter: 2 for the weight, 4 for the gradient that accumulates over micro-batches (the *main gradient*), and 12 for Adam (a float32 copy and two moments). The distributed optimizer divides the last 12 among the data ranks. Take the plan above: 70.55 billion parameters, tensor 4 x pipeline 4 x data 16. If all parameters were spread evenly, how many GB of states would a GPU hold?

# %%
check(planner_states_gb=...)

# %% [markdown]
# An H100 is sold with "80 GB". That is 80 GiB (85.9 GB), of which CUDA offers 79.1 GiB to a program: torch prints it when memory runs out ("GPU 0 has a total capacity of 79.10 GiB"). The planner uses that number, and its counterpart on other GPUs. It once used 85.9 GB, and so this lab told you to start a job of 85.3 GB, more than the card has.

# %% [markdown]
# In a real plan the stages are not quite even. The first stage has the embedding and the most micro-batches in flight. The last stage has the head and the logits. Which stage is fullest depends on the plan, so look at several stages.
#
# These functions are given. Each counts for one GPU:
#
# - `numbers_of(model, plan, rank)`: (parameters outside of experts, parameters of experts) of a pipeline rank. The first kind is the same on all data and context ranks. The second is on fewer GPUs: each expert is on `plan.copies * plan.tp // plan.ep` of them.
# - `states(plan, tool, numbers, ranks)`: (weights, gradients, optimizer) in bytes, if the plan shards over `ranks` ranks. It ignores `plan.offload`. With `plan.offload` the optimizer is on the host and takes no memory of the GPU.
# - `kept_bytes(model, plan, tool)`: what *one* layer keeps of *one* micro-batch until its backward. A fourth argument, `"none"`, gives the bytes without any recomputation.
# - `in_flight(plan, rank)`: how many micro-batches wait on that rank at the worst moment (lab 09).
# - `buffer_bytes(model, plan, tool, numbers)`: gathered weights, buckets, messages. Its `numbers` is the first of the two kinds, because experts are not gathered.
#
# `plan.tokens` counts the tokens of a micro-batch on one context rank, and `plan.sharders` counts the ranks over which states are sharded. Two numbers are fitted to measurements: CUDA and NCCL take `constants.context_bytes` (the field `context`), and the gaps between tensors (`allowance`) take `constants.gaps` times the bytes of activations and logits. You don't need `machine`. It is there because step_time has the same arguments.

# %%
from ranklab.planner.memory import (
    GpuMemory, buffer_bytes, in_flight, kept_bytes, numbers_of, ours, states,
)


def memory_per_gpu(model, plan, machine, tool=None, constants=CONSTANTS):
    """Return the GpuMemory of the pipeline rank that holds the most.

    states       sharded over plan.sharders, but experts over the ranks with the same experts
    activations  of the layers of a stage, for each micro-batch in flight; with recompute also what
                 one layer keeps when it runs again without recomputation, and as much again for
                 the gradients
    logits       8 bytes each on the last stage, split over the tensor ranks: 16 bits, float32, and
                 a gradient in 16 bits; 12 bytes in torchtitan, with torch's own loss, which has a
                 gradient in float32 besides
    tool         megatron, torchtitan, deepspeed or ours; None: plan.tool
    """
    if (tool or plan.tool) == "ours":
        return ours(model, plan, constants)
    raise NotImplementedError("exercise 4.3: about 18 lines")


# %%
memory_per_gpu = check(memory_per_gpu)

# %% [markdown]
# Try your function on three runs that must have fit, because they ran: Llama 3 405B on 80 GB (FSDP with tensor and pipeline ranks, as in torchtitan), GLM-130B on 40 GB, and BLOOM-176B on 80 GB.

# %% tags=["nbval-check-output"]
for name, cards, run_plan in project.TRAINED:
    memory = memory_per_gpu(MODELS[name], run_plan, find_node(cards))
    parts = {field.name: getattr(memory, field.name) / 1e9 for field in fields(memory)}
    print(f"{name:11}{memory.total / 1e9:4.0f} of {find_node(cards).memory_bytes / 1e9:.0f} GB: "
          + ", ".join(f"{part} {n:.0f}" for part, n in parts.items() if n >= 1.5))

# %% [markdown]
# ### 4.4 How long a step takes
# > difficulty 5/5 · importance 5/5 · 40 minutes · about 14 lines
#
# *After this you can split the time of a step into computing, waiting, and messages that nothing hides.*
#
# **Predict.** A node has 8 H100s, each with its own network card of 400 Gbit/s. All GPUs of 16 such nodes take part in one all-reduce. What is the highest bus bandwidth (the bytes that each rank sends per second) that it can reach with rings, in GB/s? NVLink is not the limit here.

# %%
check(planner_bus_gb=...)

# %% [markdown]
# That is the bound for rings. If each node summed first, its cards would carry a little less, and the bus bandwidth could reach 423 GB/s; with switches that sum (SHARP) it could be higher still, but then it is no longer what a rank sends.

# %% [markdown]
# In each micro-batch a GPU computes its share of the layers, and the time that it waits comes on top. These functions are given; they return seconds, without the messages that hide behind computing:
#
# - `layer_seconds(model, plan, machine, c)`: {part: seconds} of **all** layers for **one** micro-batch. The parts are products, attention, other, recompute, and the messages along tensor, context, expert, weights.
# - `head_seconds(model, plan, machine, c)`: the same for the head and the loss. The parts are products and other.
# - `sent_seconds(model, plan, machine, beside, c)`: the messages of one micro-batch between stages. `beside` is the time that a GPU is busy with one micro-batch: all the parts above, messages included.
# - `bubble_part(model, plan, machine, c)`: the bubble of a pipeline with even stages, as a part of its *whole* time. That time includes the bubble.
# - `update_seconds(model, plan, machine, beside, c)`: (data, optimizer): the gradients' messages and the optimizer's work, once per step. `beside` is the same as above.
#
# Three things are left for you. First compute the *average* GPU: pp stages share the layers and the head. Then add the bubble. Then add what the average hides: all stages wait for the fullest one. `plan.stages(model.layers)` gives the number of layers of each stage, and the last stage also has the head. This waiting also counts as bubble. A `Step` has the parts of layer_seconds under the same names, and pipeline, bubble, data, optimizer, rest.

# %%
from ranklab.planner.step import (
    bubble_part, head_seconds, layer_seconds, sent_seconds, update_seconds,
)


def step_time(model, plan, machine, constants=CONSTANTS):
    """Return the Step of this plan on the average GPU: parts in seconds that add up to its total.

    A GPU computes its share of the layers for each micro-batch; the last stage also has the head.
    bubble     the schedule's part of (busy + sent + bubble), and waiting for the fullest stage
    data, optimizer  once a step; the work of one micro-batch hides some of data
    rest       constants.step_seconds
    """
    c, M, P = constants, plan.micro_batches, plan.pp
    raise NotImplementedError("exercise 4.4: about 14 lines")


# %%
step_time = check(step_time)

# %% [markdown]
# Where does a step's time go? Run your functions on four plans for Llama 3 70B on 256 H100s. Before you look, guess: which plan waits most, and which doesn't fit?

# %%
plans = {"16 x 4 x 4": plan,
         "16 x 4 x 4, 5 virtual": replace(plan, virtual=5, schedule="interleaved"),
         "4 x 8 x 8": replace(plan, dp=4, tp=8, pp=8, micro_batches=256),
         "256, FSDP, recompute": Plan(dp=256, sequence=8192, micro_batches=4, zero=3,
                                      recompute="full", **usual("torchtitan", dgx))}
memory = {name: memory_per_gpu(llama, plan, dgx).total / 1e9 for name, plan in plans.items()}
seconds = {name: step_time(llama, plan, dgx) for name, plan in plans.items()}
fastest = min(seconds, key=lambda name: seconds[name].total)
plots.steps({f"{name}: {memory[name]:.0f} GB": step for name, step in seconds.items()},
            f"The fastest plan takes {memory[fastest]:.0f} GB, and a GPU has "
            f"{dgx.memory_bytes / 1e9:.0f}")

# %% [markdown]
# A GPU has 85 GB. Virtual stages make the bubble smaller but keep more micro-batches in flight, so a planner that looked only at time would choose a plan that does not fit. The first plan fits, with 3 GB to spare. Would you start it? For one published run in ten the planner's memory is off by more than 9%, so the search in 4.6 leaves a tenth of a GPU free, and this plan is out as well.
#
# Now for the truth: how far off are your two formulas on published runs? A quarter of the runs was kept back from the fit, chosen by a hash of their names. The constants were fitted on the rest:

# %% tags=["nbval-check-output"]
print(project.errors(memory_per_gpu, step_time))

# %% [markdown]
# No run is dropped because of its error. But it is still easy to fool yourself: if you look at all runs while you shape the model, you have fitted it to all of them, whatever the hash says. So there is a harder test. It leaves each *source* out of the fit in turn, because your cluster will be a new source. Then the median error over all runs is 9%, and 90% of them are below 23% (memory: 2% and 13%). `python -m ranklab.projects.planner fit` prints it, source by source, in a minute or two.

# %% [markdown]
# ### 4.5 What more GPUs bring
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 12 lines
#
# *After this you can say why a strong-scaling curve bends, and at how many GPUs it will.*
#
# **Predict.** A pipeline has 8 stages and runs 1F1B. The batch has 512 sequences, in micro-batches of 1, so with 4 data ranks each pipeline gets 128 micro-batches. Now take 64 data ranks and the same batch. Which part of the whole time is the bubble?

# %%
check(planner_bubble=...)

# %% [markdown]
# *Strong* scaling keeps the batch, because a model may learn less from each token of a larger batch. *Weak* scaling lets the batch grow.

# %%
def scaling_curve(model, plan, machine, counts, weak=False):
    """Return [(GPUs, tokens/s of all, efficiency)] of the plan with other numbers of data ranks.

    Everything else in the plan stays the same: recompute, offload, precision, ...
    efficiency  tokens/s per GPU, divided by the tokens/s per GPU at the first of `counts`
    weak        True: each pipeline keeps its number of micro-batches, and the batch grows; False:
                the batch stays the same, and each pipeline has fewer micro-batches
    Raises: ValueError if tp x pp x cp does not divide the GPUs, or if dp x micro-batch does not
        divide the batch.
    """
    raise NotImplementedError("exercise 4.5: about 12 lines")


# %%
scaling_curve = check(scaling_curve)

# %%
small = replace(plan, dp=2, micro_batches=256)
counts = [32 * 2**n for n in range(8)]
plots.scaling({"the batch grows": scaling_curve(llama, small, dgx, counts, weak=True),
               "the batch stays": scaling_curve(llama, small, dgx, counts)})

# %% [markdown]
# This is what teams see when scaling "stops", and the network is not to blame. With 256 data ranks each pipeline has only two micro-batches for its four stages.

# %% [markdown]
# ### 4.6 The fastest layout that fits
# > difficulty 5/5 · importance 5/5 · 20 minutes · about 12 lines · open: no recipe
#
# *After this you can find the fastest layout that fits on a cluster that you have not seen before.*
#
# Find the fastest plan that fits. `layouts(model, machine, gpus, sequence, batch, tool)` yields the plans that the library tries: between a hundred and several thousand for each tool, in about a second. A loop over them passes the check. If you have half an hour more, beat the library, which doesn't look everywhere: a plan may recompute only some of its layers (`recomputed`), shard over a part of the ranks (`shard`), or use another ZeRO stage. In one of the check's cases there is a plan that is a tenth faster than the library's. The check prints your seconds next to the library's.
#
# Leave the fields that `usual(tool, machine)` gives as they are, because the tool decides them. You may choose dp, tp, pp, cp, ep, virtual (with `schedule="interleaved"`), micro_batch, micro_batches, zero, shard, recompute, recomputed, outermost and offload (DeepSpeed only). sequence_parallel needs tp above 1. `refuse(plan, ...)` raises a ValueError if the tool can't run the plan. Call it as often as you like.

# %%
from ranklab.planner.search import Found, NoLayout
from ranklab.planner.space import ADVISED, layouts, refuse


### BEGIN SOLUTION
from ranklab.planner.search import RESERVE, refusal, room


### END SOLUTION
def search_layouts(model, machine, gpus, sequence, batch, tools=ADVISED, watch=iter, reserve=0.1):
    """Return [Found]: layouts of these tools that fit in a GPU, the fastest first.

    Found is (plan, memory_per_gpu(...), step_time(...)), all three of the same plan.
    Each plan must pass refuse(plan, model, machine, gpus, sequence, batch), and fit.
    The first is at most 2% slower than the library's first.
    Return ten or more, or all that fit if there are fewer: a constraint may exclude the fastest.
    batch    sequences per step, over all GPUs
    watch    shows progress: for plan in watch(plans); call it, at least on the plans of layouts()
    reserve  the fraction of machine.memory_bytes that stays free: a plan fits if it needs at most
             the rest
    Raises: NoLayout, a ValueError, if no layout fits: the message gives the GB that the smallest
        one needs; also if layouts() yields no plan at all.
    """
    raise NotImplementedError("exercise 4.6: about 12 lines, and more to beat the library")


# %%
search_layouts = check(search_layouts)

# %% [markdown]
# Run your search for 10 billion parameters on two sites of 32 A100s, with slower and slower links between the sites. What does the best plan send across the slow link?

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
# Over a fast link the best plan sends gradients, because data parallelism has no bubble. Over a slow link it sends the few small messages of a pipeline.

# %% [markdown]
# ### Further
#
# Two questions about newer GPUs, which are not part of the 170 minutes: what FP8 brings, and what changes if NVLink joins 72 GPUs instead of 8.
#
# #### `fp8_speedup`
# > difficulty 3/5 · importance 4/5 · 20 minutes · about 8 lines
#
# A tensor core does twice as many FLOPs in FP8 as in bf16. Why is a step not twice as fast? FP8 is for the matrix products of the blocks, and they are only a part of the step. Attention's core, the head and the embeddings stay in bf16, and so do messages, unless the tool casts them first. Master weights and optimizer stay in float32.
#
# **Predict.** Three quarters of a step are the blocks' matrix products. FP8 makes them 1.86 times as fast: the best measured products of H100 and B200 reach, on average, 93% of twice bf16's rate. How many times as fast is the step?

# %%
check(planner_fp8_times=...)

# %% [markdown]
# That was Amdahl's law. Now apply it to any plan. You have `step_time` and these:
#
# - `head_seconds(model, plan, machine)["products"]`: the head's products for one micro-batch, on the last of the `plan.pp` stages. A Step is about the average stage.
# - `machine.rate(precision)`: FLOP/s of the best products in "bf16" or "fp8". `machine.fp8` is 0 if a GPU has no FP8.
# - `plan.rerun_share`: the share of the layers whose whole forward runs twice. (It is 0 with recompute="operators", which repeats half of the products; leave that out.)

# %%
def fp8_speedup(model, plan, machine):
    """Return how many times as fast a step in bf16 is with FP8, by Amdahl's law.

    products   of the layers run machine.rate("fp8") / machine.rate("bf16") times as fast; the
               head's stay in bf16. Step.products has both; head_seconds(...)["products"] is one
               micro-batch's on the last of plan.pp stages, and Step is about the average stage
    recompute  Step.recompute has the layers' forward products once more, for plan.rerun_share of
               the layers: forward is a third of the layers' products, and also runs in FP8
    bubble     shrinks by the same factor as the busy seconds, which are all parts of a Step but
               pipeline, bubble, data, optimizer and rest
    all other parts of step_time(model, plan, machine) keep their seconds
    Raises: ValueError if plan.precision is not "bf16", or if machine.fp8 is 0: it has no FP8.
    """
    raise NotImplementedError("exercise fp8_speedup: about 8 lines")


# %%
fp8_speedup = check(fp8_speedup)

# %% [markdown]
# Some published runs come in pairs: the same model, layout, batch and GPUs, once in bf16 and once in FP8. What does your function say about them? "share" is the part of the step in bf16 that FP8 speeds up.

# %% tags=["nbval-check-output"]
print(project.fp8_gains(fp8_speedup))

# %%
from ranklab.planner.fp8 import fp8_change, matmul_share, published_pairs

plots.fp8([(matmul_share(pair.bf16.model, pair.bf16.plan, pair.bf16.machine), pair.speedup,
            pair.bf16.name) for pair in published_pairs()], dgx.rate("fp8") / dgx.rate("bf16"))

# %% [markdown]
# All points are below the curve. Amdahl's law leaves out what FP8 adds: each tensor needs a scale and a cast, in the forward and in the backward. It also leaves out that shorter products hide fewer messages. With a scale for each row, an 8B on 64 GPUs even became slower. NVIDIA's guide says 1.2 to 1.5 times "typically", depending on the share of the linear layers (Megatron-Bridge, performance-guide.md, commit 0bc9334), and torchao says up to 1.25 for an 8B on 8 GPUs and up to 1.5 for a 405B on 512 (its page on quantized training, March 2026).
#
# Messages can shrink as well. Weights that FSDP gathers may be cast before they are sent: torchtitan's `enable_fsdp_float8_all_gather`, Megatron's `--fp8-param-gather`. For which of these three plans does that matter?

# %% tags=["nbval-check-output"]
fsdp = usual("torchtitan", dgx)
bf16_plans = {
    "8B, 8 ranks": ("llama-8b", Plan(dp=8, zero=3, sequence=8192, recompute="operators", **fsdp)),
    "70B, 16 x 4 x 4": ("llama-70b", plan),
    "405B, 64 x 8": ("llama-405b", Plan(dp=64, tp=8, zero=3, sequence=8192, micro_batch=2,
                                        recompute="full", sequence_parallel=True, **fsdp))}
for name, (size, run_plan) in bf16_plans.items():
    change = fp8_change(MODELS[size], run_plan, dgx)
    before, after = change.seconds
    print(f"{name:16} {before / after:.2f} times as fast, {before / change.gathers:.2f} if weights "
          f"are gathered in FP8 ({change.gathered[0] / 1e9:.0f} GB of them in bf16); "
          f"{change.memory[0] / 1e9:.0f} GB becomes {change.memory[1] / 1e9:.0f}")

# %% [markdown]
# It matters for the last plan, which waits for its weights. Memory hardly changes: the states stay the same, and only in Megatron's plan the inputs of products are kept in one byte (by Transformer Engine). `ranklab plan --precision fp8` prints all this for the best layout.
#
# #### 64 experts in a rack
#
# In a GB200 or GB300 NVL72 one NVLink domain joins 72 GPUs, where a DGX joins 8. That matters most for experts, because each rank sends rows to all the others.
#
# **Predict.** 64 experts are on 64 GPUs, one each. Loads are even, so of 64 rows that a GPU sends each expert gets one, and one row stays on the GPU. The all-to-all is as fast as its slower link. Take 8 nodes of 8 B200s (NVLink 900 GB/s, a network card of 50 GB/s for each GPU), and one rack of GB200s (NVLink 900 GB/s). How many times as long does the all-to-all take in the nodes?

# %%
check(planner_rack_times=...)

# %% [markdown]
# Real dispatchers do better on nodes: a token crosses the network once to each node with some of its 8 experts, and NVLink passes it on (DeepEP, lab 11). The planner counts it like that. Here is DeepSeek-V3, with 256 experts, on 256 GPUs, with the experts on 2 to 64 of them, if NVLink joins 8 of these GPUs or 64:

# %%
from ranklab.planner.domains import expert_traffic

rack, experts = find_node("gb200-nvl72"), MODELS["deepseek-v3"]
wide = Plan(dp=64, pp=4, ep=64, virtual=4, schedule="interleaved", zero=1, sequence=4096,
            micro_batches=64, **usual("megatron", rack))
plots.domains({f"NVLink joins {domain}": [
    (ep, expert_traffic(experts, replace(wide, ep=ep), rack, domain).seconds)
    for ep in (2, 4, 8, 16, 32, 64)] for domain in (8, 64)})

# %% [markdown]
# Look at 16 ranks, the first group that does not fit in a node. For 64 ranks the planner counts:

# %% tags=["nbval-check-output"]
for domain in (8, 64):
    traffic = expert_traffic(experts, wide, rack, domain)
    print(f"NVLink joins {domain:2}: {traffic.crossing:4.0%} of a plain all-to-all's rows leave; "
          f"with tokens sent once to a node {traffic.nbytes / 1e9:5,.0f} GB of each GPU; "
          f"all-to-alls {traffic.seconds:2.0f} s, step {traffic.step:.0f} s")

# %% [markdown]
# What do people do about it? In these releases of Megatron-Bridge NVIDIA publishes the same model on both kinds of machine:

# %% tags=["nbval-check-output"]
print(project.racks())

# %% [markdown]
# On nodes of 8 its layouts mostly keep the experts inside a node, on 8 ranks, and pay with 16 pipeline stages, because then each rank holds eight times as many experts. In a rack the experts spread over 64 ranks. Its guide says two things about that (performance-guide.md, commit 0bc9334): keep expert ranks within an NVLink domain, and take only 64 of the 72 GPUs, so that no group lies in two racks. For serving, NVIDIA calls the same idea *wide EP*: DeepSeek-R1's experts are on more than 8 GPUs, over the NVLink of several hosts (TensorRT-LLM, tech blog 4, commit 1d263f1). `ranklab plan --model deepseek-v3 --gpus 256 --on gb200-nvl72 --domains 8,64` prints the comparison for the best layout.

# %% [markdown]
# ## 5. The real thing
#
# DeepSpeed also estimates states. For ZeRO-2 on 4 nodes of 8 GPUs its estimate and ours must be equal. Each GPU holds 2 bytes for every weight. The 32 GPUs share another 18 bytes per parameter: gradients in 16 bits, their sums and the weights in 32 bits, and two moments.

# %%
from ranklab.peers.deepspeed_zero import quiet_deepspeed

quiet_deepspeed()
from deepspeed.runtime.zero import stage3, stage_1_and_2

# %% tags=["nbval-check-output"]
llama_8b = MODELS["llama-8b"]
N = int(llama_8b.parameters)
estimates = {2: stage_1_and_2.estimate_zero2_model_states_mem_needs(N, 8, 4, False)[1],
             3: stage3.estimate_zero3_model_states_mem_needs(N, 0, 8, 4, False)[1]}
for stage, estimate in estimates.items():
    total = sum(states(Plan(dp=32, zero=stage), "deepspeed", N, 32))
    print(f"ZeRO-{stage}: DeepSpeed's estimate {estimate / 1e9:.2f} GB, ours {total / 1e9:.2f} GB")

# %% [markdown]
# For ZeRO-3 DeepSpeed counts 18 bytes per parameter: 2 for the weights, and 16 for their float32 copy, its gradient and two moments. Unlike its count for ZeRO-2, this one leaves out the 2-byte gradients; with them it is 20 (`stage3.py` and `stage_1_and_2.py` of DeepSpeed 0.19.8). Read how an estimate is made before you believe it, and that includes ours.

# %% [markdown]
# For the course's own trainer you can count instead of estimating. One process plays the first of 64 ranks. It runs the real code of lab 12 on fake tensors, in a fake process group.

# %% tags=["nbval-check-output"]
print(project.counted())

# %% [markdown]
# And here is the best plan for each tool, in the form that the tool reads.

# %%
from ranklab.planner.export import deepspeed_json, megatron_arguments

for tool, words in (("megatron", megatron_arguments), ("deepspeed", deepspeed_json)):
    print(words(llama, search_layouts(llama, dgx, 256, 8192, 1024, tools=(tool,))[0].plan))

# %% [markdown]
# Before you start such a job, somebody asks three things. *Which margin?* A tenth of the memory: a plan takes at most 76.4 of the 84.9 GB. *Which assumptions are switched on?* The ones in `usual`, and a run that lacks one is slower. For the fastest plan, here are the seconds of a step without each:

# %%
from ranklab.planner.why import assumptions

best = search_layouts(llama, dgx, 256, 8192, 1024)[0]
print(f"{best.plan.tool} {best.plan.words()}: {best.memory.total / 1e9:.1f} GB, "
      f"{best.step.total:.1f} s, {best.step.mfu(llama, best.plan, dgx):.0%} MFU")
for assumption, seconds in assumptions(llama, best.plan, dgx):
    print(f"  {seconds:5.1f} s without {assumption}")

# %% [markdown]
# Be careful with 50% MFU: seven of the published runs of Megatron on H100s train a dense model in bf16, and those reach 41 to 48%. *And FP8?* The search plans bf16 alone. `replace(plan, precision="fp8")` tells you the seconds, because the planner knows the measured rate of FP8 products, and that Transformer Engine keeps their inputs in one byte; for the 196 published step times in FP8, MXFP8 or NVFP4 its median error is 7%. (Further is about what to expect.) It knows nothing of casts, of FP8 attention, or of what the precision does to your loss.

# %% [markdown]
# ## 6. Project
#
# **Six orders.** An order is a model, a machine and some constraints, and the planner checks whether a plan keeps them. First grade a plan that was written by hand, and look at what fails:

# %% tags=["nbval-check-output"]
print(project.orders())

# %% tags=["nbval-check-output"]
print(project.grade("100b", Plan(dp=2, tp=8, pp=4, micro_batches=512, sequence_parallel=True)))

# %% [markdown]
# Now plan all six orders with your functions:

# %%
functions = {"memory": memory_per_gpu, "step": step_time, "cost": cost_per_token,
             "curve": scaling_curve, "search": search_layouts}
print(project.run(**functions))

# %% [markdown]
# **Your turn.** Change one thing in an order. First write down what will happen. Ideas: `far=0.1e9` bytes/s between the sites, `sequence=4096`, `batch=256`, `memory_bytes=40e9`, `network=5e9`.

# %%
print(project.run(**functions, only="10b", far=0.1e9))

# %% [markdown]
# ## 7. Measure
#
# The table compares predictions with measurements, for each source. Each row of a source is a published run, which is *usable* if it publishes a metric and doesn't contradict itself, and *used* if it says enough to be predicted. A pair is two layouts of one model on the same GPUs, whose times differ by more than 5%. The last column says how often the planner named the faster one. If you want to choose a layout, that number matters more than the error.

# %%
print(project.scores())

# %% [markdown]
# What can you decide with errors of this size? You can decide whether a model fits with room to spare, roughly what it costs, and whether one layout is much worse than another. But if two layouts are 3% apart, run both for twenty steps.

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
# `measure` finds out what *your* GPUs and links can do. It times matrix products, a copy, and all-reduces inside a node and between nodes, and writes a file for `--on node.json`. Before you rent a thousand GPUs, run 20 steps of the plan on a few, compare, and only then rent the rest.
#
# We have not run this lab on GPUs: others have published the numbers, and each row names its source.

# %% [markdown]
# ## 10. Take with you
#
# 1. Look at memory first: states divided by each axis, activations of the fullest stage, and 8 bytes or more for each logit.
# 2. A step is busy time, waiting, and what nothing hides. With 8 stages and 8 micro-batches for each pipeline, waiting alone is 47%.
# 3. An error of 6%, or 9% on a new source, is good enough to decide whether a run is worth it, but not between two layouts 3% apart: run both.
#
# **What we left out**
#
# - **Measured kernels.** A planner can time each operator on one GPU first. Ours only knows one rate for each kind of GPU, and that matrix products are cut into tiles.
# - **Congestion**, other jobs and slow nodes. The constants are averages over other people's clusters.
# - **TPUs** and torus networks. The published runs are there, but the planner doesn't use them.
# - **Learning.** A larger batch makes a step more efficient, but the model may then need more tokens.
#
# Next: [14_resilience](14_resilience.ipynb). All these times assume that nothing fails, and on thousands of GPUs something fails every few hours.
