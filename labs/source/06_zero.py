# %% [markdown]
# # 06 ZeRO: stop storing everything everywhere
#
# > 125 minutes · difficulty 4/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# A V100 of 2019 had 32 GB of memory at most. GPT-2 has 1.5 billion parameters, which are 3 GB in 16 bits. It could not be trained on that GPU (Rajbhandari et al., arXiv 1910.02054).
#
# Lab 01 told why: Adam in mixed precision takes **16 bytes a parameter**: two for the weight, two for the gradient, twelve for the optimizer. That makes 24 GB before the first activation.
#
# With the data parallelism of lab 03 more GPUs do not help: 64 GPUs hold 64 copies of the same 24 GB. ZeRO (*zero redundancy optimizer*) keeps one copy, in 64 parts. The surprise of this lab: **the first two of its three stages send no more than plain data parallelism.**
#
# A GPU has 80 GB. With plain data parallelism and Adam in mixed precision, states alone: how many parameters fit?

# %%
import dataclasses
import functools
import json
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ranklab import answer, check, device, hint, launch, questions

check(data_parallel_limit=...)

# %% [markdown]
# This lab builds on lab 01 (where memory goes), lab 02 (reduce-scatter, all-gather) and lab 03 (buckets, hooks). At its end DeepSpeed trains the same model from the same weights, and gets the
# same losses as your classes.

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import zero as plots

plots.states(7.5e9, ranks=64, with_totals=False)

# %% [markdown]
# Each stage shards one more of the three: optimizer state, then gradients, then the parameters themselves. The largest part comes first: that is why stage 1 alone takes so much off.
#
# 7.5 billion parameters on 64 GPUs: how many GB does each GPU hold in stage 2?

# %%
check(zero_75_total=...)

# %% [markdown]
# ## 3. Smallest working code
#
# Adam updates each number independently of the others. So a rank can step half of the numbers, if it has their gradients, and the other rank the other half. An all-gather puts the halves together:

# %% tags=["nbval-check-output"]
def whole(gradient):
    weight = torch.zeros(6, requires_grad=True)
    weight.grad = gradient
    torch.optim.Adam([weight], lr=0.1).step()
    return weight.detach()


def in_parts(gradient):
    rank, R = dist.get_rank(), dist.get_world_size()
    weight = torch.zeros(6, device=device())
    part = weight.view(R, -1)[rank].requires_grad_()
    part.grad = gradient.to(device()).view(R, -1)[rank]
    adam = torch.optim.Adam([part], lr=0.1)
    adam.step()  # it holds moments for a part of the weight only
    dist.all_gather_single(weight, part.detach())
    return weight, sum(s.numel() for s in adam.state[part].values())


gradient = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0])
print("one process", whole(gradient))
for rank, (weight, numbers) in enumerate(launch(in_parts, gradient, ranks=2)):
    print(f"rank {rank} of 2", weight, f"{numbers} numbers of state")

# %% [markdown]
# The state is two moments for each of three numbers, and the count of steps. That is stage 1. What is left: a real model, buckets, backward.

# %% [markdown]
# ## 4. Build it

# %% [markdown]
# ### 4.1 Who owns what?
# > difficulty 2/5 · importance 4/5 · 7 minutes · about 5 lines
#
# Parameters have all sizes, so ZeRO does not give whole ones to ranks. It lays them one after the other into one flat piece of memory, adds zeros until R divides, and cuts
# that into R equal **shards**. A parameter may begin in one shard and end in the next. The optimizer does not mind, because it treats each number for itself.
#
# **Predict.** Three tensors with 10, 3 and 4 numbers, 4 ranks. How many numbers has each shard?

# %%
check(shard_numbers=...)

# %%
def partition_flat(tensors, ranks):
    """(flat, shards): the numbers of all tensors one after the other, and flat's R equal parts.

    Zeros at the end make `ranks` divide. shards[r] is a view of flat, and belongs to rank r. The
    tensors are of one type, on one device, and unchanged.
    shape  any shapes of n numbers in all -> (ceil(n/R) R,), R times (ceil(n/R),)
    """
    raise NotImplementedError("exercise 4.1: about 5 lines")


# %%
partition_flat = check(partition_flat)

# %% [markdown]
# The parameters of a small model on four ranks, with your function. Borders of parameters and of shards are not the same:

# %%
layers = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
flat, shards = partition_flat([p.detach() for p in layers.parameters()], 4)
plots.shards({name: p.numel() for name, p in layers.named_parameters()}, ranks=4)

# %% [markdown]
# ### 4.2 What does each stage hold?
# > difficulty 2/5 · importance 5/5 · 6 minutes · about 4 lines
#
# The formula behind the first picture. `States` is a named tuple: parameters, gradients, optimizer_state, in bytes.

# %%
from ranklab.zero.memory import States

# %%
def zero_memory(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12):
    """The States that each rank holds between two steps, after backward and before zero_grad().

    The bytes are those of one number. By default it is Adam in mixed precision: 16-bit parameters
    and gradients; master weights and two moments in float32. Where `ranks` does not divide, this is
    the fullest rank. Not here: activations, buckets on their way, units that are whole for a while.
    stage  0 (data parallelism) to 3
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    raise NotImplementedError("exercise 4.2: about 4 lines")


# %%
zero_memory = check(zero_memory)

# %% [markdown]
# A model of the project's size, on the project's GPUs:

# %% tags=["nbval-check-output"]
for stage in range(4):
    held = zero_memory(stage, 1.3e9, ranks=4)
    print(f"stage {stage}: 1.3 billion parameters on 4 GPUs: {held.total / 1e9:4.1f} GB on each")

# %% [markdown]
# ### 4.3 Stage 1: the optimizer state
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 6 lines
#
# Take your `OverlappedDataParallel` of lab 03, and change how a bucket is reduced. An all-reduce is a reduce-scatter followed by an all-gather. Stage 1 pulls the two apart: reduce-scatter in backward, **then the
# step, on a shard**, then the all-gather, of parameters this time. So two methods are yours: what a full bucket sends in backward, and what is left to do after the optimizer's step.
#
# `ShardedBucket` is lab 03's bucket, and its parameters lie in one piece of memory, too:
#
# | | |
# |---|---|
# | `bucket.flat` | the gradients, with zeros at the end, so that R divides |
# | `bucket.weights`, `bucket.shard` | all parameters of the bucket, of which the parameters are views; the part of it that this rank owns, a view |
# | `bucket.own` | you set it: the tensor that holds the mean gradient of the shard when backward ends |
# | `bucket.update_shard()` | the shard gets the numbers that the optimizer has stepped |
# | `bucket.group` | the ranks that share the bucket |
#
# The collectives are lab 02's: `dist.reduce_scatter_single(mine, whole, group=..., async_op=True)` returns a handle, and `dist.all_gather_single(whole, mine, group=...)`.
#
# **Predict.** 100 MB of gradients and as many of parameters, 4 ranks, by rings. How many MB does each rank send in a step of stage 1?

# %%
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.data_parallel.buckets import buckets_of
from ranklab.zero.partition import ShardedBucket, ShardedOptimizerMixin

check(stage1_sends=...)

# %%
class ZeroStage1(ShardedOptimizerMixin, OverlappedDataParallel):
    """`module`, of which each rank keeps optimizer state for the R-th part that it owns.

    After backward() the gradients of the optimizer that make_optimizer gives are the mean over
    ranks, of the owned part; those of the module are gone. After step() all ranks have all
    parameters.
    cost   (R-1)/R of the gradients' bytes in backward, (R-1)/R of the parameters' in step(); bytes
           held: parameters and gradients whole, 1/R of the optimizer's state
    """

    def make_buckets(self, trained, bucket_cap_bytes):
        return buckets_of(trained, bucket_cap_bytes, self.group_of, ShardedBucket)

    def reduce(self, bucket):
        """The mean gradient of this rank's shard is on its way to place_of(bucket), from now on
        bucket.own; returns the handle.
        """
        while self.works:  # one message at a time: its handle may hold a copy of it
            self.works.pop().wait()
        raise NotImplementedError("exercise 4.3, first part: about 3 lines")

    def place_of(self, bucket):
        """Where the mean arrives: in its own place among the gradients."""
        return bucket.flat.view(-1, len(bucket.shard))[bucket.rank]

    def finish(self):
        """The optimizer has its gradients, of parameters that any rank has used."""
        super().finish()
        for bucket in self.buckets:
            bucket.set_optimizer_gradients({p for p in bucket.parameters if p.grad is not None})

    def step_ends(self):
        """Called after the optimizer's step: all ranks have all parameters, as their owners have
        stepped them.
        """
        raise NotImplementedError("exercise 4.3, second part: about 3 lines")


# %%
ZeroStage1 = check(ZeroStage1)

# %% [markdown]
# `make_optimizer` takes any optimizer that treats each number for itself: SGD, Adam, AdamW. One that looks at a whole matrix (Muon, Shampoo), or at its norm (LARS, LAMB), would see only parts of it. Clipping needs the norm of the model, not of a shard: lab 07 mends that.

# %% [markdown]
# ### 4.4 Stage 2: the gradients
# > difficulty 3/5 · importance 4/5 · 10 minutes · about 4 lines
#
# After the reduce-scatter a rank needs its own shard of the gradient and nothing else. Stage 1 keeps the rest until the next step. Stage 2 frees each bucket when it is reduced, at the latest when the next one leaves. So the gradients of a model are never all in memory at the same time.
#
# `self.free_gradients(buckets)` gives back the memory of each `bucket.flat`; the next `gather()` takes it again. `self.buckets` stand in the order in which they leave.

# %%
class ZeroStage2(ZeroStage1):
    """As ZeroStage1; and each bucket's gradients are freed as soon as they are reduced.

    So a rank never holds all gradients: two buckets, and its own part of the others. Several
    backwards add up in that part, each with its own messages.
    cost   as stage 1; bytes held: parameters whole, 1/R of gradients and optimizer state
    """

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)
        self.free_gradients(self.buckets)

    def place_of(self, bucket):
        """A place of its own, because the whole is freed; those before are reduced by now."""
        raise NotImplementedError("exercise 4.4, first part: about 2 lines")

    def finish(self):
        """As in stage 1; and no bucket's gradients take memory."""
        raise NotImplementedError("exercise 4.4, second part: about 2 lines")

    def free_gradients(self, buckets):
        for bucket in buckets:
            bucket.free_gradients()


# %%
ZeroStage2 = check(ZeroStage2)

# %% [markdown]
# With gradient accumulation stage 2 has a price. No rank can keep the whole gradient until the last micro-batch, because that is the memory that stage 2 frees. So each micro-batch sends its own reduce-scatter.

# %% [markdown]
# ### 4.5 Stage 3: the parameters
# > difficulty 5/5 · importance 5/5 · 25 minutes · about 11 lines
#
# Now a rank holds its shard of the parameters, too. Before a layer computes, its parameters must be gathered; afterwards they are freed. The same once more in backward, because the gradient of a layer needs its weights.
# Two things make that fast enough. Parameters come in **units**: a transformer's block is one all-gather, not twelve. And the next unit is **prefetched**: it travels while this one computes.
#
# Stage 1, and stage 3 with four units (a sketch of a step, not a measurement):

# %%
plots.unit_timeline(stages=(1, 3))

# %% [markdown]
# Four methods are called around each unit, by hooks: `enter` and `leave` around its forward, `backward_of` and `backward_done` around its backward. You decide in them what is gathered, when, and when it is freed:
#
# | | |
# |---|---|
# | `unit.begin_gather()`, `unit.end_gather()` | its parameters are on their way; they are here (it starts the gather if nothing has) |
# | `unit.free()` | their memory is given back |
# | `self.prefetch(place)` | the unit at that place of the order is on its way, if there is one. The order is that of the last forward |
# | `self.place_in_order(unit)` | where this forward has come to: 0 for its first unit, then 1, 2, ... at each call |
# | `self.reduce(unit)` | its gradients are on their way to their owners, and will be freed. Not inside `no_sync()`, where `self.sync` is False |
# | `in_backward()` | True where a checkpoint (lab 01) runs a forward once more, inside the backward |
#
# The trap is that checkpoint. It runs `enter` and `leave` once more, inside the backward. The unit must be gathered there, but it gets no new place in the order. And `leave` has nothing to do: `free()` would take the weights from the backward that follows at once, and the hooks below it would begin the wrong gather, because `self.position` still stands where the forward has ended. (A reentrant checkpoint's outputs have no such hooks: its backward prefetches nothing.)
#
# **Predict.** 100 MB of parameters in units, 4 ranks. How many MB does each rank send in a step of stage 3: two all-gathers and a reduce-scatter?

# %%
from ranklab.zero.sharded_model import ShardedModel
from ranklab.zero.units import call_after_backward, in_backward

check(stage3_sends=...)

# %%
class ZeroStage3(ShardedModel):
    """`module`, of which each rank holds the R-th part, and each unit as a whole while it runs.

    A unit is gathered before its forward and freed after it; the same in backward, where its
    gradients are reduced to shards and freed, too. While one unit computes the next is on its way.
    Right also where a checkpoint runs a forward once more inside the backward.
    cost   a step sends the units' parameters twice, all others once and all gradients once, (R-1)/R
           of them; bytes held: 1/R of everything, and two units
    """

    def enter(self, unit, module, inputs, kwargs):
        """Before a unit's forward: it is whole, and the next one is on its way."""
        raise NotImplementedError("exercise 4.5, first part: about 3 lines")
        return call_after_backward(functools.partial(self.backward_done, unit), (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        """After it: the unit is free, and will be gathered when its backward begins."""
        raise NotImplementedError("exercise 4.5, second part: about 3 lines")
        begins = functools.partial(self.backward_of, unit, self.position - 1)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(begins)

    def backward_of(self, unit, place, _):
        """Before a unit's backward: it is whole, and the one before it is on its way."""
        self.backward_begins()
        raise NotImplementedError("exercise 4.5, third part: about 2 lines")

    def backward_done(self, unit):
        """After it: its gradients are on their way to their owners, and the unit is free."""
        raise NotImplementedError("exercise 4.5, fourth part: about 3 lines")


# %%
ZeroStage3 = check(ZeroStage3)

# %% [markdown]
# Memory over one step, counted after every operation, on four ranks. The model is eight layers of 64 x 64, and the optimizer is Adam. The curves come from your classes:

# %%
from ranklab.meter import MemoryCurve


def memory_over_a_step(stage):
    module = nn.Sequential(nn.ModuleList(nn.Linear(64, 64) for _ in range(8))).to(device())
    module.forward = lambda x: functools.reduce(lambda y, layer: layer(y).relu(), module[0], x)
    options = {} if stage == 3 else {"bucket_cap_bytes": 64 * 65 * 4}
    model = (ZeroStage1, ZeroStage2, ZeroStage3)[stage - 1](module, **options)
    optimizer = model.make_optimizer(torch.optim.Adam)
    shards = [bucket.shard for bucket in model.buckets]
    whole = (lambda: [b.weights for b in model.buckets]) if stage == 3 else ()
    for _ in range(2):  # the first step makes Adam's state
        optimizer.zero_grad()
        with MemoryCurve(model, optimizer, whole, shards=shards) as curve:
            model(torch.ones(16, 64, device=device())).sum().backward()
            curve.mark("step")
            optimizer.step()
    return curve


curves = {f"stage {stage}": launch(memory_over_a_step, stage, ranks=4)[0] for stage in (1, 2, 3)}
plots.memory_curves(curves)

# %%
for name, curve in curves.items():
    print(f"{name}: at most {curve.peak_bytes:9,} bytes")
assert sorted(curves, key=lambda name: -curves[name].peak_bytes) == list(curves)

# %% [markdown]
# ### 4.6 What is memory worth?
# > difficulty 4/5 · importance 4/5 · 20 minutes · about 10 lines · open: no recipe
#
# Stage 3 frees each unit after its forward, and gathers it again for backward. A unit that stays whole saves that message. But memory can also be spent otherwise: a unit that is gathered early, several units ahead, hides its message behind their computing. You have some GB for both. **Which units stay whole?**
#
# DeepSpeed has three numbers for it, for the whole model: `stage3_max_reuse_distance` (what is used again within so many parameters is not freed), `stage3_prefetch_bucket_size` (how far ahead it gathers) and `stage3_max_live_parameters` (nothing is gathered ahead beyond so many). FSDP2 asks for `reshard_after_forward` of each block. Here you choose for each unit.
#
# A `Step` is one micro-batch as a model, without processes. It knows each unit's `nbytes` and seconds of forward, `compute` (backward takes twice as long); the `limit` of bytes that may be whole or on their way; and that a message of n bytes takes `alpha + beta n`. `step.seconds(kept)` is the time of the whole step, if the units in `kept` stay whole. Units are gathered as early as there is room:

# %% tags=["nbval-check-output"]
from itertools import combinations

from ranklab.zero.keeping import Step, last_that_fit, published_steps

step = Step(nbytes=(1, 8, 2, 8, 1, 4), compute=(2, 1, 2, 1, 2, 1), limit=14, alpha=0.5, beta=0.5)
for kept in ([], [3, 4, 5], [0, 2, 4, 5], range(6)):
    print(f"{list(kept)!s:18} stay whole: {step.seconds(kept):4} s")

# %%
def units_to_keep(step):
    """The units that stay whole from forward to backward, as a list: step.seconds(kept) is small.

    error  ValueError where the largest unit is above the limit
    score  step.seconds(kept): at most 2% above the best of all sets for 1 to 7 units, and above the
           library's for 20, with at most 3,000 calls of step.seconds()
    """
    raise NotImplementedError("exercise 4.6: about 10 lines")


# %%
units_to_keep = check(units_to_keep)

# %% [markdown]
# The last lines are your score on published shapes, with times by formula: ten blocks, of each the attention and the MLP as units. "The last that fit" are used again soonest: so `stage3_max_reuse_distance` chooses. The bound is what the device or the link needs if it never waits for memory. No choice is faster than that; even the best one may be slower. Note the sizes: choosing well among the units gains about 1% here, and keeping none costs 5 to 29%.

# %% [markdown]
# ### Further
#
# Three more, all checked, not in the 125 minutes: the bytes of all stages, the optimizer in the CPU's memory, and DeepSpeed's configuration file.

# %% [markdown]
# #### `zero_traffic`
# > difficulty 1/5 · importance 5/5 · 5 minutes · about 4 lines
#
# What you have predicted twice, as a formula.

# %%
def zero_traffic(stage, nbytes, ranks, resident_bytes=0):
    """The bytes that each rank sends in one step, for `nbytes` of parameters and as many of
    gradients.

    Stages 0 to 2: what one all-reduce of the gradients sends. Stage 3: 1.5 times that, but for
    `resident_bytes` of parameters, which are gathered once a step and not twice.
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    raise NotImplementedError("exercise zero_traffic: about 4 lines")


# %%
zero_traffic = check(zero_traffic)

# %% [markdown]
# #### `offload_optimizer`
# > difficulty 3/5 · importance 3/5 · 15 minutes · about 6 lines · open: no recipe
#
# A DGX A100 has eight 80 GB GPUs, and 2 TB of CPU memory. The optimizer's state is touched once a step. Keep it there, and let the CPU do the step. What crosses the PCIe bus is this rank's gradients, once, and its new
# parameters, once.
#
# You have two tools. `bucket.set_master(tensor)` tells a bucket which numbers the optimizer steps, in place of the shard; `model.make_optimizer(new_optimizer, groups)` comes after it. `CpuMemory().copy(tensor)` makes a copy for that, in float32 and *pinned* (such memory can be copied while the GPU computes); `Files(folder).copy(tensor)` makes one
# in a file. Both have `take_state(optimizer)`, to be called after each step: it moves what the optimizer has made.

# %%
from ranklab.zero import CpuMemory, Files

# %%
def offload_optimizer(model, new_optimizer, groups=None, place=None):
    """model.make_optimizer(...), with master weights, their gradients and the optimizer's state at
    `place`: in the CPU's memory (CpuMemory(), the default), or in Files(folder).

    The step is the CPU's work: this rank's gradients go there once, and the stepped shard comes
    back once. The model is a ZeroStage1, 2 or 3, and has made no optimizer before.
    cost   sends what `model` sends; between GPU and CPU, 1/R of gradients and parameters a step
    """
    raise NotImplementedError("exercise offload_optimizer: about 6 lines")


# %%
offload_optimizer = check(offload_optimizer)

# %% [markdown]
# #### `deepspeed_config`
# > difficulty 2/5 · importance 4/5 · 10 minutes · about 14 lines
#
# DeepSpeed has all of this as a configuration file. `fastest_way(parameters, ranks, gpu_bytes, other_bytes)` is given: it tries the ways from the fastest to the slowest, and returns the first that fits: its `stage`, `offload_optimizer` and `offload_parameters`. Stage 3 comes before offload. For 7.5 billion parameters on 8 GPUs its third collective takes 0.03 s over NVLink, and the CPU's Adam 1 s, by the sums in `zero/config.py`. (With one slow card a node, or dozens of micro-batches in a step, it is the other way round.)

# %% tags=["nbval-check-output"]
from ranklab.zero import fastest_way

for gb in (40, 24, 16, 8, 6):
    print(f"1.3 billion parameters on 4 GPUs of {gb:2} GB, 4 GB for the rest:",
          str(fastest_way(1.3e9, 4, gb * 1e9, other_bytes=4e9)))

# %%
def deepspeed_config(parameters, ranks, gpu_bytes, batch, micro_batch, other_bytes=0,
                     precision="bf16", lr=3e-4, bucket=50_000_000):
    """What deepspeed.initialize(config=...) takes for the fastest way that fits.

    Besides what is given: the batch, in train_batch_size, train_micro_batch_size_per_gpu and
    gradient_accumulation_steps; and zero_optimization, with the stage, reduce_bucket_size and
    allgather_bucket_size, in stage 3 also stage3_prefetch_bucket_size. What is away from the GPU:
    offload_optimizer, offload_param, each {"device": "cpu", "pin_memory": True}.
    batch        sequences in a step: micro_batch x accumulation steps x ranks
    other_bytes  of each GPU, for all that is not a state: activations, buckets, fragments
    bucket       numbers in a message; two of them are in memory at a time
    error        ValueError where the batch does not divide, or nothing fits
    """
    if batch % (micro_batch * ranks):
        raise ValueError(f"batch={batch} must be micro_batch={micro_batch} x ranks={ranks} x a "
                         "whole number of accumulation steps")
    config = {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {
        "lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
    zero = {"overlap_comm": True, "contiguous_gradients": True}  # its default overlaps stage 3 only
    if precision != "fp32":
        config[precision] = {"enabled": True}
    raise NotImplementedError("exercise deepspeed_config: about 14 lines")


# %%
deepspeed_config = check(deepspeed_config)

# %% [markdown]
# ## 5. The real thing
#
# DeepSpeed is the library of the paper's authors. It trains the same GPT, from the same weights, on the same tokens, with the same optimizer: five steps on two ranks. (Its own Adam is C++, compiled for minutes when it is first used. Here it gets torch's AdamW.)

# %%
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.zero.deepspeed_engine import read_by_deepspeed, train_with_deepspeed

adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def gpt_and_batches():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, n_ctx=16, n_embd=32)).to(device())
    mine = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(64, (5, 4, 16), generator=mine).to(device())
    return model, [(batch, batch) for batch in tokens]


# %%
def our_losses(stage):
    model, batches = gpt_and_batches()
    model = (ZeroStage1, ZeroStage2, ZeroStage3)[stage - 1](model)
    optimizer, losses = model.make_optimizer(adamw), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


ours = {stage: launch(our_losses, stage, ranks=2)[0] for stage in (1, 2, 3)}

# %%
def their_losses(stage):
    model, batches = gpt_and_batches()
    return train_with_deepspeed(model, adamw, batches, stage)


for stage, losses in ours.items():
    theirs = launch(their_losses, stage, ranks=2)[0]
    print(f"stage {stage}  ours      ", *(f"{loss:.4f}" for loss in losses))
    print("         DeepSpeed ", *(f"{loss:.4f}" for loss in theirs))
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(losses, theirs))

# %% [markdown]
# The same losses, whichever code shards. Sharding changes where numbers are kept, never which numbers. (What is sent may differ. By default DeepSpeed's stages 1 and 2 all-reduce the gradients (`use_multi_rank_bucket_allreduce`), 1.5 times the paper's traffic. And its stage 3 keeps parameters of up to 100,000 numbers whole from step to step (`stage3_param_persistence_threshold`), because small messages cost their latency. Here both are set as in the paper.)
#
# And DeepSpeed reads your configuration. It would refuse a batch that is not the product of its three factors:

# %% tags=["nbval-check-output"]
config = deepspeed_config(1.3e9, ranks=4, gpu_bytes=24e9, batch=512, micro_batch=4, other_bytes=8e9)
read = read_by_deepspeed(config, ranks=4)
print(json.dumps(config, indent=1))
print(f"stage {read.zero_config.stage}, {read.gradient_accumulation_steps} steps of accumulation")

# %% [markdown]
# ## 6. Project
#
# **GPT-2 with 1.3 billion parameters** on four GPUs of 24 GB: with data parallelism 20.8 GB of states leave 3.2 GB, too little for activations. Which stage, then? The project trains a GPT on real text in each stage, by your classes or by DeepSpeed, and
# puts your `zero_memory` beside what it counts. `--size 1.3b` is the full size; here is a small one with the same code, two ranks and 40 steps.

# %%
from ranklab.projects import zero as project

mine = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
found = project.run(numbers=(0, 1, 2, 3), stages=mine, zero_memory=zero_memory, ranks=2, steps=40)
print(project.report(found))
scores = [row.held_out for row in found["rows"]]
assert max(scores) - min(scores) < 0.02

# %% [markdown]
# The held-out loss is the same in every stage, except for rounding: sums in another order differ in the last digit, and 40 steps at a high learning rate make about 0.005 of it. The few bytes above the formulas: Adam's step counters, 4 bytes a tensor, and one number that all ranks need for clipping. The peak holds activations, too, which ZeRO does not shard.
#
# **Your turn.** Change one thing below. First write down which columns change, and by which factor. Then run it. Ideas: `recompute=True`; `offload="cpu"`; `engine="deepspeed"`; other `numbers` and `ranks`. It stands at `micro_batch=4`, two micro-batches for each rank: which of the two stages sends more now?

# %%
change = {"micro_batch": 4}
print(project.report(project.run(numbers=(1, 2), stages=mine, ranks=2, steps=12, **change)))

# %% [markdown]
# Stage 1 keeps the first micro-batch's gradients on each rank, and sends once. Stage 2 sends after each.

# %% [markdown]
# ## 7. Measure
#
# Prediction beside count, for the same eight layers on four ranks, after a backward: the bytes that rank 0 holds, and those that it sends in a step. With Adam in float32 it is 4 bytes for a parameter, 4 for its gradient and 8
# for two moments. Counts are exact, so they are asserted.

# %%
from ranklab.meter import Traffic, memory_of


def held_and_sent(stage):
    module = nn.Sequential(nn.ModuleList(nn.Linear(64, 64) for _ in range(8))).to(device())
    module.forward = lambda x: functools.reduce(lambda y, layer: layer(y).relu(), module[0], x)
    model = (ZeroStage1, ZeroStage2, ZeroStage3)[stage - 1](module)
    optimizer = model.make_optimizer(torch.optim.Adam)
    for _ in range(2):
        optimizer.zero_grad()
        with Traffic() as traffic:
            model(torch.ones(16, 64, device=device())).sum().backward()
            held = memory_of(model, optimizer, shards=[bucket.shard for bucket in model.buckets])
            steps = 4 * len(optimizer.state)  # Adam counts its steps, in 4 bytes a tensor
            optimizer.step()
    return held.parameters, held.gradients, held.optimizer_state - steps, traffic.sent_bytes


# %% tags=["nbval-check-output"]
n = 8 * 64 * 65
print(" " * 8 + "".join(f"{name:>19} " for name in ("parameters", "gradients", "optimizer", "sent"))
      + "\n" + " " * 7 + "  predicted  counted" * 4)
for stage in (1, 2, 3):
    counted = launch(held_and_sent, stage, ranks=4)[0]
    predicted = (*zero_memory(stage, n, 4, 4, 4, 8), int(zero_traffic(stage, 4 * n, 4)))
    print(f"stage {stage}", *(f"{p:10} {c:8}" for p, c in zip(predicted, counted)))
    assert predicted == counted

# %% [markdown]
# The clock can't compare the stages here: the ranks share two cores and their memory, and nothing hides behind anything. The model of 4.6 can. Ten blocks of Mixtral 8x7B, 8,192 tokens on each GPU, which compute for 0.48 s. What do more GB for whole parameters buy, with your choice of units, over eight cards of 100 or of 400 Gbit/s a node? (An all-reduce over 248 nodes with eight cards each reaches about 350 GB/s, NVIDIA/nccl-tests issue 283; 87 are a quarter of it.)

# %% tags=["nbval-check-output"]
mixtral = published_steps()["Mixtral 8x7B, 12 GB"]
print("seconds of a step, by the model: 87 GB/s                            350 GB/s\n"
      "GB  none whole  the last that fit  yours  bound          none whole  yours  bound")
for gb in (4, 6, 9, 12, 18, 24):
    step = dataclasses.replace(mixtral, limit=gb * 1e9)
    fast = dataclasses.replace(step, beta=1 / 350e9)
    last = step.seconds(last_that_fit(step))
    yours, on_fast = step.seconds(units_to_keep(step)), fast.seconds(units_to_keep(fast))
    print(f"{gb:2} {step.seconds():11.2f} {last:18.2f} {yours:6.2f} {step.bound():6.2f}"
          f"{fast.seconds():20.2f} {on_fast:6.2f} {fast.bound():6.2f}")

# %% [markdown]
# From 4 to 6 GB is worth most: then the next experts, 2.8 GB, travel while others compute. On the slower link each further GB saves messages, which are exposed. On the faster one computing hides all but the first and the last message, and units that stay whole buy nothing. So first room to gather ahead, then units to keep, and both only where messages are exposed.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 06` in a terminal asks these and more, with other numbers each time.

# %%
questions("06_zero")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# torchrun --nproc-per-node 4 -m ranklab.projects.zero --size 1.3b --stage 2 --micro-batch 2
# python -m ranklab.projects.zero --size 1.3b --gpus 4 --gpu-gb 24 --write-config ds.json
# deepspeed --hostfile hosts --module ranklab.projects.zero --size 1.3b --config ds.json --engine deepspeed
# ```
#
# What changes: the backend is NCCL, and its messages run beside the computing. In stage 3 the first all-gather of a step has nothing to hide behind. With 24 GB fragmentation matters (lab 01). DeepSpeed's own
# Adam (`--compiled`) is one kernel for all parameters, and its CPUAdam uses the CPU's vector units, which offloading needs.
#
# What to expect, from the paper and not measured by us: on 400 V100s ZeRO's stage 2, together with tensor parallelism, trained a model of 100 billion parameters at 38 TFLOP/s on each GPU, about 30% of the peak. Stage 3 sends 1.5 times as much: expect less where the network between the nodes is slow. This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 10. What we left out
#
# - **Gradients in float32.** 16 bytes a parameter are the paper's. Sums over many micro-batches in bf16 lose small terms, so Llama 3 (arXiv 2407.21783, 3.3.2) and Megatron-LM with `--bf16` add up in float32: 2 + 4 + 12 = 18. DeepSpeed does with `data_types: {"grad_accum_dtype": "fp32"}`; its default is the model's type. And plain DDP holds gradients twice, in its buckets too, unless `gradient_as_bucket_view=True` (lab 04).
# - **Making the model.** Before stage 3 can shard it, each process holds all of it. `deepspeed.zero.Init()` shards each parameter as it is made. transformers' `from_pretrained` does that by itself, but only if it knows of stage 3: make `TrainingArguments(deepspeed=...)` before the model (modeling_utils.py, `is_deepspeed_zero3_enabled`).
# - **DeepSpeed's checkpoints** are each rank's shards. `zero_to_fp32.py`, which it copies beside them, puts float32 weights together, without DeepSpeed; `ds_to_universal.py` makes a checkpoint that another number of ranks can load, with the optimizer's state.
# - **Activations**: ZeRO shards states, not activations. Checkpointing (lab 01) makes them smaller; tensor parallelism (lab 08) shards them.
# - **ZeRO++** (Wang et al., arXiv 2306.10209): weights quantized to 8 bits for the gather, a second copy of the shards inside each node so that the backward's gather stays there, and 4-bit gradients. A quarter of the traffic between nodes.
# - **ZeRO-Infinity** (arXiv 2104.07857): parameters, too, in CPU memory or on NVMe, gathered from there. The `Files` of `offload_optimizer` do it for the optimizer.
# - **A unit that only some ranks use.** All ranks must gather the same units in the same order, or they wait for each other for ever. Mixtures of experts (lab 11) get groups of their own.
#
# Next: **07_fsdp**: stage 3 in torch itself, with each parameter cut along its first dimension.
