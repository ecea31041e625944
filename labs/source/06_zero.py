# %% [markdown]
# # 06 ZeRO: stop storing everything everywhere
#
# > 125 minutes, 50 more with Further, 30 with its bugs · difficulty 4/5 · **spine**: 4.2, 4.3, 8.1, the memory curves at the end of 4.6 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# In 2019 a V100 had 32 GB of memory at most. GPT-2 with its 1.5 billion parameters takes 3 GB in 16 bits, and yet you could not train it on that GPU
# (Rajbhandari et al., arXiv 1910.02054).
#
# Lab 01 showed why. Adam in mixed precision takes **16 bytes a parameter**: two for the weight, two for the gradient, and twelve for the optimizer.
# For GPT-2 that makes 24 GB, before you store the first activation.
#
# With the data parallelism of lab 03 more GPUs don't help, because 64 GPUs hold 64 copies of the same 24 GB. ZeRO (*zero redundancy optimizer*) keeps
# one copy, cut into 64 parts. It does so in three stages, and here is the surprise of this lab: **the first two stages send no more bytes than plain
# data parallelism.**
#
# First a number. A GPU has 80 GB. You use plain data parallelism and Adam in mixed precision, and store nothing else on the GPU. How many parameters
# fit?

# %%
import dataclasses
import functools
import json
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status


begin("06_zero")
check(data_parallel_limit=...)

# %% [markdown]
# This lab builds on lab 01 (where memory goes), lab 02 (reduce-scatter, all-gather) and lab 03 (buckets, hooks). At the end DeepSpeed trains the same
# model from the same weights, and gets the same losses as your classes.

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import zero as plots

plots.states(7.5e9, ranks=64, with_totals=False)

# %% [markdown]
# Weights, gradients and optimizer state are the model's **states**. ZeRO cuts them into *shards*, one for each rank, and each stage shards one more
# of the three: first the optimizer state, then the gradients, then the parameters. The optimizer state is by far the largest, so stage 1 alone saves
# most of the memory.
#
# Take 7.5 billion parameters on 64 GPUs. How many GB does each GPU hold in stage 2?

# %%
check(zero_75_total=...)

# %% [markdown]
# ## 3. Smallest working code
#
# Because Adam updates each number independently of all others, one rank can step half of the numbers, and another rank the other half. Each needs
# gradients only for its own half. An all-gather puts the halves together:

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
# Each rank holds 7 numbers of state: two moments for each of its three weights, and the count of steps. This is stage 1. What is missing is a real
# model, with buckets and a backward.

# %% [markdown]
# ## 4. Build it

# %% [markdown]
# ### 4.1 Who owns what?
# > difficulty 2/5 · importance 4/5 · 7 minutes · about 5 lines
#
# *After this you can cut any model's parameters into equal shards, whatever their sizes.*
#
# Parameters come in all sizes, so giving each rank some whole parameters would not balance. ZeRO lays them end to end in one flat tensor, pads it
# with zeros until R divides its length, and cuts it into R equal **shards**. A parameter may start in one shard and end in the next. The optimizer
# doesn't mind, because it treats each number on its own.
#
# **Predict.** Three tensors have 10, 3 and 4 numbers, and there are 4 ranks. How many numbers does each shard have?

# %%
check(shard_numbers=...)

# %%
def partition_flat(tensors, ranks):
    """Copy the tensors into one flat tensor, and cut it into R equal shards; return (flat, shards).

    Padded with zeros so that the length is a multiple of `ranks`. shards[r] is a view of flat, and
    belongs to rank r. The tensors have one dtype, are on one device, and stay unchanged.
    Shape: any shapes of n numbers in total -> (ceil(n/R) R,), R times (ceil(n/R),).
    """
    raise NotImplementedError("exercise 4.1: about 5 lines")


# %%
partition_flat = check(partition_flat)

# %% [markdown]
# Here your function cuts the parameters of a small model for four ranks. See how a shard starts in the middle of a parameter:

# %%
layers = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
flat, shards = partition_flat([p.detach() for p in layers.parameters()], 4)
plots.shards({name: p.numel() for name, p in layers.named_parameters()}, ranks=4)

# %% [markdown]
# ### 4.2 What does each stage hold?
# > difficulty 2/5 · importance 5/5 · 6 minutes · about 4 lines
#
# *After this you can say by heart how many bytes a rank holds in each ZeRO stage.*
#
# Now write the formula behind the first picture. `States` is a named tuple of bytes: parameters, gradients, optimizer_state.

# %%
from ranklab.zero import States

# %%
def zero_memory(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12):
    """Compute the States that each rank holds after backward and before zero_grad().

    The default is Adam in mixed precision: 16-bit parameters and gradients; master weights and two
    moments in float32. If `ranks` does not divide evenly, the result is for the fullest rank. Not
    counted: activations, buckets being sent, units while they are gathered.
    stage: 0 (data parallelism) to 3.
    parameter_bytes, gradient_bytes, optimizer_bytes: bytes per parameter.
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    raise NotImplementedError("exercise 4.2: about 4 lines")


# %%
zero_memory = check(zero_memory)

# %% [markdown]
# Try it with the model of the project in section 6, on its four GPUs:

# %% tags=["nbval-check-output"]
for stage in range(4):
    states = zero_memory(stage, 1.3e9, ranks=4)
    print(f"stage {stage}: 1.3 billion parameters on 4 GPUs: {states.total / 1e9:4.1f} GB on each")

# %% [markdown]
# ### 4.3 Stage 1: the optimizer state
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 6 lines
#
# *After this you can shard the optimizer state without sending a byte more than DDP.*
#
# Take your `OverlappedDataParallel` from lab 03, and change how it reduces a bucket. An all-reduce is a reduce-scatter followed by an all-gather.
# Stage 1 pulls the two apart. It reduce-scatters the gradients in backward, **then takes the step on a shard**, and then all-gathers the parameters
# instead of the gradients. You write two methods: what a full bucket sends in backward, and what is left to do after the optimizer's step.
#
# `ShardedBucket` is the bucket of lab 03, except that its parameters also lie in one flat tensor:
#
# | | |
# |---|---|
# | `bucket.flat` | the gradients, flat, with zeros at the end so that R divides the length |
# | `bucket.weights`, `bucket.shard` | one tensor with all parameters of the bucket (each parameter is a view of it); the part that this rank owns (a view too) |
# | `bucket.shard_grad` | you set it: the tensor that holds the mean gradient of the shard when backward ends |
# | `bucket.update_shard()` | copies the numbers that the optimizer has stepped into the shard |
# | `bucket.group` | the ranks that share the bucket |
#
# You know the collectives from lab 02: `dist.reduce_scatter_single(mine, whole, group=..., async_op=True)`, which returns a handle, and
# `dist.all_gather_single(whole, mine, group=...)`.
#
# **Predict.** A model has 100 MB of gradients and 100 MB of parameters, and 4 ranks use rings. How many MB does each rank send in a step of stage 1?

# %%
from ranklab.data_parallel import OverlappedDataParallel, buckets_of
from ranklab.zero import ShardedBucket, ShardedOptimizerMixin

check(stage1_sends=...)

# %%
class ZeroStage1(ShardedOptimizerMixin, OverlappedDataParallel):
    """Wrap `module` so that each rank keeps optimizer state only for its 1/R of the parameters.

    backward() sets the gradients of the optimizer from make_optimizer(): the mean over ranks for
    this rank's part. The module's own gradients are then None. step() updates all parameters on
    every rank.
    Cost: (R-1)/R of the gradients' bytes in backward, (R-1)/R of the parameters' in step(); bytes
        held: all parameters and gradients, 1/R of the optimizer's state.
    """

    def make_buckets(self, trained, bucket_cap_bytes):
        return buckets_of(trained, bucket_cap_bytes, self.group_of, ShardedBucket)

    def reduce(self, bucket):
        """Start averaging this rank's shard of the bucket over ranks; return the work handle.

        The mean gradient goes to place_of(bucket), which becomes bucket.shard_grad.
        """
        while self.works:  # one message at a time: its handle may hold a copy of it
            self.works.pop().wait()
        raise NotImplementedError("exercise 4.3, first part: about 3 lines")

    def place_of(self, bucket):
        """Return the memory for the mean: the shard's own slice of the bucket's gradients."""
        return bucket.flat.view(-1, len(bucket.shard))[bucket.rank]

    def finish(self):
        """Give the optimizer the gradients of all parameters that some rank used.

        Called at the end of backward.
        """
        super().finish()
        for bucket in self.buckets:
            bucket.set_optimizer_gradients({p for p in bucket.parameters if p.grad is not None})

    def step_ends(self):
        """Gather the updated shards, so that every rank has all new parameters; called after the
        optimizer's own step.
        """
        raise NotImplementedError("exercise 4.3, second part: about 3 lines")


# %%
ZeroStage1 = check(ZeroStage1)

# %% [markdown]
# `make_optimizer` takes any optimizer that treats each number on its own, such as SGD, Adam or AdamW. An optimizer that looks at a whole matrix
# (Muon, Shampoo) or at its norm (LARS, LAMB) would see only a part of it; 4.7 is about Muon. Clipping has the same problem: it needs the norm of the whole model, not of
# a shard. You will solve that in lab 07.

# %% [markdown]
# ### 4.4 Stage 2: the gradients
# > difficulty 3/5 · importance 4/5 · 10 minutes · about 4 lines
#
# *After this you can free each gradient bucket as soon as its owner has it.*
#
# After the reduce-scatter a rank needs only its own shard of the gradient. Stage 1 still keeps the rest until the next step. Stage 2 frees each
# bucket once it is reduced, at the latest when the next bucket leaves. So the gradients of a model are never all in memory at the same time.
#
# `self.free_gradients(buckets)` gives back the memory of each `bucket.flat`, and the next `bucket.gather()` allocates it again. `self.buckets` is in
# the order in which the buckets leave.

# %%
class ZeroStage2(ZeroStage1):
    """Free each bucket's gradients once they are reduced; otherwise the same as ZeroStage1.

    So a rank never holds all gradients, only two buckets and its own part of the others. Gradients
    of several backwards add up in that part; each backward sends its own messages.
    Cost: as stage 1; bytes held: all parameters, 1/R of gradients and optimizer state.
    """

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)
        self.free_gradients(self.buckets)

    def place_of(self, bucket):
        """Return new memory for the mean, because the bucket's gradients will be freed.

        Earlier buckets are already reduced: free them.
        """
        raise NotImplementedError("exercise 4.4, first part: about 2 lines")

    def finish(self):
        """Finish as in stage 1, then free the gradients of all buckets."""
        raise NotImplementedError("exercise 4.4, second part: about 2 lines")

    def free_gradients(self, buckets):
        for bucket in buckets:
            bucket.free_gradients()


# %%
ZeroStage2 = check(ZeroStage2)

# %% [markdown]
# Stage 2 has a price when you accumulate gradients. No rank can keep the whole gradient until the last micro-batch, because that is exactly the
# memory that stage 2 frees. So each micro-batch needs its own reduce-scatter.

# %% [markdown]
# ### 4.5 Stage 3: the forward
# > difficulty 3/5 · importance 5/5 · 10 minutes · about 3 lines
#
# *After this you can run a model whose parameters no rank holds as a whole.*
#
# In stage 3 a rank holds only its shard of the parameters as well, so before a layer computes, its parameters must be gathered, and afterwards they
# are freed. Two things make this fast enough. Parameters are gathered in **units**, so that a transformer block takes one all-gather instead of
# twelve. And the next unit is **prefetched**: it travels while the current one computes.
#
# Compare a step of stage 1 with a step of stage 3 that has four units (a sketch, not a measurement):

# %%
plots.unit_timeline(stages=(1, 3))

# %% [markdown]
# Begin with the forward. Hooks call `enter` before each unit's forward, and `leave` after it. This is what you have:
#
# | | |
# |---|---|
# | `unit.end_gather()` | gathers the unit's parameters, and waits until they are here |
# | `unit.free()` | gives back the memory of its parameters |
# | `self.place_in_order(unit)` | the unit's place in the running forward: 0 for the first unit, then 1, 2, ... at each call |
# | `self.prefetch(place)` | starts to gather the unit that had this place in the last forward, if there is one |

# %%
from ranklab.zero import ShardedModel


class ZeroInference(ShardedModel):
    """Shard `module` over the ranks, and keep each unit whole only while it computes.

    A unit is gathered before its forward and freed after it. From the second forward on, the next
    unit is gathered while one computes: the first forward records their order. For torch.no_grad()
    only.
    Cost: a forward sends all parameters once, (R-1)/R of them; bytes held: 1/R of everything, and
        two units.
    """

    def enter(self, unit, module, inputs, kwargs):
        """Gather a unit before its forward, and start gathering the next one."""
        raise NotImplementedError("exercise 4.5, first part: about 2 lines")

    def leave(self, unit, module, inputs, outputs):
        """Free a unit after its forward."""
        raise NotImplementedError("exercise 4.5, second part: about 1 line")


# %%
ZeroInference = check(ZeroInference)

# %% [markdown]
# ### 4.6 Stage 3: the backward
# > difficulty 4/5 · importance 5/5 · 15 minutes · about 5 lines
#
# *After this you can say when a sharded gradient travels, and which messages overlap with computing.*
#
# Backward needs a layer's weights, but forward has freed them, so it gathers each unit again, in the opposite order. After a unit's backward its
# gradients are complete: they are reduce-scattered to their owners, and the unit is freed.
#
# `enter` and `leave` are given. They do what yours do in 4.5, and register hooks, which call two more methods: `backward_of` before a unit's
# backward, with the unit's place in the forward, and `backward_done` after it. (`in_backward()` is True where a checkpoint runs a forward once more;
# Further says why that matters.) You write these two, with the methods of 4.5 and one more: `self.reduce(unit)` starts to send the unit's gradients
# to their owners, and frees these gradients later; the weights you free yourself, by `unit.free()`. Don't call it inside `no_sync()`, where `self.sync` is False.
#
# **Predict.** A model has 100 MB of parameters, all in units, and there are 4 ranks. A step of stage 3 is two all-gathers and a reduce-scatter. How
# many MB does each rank send?

# %%
from ranklab.zero import call_after_backward, in_backward

check(stage3_sends=...)

# %%
class ZeroStage3(ShardedModel):
    """Shard `module` over the ranks, and keep each unit whole only while it runs.

    A unit is gathered before its forward and freed after it, and likewise in backward, where its
    gradients are reduced to shards and freed as well. The next unit is gathered while one computes.
    Also correct if activation checkpointing runs a forward again inside the backward.
    Cost: a step sends the units' parameters twice, all others once and all gradients once, (R-1)/R
        of them; bytes held: 1/R of everything, and two units.
    """

    def enter(self, unit, module, inputs, kwargs):
        """Gather a unit before its forward, and start gathering the next one."""
        unit.end_gather()
        if not in_backward():
            self.prefetch(self.place_in_order(unit) + 1)
        return call_after_backward(functools.partial(self.backward_done, unit), (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        """Free a unit after its forward, and register backward_of() to run before its backward."""
        if in_backward():
            return
        hook = functools.partial(self.backward_of, unit, self.position - 1)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(hook)
        unit.free()

    def backward_of(self, unit, place, _):
        """Gather a unit before its backward, and start gathering the one before it."""
        self.backward_begins()
        raise NotImplementedError("exercise 4.6, first part: about 2 lines")

    def backward_done(self, unit):
        """After a unit's backward, start reducing its gradients to their owners, and free it."""
        raise NotImplementedError("exercise 4.6, second part: about 3 lines")


# %%
ZeroStage3 = check(ZeroStage3)

# %% [markdown]
# How does memory change over one step? We count it after every operation, on four ranks. The model has eight layers of 64 x 64, and the optimizer is
# Adam. The curves come from your classes:

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

# %% [markdown]
# Follow the orange area, the gradients. In stage 1 they pile up during backward, in stage 2 each bucket is freed when it has been reduced, and in stage 3 the blue parameters are sharded as well: a layer is whole (purple) only while it computes. Such memory is easily reused too early, as we found: in our first stage 3, a unit that ran twice in a row packed its second gradients over the first, which were still travelling. A unit that ran twice with others in between had passed our tests.

# %%
for name, curve in curves.items():
    print(f"{name}: at most {curve.peak_bytes:9,} bytes")
assert sorted(curves, key=lambda name: -curves[name].peak_bytes) == list(curves)

# %% [markdown]
# > **Spine**: from here go to the bug in 8.1; the rest of this lab is extra.

# %% [markdown]
# ### 4.7 Muon: an optimizer that needs whole matrices
# > difficulty 4/5 · importance 4/5 · 20 minutes · about 15 lines · open: no recipe
#
# *After this you can shard an optimizer that needs whole matrices, and say what that costs.*
#
# Adam treats each number on its own, so ZeRO may cut anywhere. With Muon it may not. Muon replaces the momentum of a weight matrix, U S Vᵀ, by
# roughly U Vᵀ, an orthogonal matrix. Moonlight and Kimi K2 were trained with it (torchtitan issue 2494). `newton_schulz(matrix)` is given: five
# steps of matrix products in bfloat16. It needs **all rows**. If each rank orthogonalises its own rows, nothing crashes, but you have another
# optimizer, and a different one for each R. DeepSpeed's stages 1 and 2 once had such an error: with `reduce_scatter`, a matrix that lay in two shards
# was stepped wrongly (issue 7807).
#
# For an m x n matrix with m <= n this takes 5 (4 m² n + 2 m³) FLOPs, which `newton_schulz_flops` counts. Training takes 6 FLOPs for each parameter and token.
#
# **Predict.** All matrices are 4096 x 4096. A batch has 4 million tokens (2²²), and 64 GPUs share it. For Muon each GPU gathers all matrices and
# orthogonalises all of them. By how many percent does its computing grow?

# %%
from ranklab.ranks import shard_range
from ranklab.zero import (
    exchange_matrices, muon_cost, muon_owners, newton_schulz, newton_schulz_flops,
)

check(muon_percent=...)

# %% [markdown]
# **Predict.** Gradients, parameters and the matrices that Muon gathers have 16 bits. How many times the bytes of AdamW in stage 1 does each GPU send in such a step?

# %%
check(muon_bytes=...)

# %% [markdown]
# You can do better than that: not every rank has to compute every matrix.

# %%
plots.muon_exchange([(6, 4), (8, 8), (5, 8)], ranks=3)

# %% [markdown]
# You have:
#
# | | |
# |---|---|
# | `shard_range(m, r, R)` | the rows of rank r, of a matrix with m rows (lab 00) |
# | `newton_schulz(matrix)`, `newton_schulz_flops(m, n)` | the orthogonalised matrix, in bfloat16; what it costs |
# | `muon_owners(shapes, R)` | a list with the owner of each matrix, by one rule of many; any other is right as well |
# | `exchange_matrices(to_ranks, shapes, group)` | sends the matrices in the list `to_ranks[r]` to rank r, in bfloat16; returns for each rank the list of matrices that came from it, with the shapes in the list `shapes[r]` |

# %%
def sharded_muon_step(weights, momenta, shapes, lr, weight_decay=0.1, group=None):
    """Step matrices of which each rank holds some rows, as torch.optim.Muon steps whole matrices.

    Each matrix W with momentum M becomes, in place,
    (1 - lr weight_decay) W - lr max(1, m/n)**0.5 newton_schulz(M). Collective.
    weights, momenta: this rank's rows of each matrix, float32: shard_range(m, rank, R) of m rows.
        The momenta are what torch orthogonalises (Nesterov's), and stay unchanged.
    shapes: (m, n) of each whole matrix, the same on every rank.
    Score: FLOPs and bytes sent, each of the busiest rank: any is accepted, and less is better.
    """
    raise NotImplementedError("exercise 4.7: about 15 lines")


# %%
sharded_muon_step = check(sharded_muon_step)

# %% [markdown]
# The last two lines of the check are your score. "All on each" is what you predicted above. One large matrix makes the owners' work uneven, because a
# matrix is not shared. What does that mean at full size? Here are 32 blocks as wide as Llama-2-7B, with a GPT's MLP:

# %% tags=["nbval-check-output"]
shapes, tokens = [(12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384)] * 32, 2**22
step_flops = 6 * tokens * sum(m * n for m, n in shapes)
for ranks in (8, 64, 512):
    for way, on_all in (("all on each", True), ("owners", False)):
        flops, nbytes = muon_cost(shapes, ranks, on_all)
        print(f"{ranks:3} GPUs, {way:11}: {flops / (step_flops / ranks):6.1%} more FLOPs, "
              f"{nbytes / 1e9:5.2f} GB more to send")

# %% [markdown]
# There are 128 matrices, so on 512 GPUs 384 GPUs wait for the owners, and the share of Newton-Schulz grows with R again. `ranklab plan --optimizer
# muon` adds up the same for a whole plan.

# %% [markdown]
# ### Further
#
# Four more exercises, all checked, that are not part of the 125 minutes: the bytes that each stage sends, the optimizer in CPU memory, DeepSpeed's
# configuration file, and which units of stage 3 to keep.

# %% [markdown]
# **A checkpoint in stage 3** (lab 01) runs a unit's forward once more, inside the backward, and so calls `enter` and `leave` again. Then the unit
# must be gathered, but it must not get a new place in the order, and `leave` must do nothing: `free()` would take the weights away from the backward
# that follows at once, and new hooks would gather the wrong unit, because `self.position` still stands where the forward ended. That is why both ask
# `in_backward()` in 4.6. (The outputs of a reentrant checkpoint have no hooks, so its backward prefetches nothing.)

# %% [markdown]
# #### `zero_traffic`
# > difficulty 1/5 · importance 5/5 · 5 minutes · about 4 lines
#
# You have predicted these bytes twice. Now write the formula.

# %%
def zero_traffic(stage, nbytes, ranks, resident_bytes=0):
    """Compute the bytes that each rank sends in one step; not rounded.

    Stages 0 to 2 send as much as one all-reduce of the gradients. Stage 3 sends 1.5 times as much,
    except that `resident_bytes` of parameters are gathered only once a step, not twice.
    nbytes: the size of the parameters; the gradients have the same size.
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
# A DGX A100 has eight 80 GB GPUs, and 2 TB of CPU memory. The optimizer's state is used only once a step, so keep it in CPU memory and let the CPU do
# the step. Then only two things cross the PCIe bus in a step: this rank's gradients, and its new parameters.
#
# You have two tools. `bucket.set_master(tensor)` tells a bucket which tensor the optimizer steps instead of the shard. Call it before
# `model.make_optimizer(new_optimizer, groups)`. To make such a tensor, call `CpuMemory().copy(tensor)`: the copy is in float32 and *pinned*, which
# means it can be transferred while the GPU computes. `Files(folder).copy(tensor)` makes a copy in a file instead. Both places have
# `take_state(optimizer)`, which moves the optimizer's state there. Call it after each step.

# %%
from ranklab.zero import CpuMemory, Files

# %%
def offload_optimizer(model, new_optimizer, groups=None, place=None):
    """Make model's optimizer, with master weights, their gradients and its state at `place`.

    The CPU does the step: this rank's gradients are copied there once, and the updated shard is
    copied back once.
    model: a ZeroStage1, 2 or 3, without an optimizer so far.
    place: CpuMemory(), the default, or Files(folder).
    Returns: the optimizer from model.make_optimizer(new_optimizer, groups).
    Cost: between ranks the same as `model`; between GPU and CPU 1/R of gradients and parameters a
        step.
    """
    raise NotImplementedError("exercise offload_optimizer: about 6 lines")


# %%
offload_optimizer = check(offload_optimizer)

# %% [markdown]
# #### `deepspeed_config`
# > difficulty 2/5 · importance 4/5 · 10 minutes · about 14 lines
#
# DeepSpeed does all of this from a configuration file. `fastest_way(parameters, ranks, gpu_bytes, other_bytes)` is given. It tries all ways from the
# fastest to the slowest, and returns the first that fits, with its `stage`, `offload_optimizer` and `offload_parameters`. Stage 3 comes before
# offload, because for 7.5 billion parameters on 8 GPUs the third collective takes 0.03 s over NVLink, while Adam on the CPU takes 1 s, by the
# calculation in `zero/config.py`. (With one slow card a node, or with dozens of micro-batches in a step, it is the other way round.)

# %% tags=["nbval-check-output"]
from ranklab.zero import fastest_way

for gb in (40, 24, 16, 8, 6):
    print(f"1.3 billion parameters on 4 GPUs of {gb:2} GB, 4 GB for the rest:",
          str(fastest_way(1.3e9, 4, gb * 1e9, other_bytes=4e9)))

# %%
def deepspeed_config(parameters, ranks, gpu_bytes, batch, micro_batch, other_bytes=0,
                     precision="bf16", lr=3e-4, bucket=50_000_000):
    """Write the config for deepspeed.initialize(config=...) of the fastest strategy that fits.

    To the given keys add: train_batch_size, train_micro_batch_size_per_gpu and
    gradient_accumulation_steps; and zero_optimization, with stage, reduce_bucket_size and
    allgather_bucket_size, in stage 3 also stage3_prefetch_bucket_size. For what the strategy
    offloads: offload_optimizer, offload_param, each {"device": "cpu", "pin_memory": True}.
    batch: sequences in a step: micro_batch x accumulation steps x ranks.
    other_bytes: memory on each GPU for everything except states: activations, buckets, fragments.
    bucket: numbers in a message; two are in memory at a time, and count in other_bytes.
    Raises: ValueError if the batch does not divide evenly, or nothing fits.
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
# #### `units_to_keep`
# > difficulty 4/5 · importance 2/5 · 20 minutes · about 10 lines · open: no recipe
#
# Stage 3 frees each unit after its forward, and gathers it again for backward. If a unit stays whole, you save that second message. But the memory
# has another use: gather a unit early, several units ahead, and its message is hidden while those units compute. You have a few GB for both. **Which
# units should stay whole?**
#
# DeepSpeed has three settings for this, for the whole model. A unit isn't freed if it is used again within `stage3_max_reuse_distance` parameters;
# `stage3_prefetch_bucket_size` says how far ahead to gather, and `stage3_max_live_parameters` how many parameters may be whole before gathering ahead
# stops. FSDP2 lets you set `reshard_after_forward` on each block. Here you choose for each unit.
#
# A `Step` is a model of one micro-batch, without processes. It has the `nbytes` of each unit, the seconds of its forward, `compute` (backward takes
# twice as long), and a `limit` on the bytes that may be whole or on their way. A message of n bytes takes `alpha + beta n`. `step.seconds(units)` is
# the time of the whole step if `units` stay whole. Units are gathered as soon as there is room:

# %% tags=["nbval-check-output"]
from itertools import combinations

from ranklab.zero import Step, last_that_fit, published_steps

step = Step(nbytes=(1, 8, 2, 8, 1, 4), compute=(2, 1, 2, 1, 2, 1), limit=14, alpha=0.5, beta=0.5)
for units in ([], [3, 4, 5], [0, 2, 4, 5], range(6)):
    print(f"{list(units)!s:18} stay whole: {step.seconds(units):4} s")

# %%
def units_to_keep(step):
    """List the units to keep whole from forward to backward, so that step.seconds(units) is small.

    Raises: ValueError if the largest unit is above the limit.
    Score: step.seconds(units): at most 2% above the best of all sets for 1 to 7 units, and at most
        2% above the library's for 20 units, with at most 3,000 calls of step.seconds().
    """
    raise NotImplementedError("exercise units_to_keep: about 10 lines")


# %%
units_to_keep = check(units_to_keep)

# %% [markdown]
# The last lines of the check are your score on published model shapes, with times by formula. Each model has ten blocks, and in each block the
# attention and the MLP are units. "The last that fit" is the choice of `stage3_max_reuse_distance`: it keeps the units that are used again soonest.
# The bound is the time that the device or the link needs if it never waits for memory. No choice is faster than the bound, and even the best one may
# be slower. Less is at stake than it seems: choosing well gains about 1% here, while keeping no unit at all costs 5 to 29%.

# %% [markdown]
# Take ten blocks of Mixtral 8x7B, and 8,192 tokens on each GPU, which takes 0.48 s to compute them. Each node has eight cards of 100 or of 400
# Gbit/s. How much time do you save with more GB for whole parameters, and with your choice of units? (An all-reduce over 248 nodes with eight cards
# of 400 Gbit/s each reaches about 350 GB/s, NVIDIA/nccl-tests issue 283; 87 GB/s is a quarter of that.)

# %% tags=["nbval-check-output"]
mixtral = published_steps()["Mixtral 8x7B, 12 GB"]
print("seconds of a step, by the model: 87 GB/s                            350 GB/s\n"
      "GB  none whole  the last that fit  yours  bound          none whole  yours  bound")
for gb in (4, 6, 9, 12, 18, 24):
    step = dataclasses.replace(mixtral, limit=gb * 1e9)
    fast = dataclasses.replace(step, beta=1 / 350e9)
    last = step.seconds(last_that_fit(step))
    seconds, fast_seconds = step.seconds(units_to_keep(step)), fast.seconds(units_to_keep(fast))
    print(f"{gb:2} {step.seconds():11.2f} {last:18.2f} {seconds:6.2f} {step.bound():6.2f}"
          f"{fast.seconds():20.2f} {fast_seconds:6.2f} {fast.bound():6.2f}")

# %% [markdown]
# Going from 4 to 6 GB helps most, because then the next experts, 2.8 GB, can travel while others compute. On the slower link each further GB saves
# messages that are exposed. On the faster link computing hides all messages but the first and the last, so units that stay whole gain nothing. So
# spend memory first on gathering ahead, then on units to keep, and on both only where messages are exposed.

# %% [markdown]
# ## 5. The real thing
#
# DeepSpeed comes from the authors of the paper. Here it trains the same GPT for five steps on two ranks, from the same weights, on the same tokens,
# and with the same optimizer. (DeepSpeed's own Adam is C++ that takes minutes to compile at first use, so we give it torch's AdamW.)

# %%
from ranklab.models import GPT, GPTConfig
from ranklab.peers.deepspeed_zero import read_by_deepspeed, train_with_deepspeed

adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def gpt_and_batches():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, n_ctx=16, n_embd=32)).to(device())
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(64, (5, 4, 16), generator=generator).to(device())
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


zero_losses = {stage: launch(our_losses, stage, ranks=2)[0] for stage in (1, 2, 3)}

# %%
def their_losses(stage):
    model, batches = gpt_and_batches()
    return train_with_deepspeed(model, adamw, batches, stage)


for stage, losses in zero_losses.items():
    deepspeed_losses = launch(their_losses, stage, ranks=2)[0]
    print(f"stage {stage}  ours      ", *(f"{loss:.4f}" for loss in losses))
    print("         DeepSpeed ", *(f"{loss:.4f}" for loss in deepspeed_losses))
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(losses, deepspeed_losses))

# %% [markdown]
# The losses are the same, because sharding changes where numbers are kept, but never the numbers themselves.
#
# The traffic may differ. By default DeepSpeed's stages 1 and 2 all-reduce the gradients (`use_multi_rank_bucket_allreduce`), which is 1.5 times the
# paper's traffic. And its stage 3 keeps parameters of up to 100,000 numbers whole from step to step (`stage3_param_persistence_threshold`), because a
# small message is mostly latency. Here we set both as in the paper.
#
# DeepSpeed also reads your configuration. It would refuse a batch size that is not the product of its three factors:

# %% tags=["nbval-check-output"]
config = deepspeed_config(1.3e9, ranks=4, gpu_bytes=24e9, batch=512, micro_batch=4, other_bytes=8e9)
ds_config = read_by_deepspeed(config, ranks=4)
print(json.dumps(config, indent=1))
print(f"stage {ds_config.zero_config.stage}, "
      f"{ds_config.gradient_accumulation_steps} steps of accumulation")

# %% [markdown]
# And Muon? torch has one for whole matrices. Here it trains the GPT's blocks in one process, and your function does the same on four ranks, each with
# some rows of the weights and of the momentum. (To keep it short all ranks see the same batch, and gather the weights after each step.)

# %%
def muon_losses(step=None):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, n_ctx=16, n_embd=32)).to(device())
    tokens = torch.randint(64, (4, 16)).to(device())
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    shapes, R = [tuple(p.shape) for p in matrices], dist.get_world_size()
    rows = [p.detach().chunk(R)[dist.get_rank()].clone() for p in matrices]
    buffers, losses = [torch.zeros_like(x) for x in rows], []
    optimizer = torch.optim.Muon(matrices, lr=0.02)
    for _ in range(5):
        loss = model(tokens, tokens)
        loss.backward()
        losses.append(loss.item())
        if step:
            grads = [p.grad.chunk(R)[dist.get_rank()] for p in matrices]
            momenta = [g.lerp(b.lerp_(g, 0.05), 0.95) for g, b in zip(grads, buffers)]
            step(rows, momenta, shapes, lr=0.02)
            for p, x in zip(matrices, rows):
                dist.all_gather_single(p.data, x)
        else:
            optimizer.step()
        model.zero_grad()
    return losses


reference = launch(muon_losses, ranks=1)[0]
losses = launch(muon_losses, sharded_muon_step, ranks=4)[0]
print("torch.optim.Muon, 1 process", *(f"{loss:.4f}" for loss in reference))
print("yours, rows on 4 ranks     ", *(f"{loss:.4f}" for loss in losses))
assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(reference, losses))

# %% [markdown]
# Real code does it in three ways. Moonlight's Distributed Muon is stage 1: each rank gathers the matrices of which it has a part, in bfloat16, and
# keeps that part of the result (arXiv 2502.16982, 2.3). torchtitan's `DistributedMuon` sends matrices to owners and back, by packed all-to-alls that
# overlap with computing (pull request 4060). Pull request 6683 of Megatron-LM proposes the same, with the longest first as in `muon_owners`, and its
# author measures 139 ms for a step that takes 264 ms if every rank computes everything. And where a rank owns whole matrices from the start, backward
# reduces gradients to the owner, and the step sends nothing (torchtitan pull request 3502). Whatever the sharding: compare it with one process,
# because a right layout does not prove a right update (Megatron-LM issue 5961).

# %% [markdown]
# ## 6. Project
#
# **GPT-2 with 1.3 billion parameters** should train on four GPUs of 24 GB. With data parallelism its states take 20.8 GB, and the 3.2 GB that are
# left are too little for activations. So which stage do you take? The project trains a GPT on real text in each stage, with your classes or with
# DeepSpeed, and compares your `zero_memory` with the counted bytes. `--size 1.3b` is the full size. Here we run a small one with the same code, on
# two ranks and for 40 steps.

# %%
from ranklab.projects import zero as project

stages = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
results = project.run(numbers=(0, 1, 2, 3), stages=stages, zero_memory=zero_memory,
                      ranks=2, steps=40)
print(project.report(results))
scores = [row.held_out for row in results["rows"]]
assert max(scores) - min(scores) < 0.02

# %% [markdown]
# The held-out loss is the same in every stage, except for rounding. Sums in a different order differ in the last digit, and over 40 steps at a high
# learning rate this grows to about 0.005. The counts are a few bytes above the formulas, because of Adam's step counters (4 bytes a tensor) and one
# number that all ranks need for clipping. The peak includes activations, which ZeRO does not shard.
#
# **Your turn.** Change one thing below. Before you run it, write down which columns change, and by what factor. Try `recompute=True`,
# `offload="cpu"`, `engine="deepspeed"`, or other `numbers` and `ranks`. The cell starts with `micro_batch=4`, so each rank has two micro-batches.
# Which of the two stages sends more now?

# %%
change = {"micro_batch": 4}
print(project.report(project.run(numbers=(1, 2), stages=stages, ranks=2, steps=12, **change)))

# %% [markdown]
# Stage 1 keeps the gradients of the first micro-batch on each rank, and sends once. Stage 2 sends after each micro-batch.

# %% [markdown]
# ## 7. Measure
#
# The table compares predictions with counts, for the eight layers of 4.6 on four ranks: the bytes that rank 0 holds after a backward, and the bytes
# that it sends in a step. With Adam in float32 a parameter takes 4 bytes, its gradient 4, and the two moments 8. Counts are exact, so the cell
# asserts them.

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
            memory = memory_of(model, optimizer, shards=[bucket.shard for bucket in model.buckets])
            steps = 4 * len(optimizer.state)  # Adam counts its steps, in 4 bytes a tensor
            optimizer.step()
    return memory.parameters, memory.gradients, memory.optimizer_state - steps, traffic.sent_bytes


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
# The clock can't compare the stages here, because the ranks share cores and memory, and nothing hides behind anything.

# %% [markdown]
# ## 8. Bug of the lab
#
# A bug of the lab is a program that breaks the idea of its lab and still runs. A colleague says what was seen, but not why. Look, write down why before you open the list of causes, and fix the program in its own cell: then it has the numbers of one process, also on other numbers of ranks and in a group of some of them ([16_clinic](16_clinic.ipynb) has bugs that belong to no single lab, and tools that find them).

# %%
import os

import torch.nn.functional as F

from ranklab.data import batch_at, held_out_batch, text_file

# %% [markdown]
# ### 8.1 Half of the norm
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 4 lines
#
# > In the first step one rank logs a gradient norm above 1, and four ranks log about half of that. Seed, rows and the first loss are the same. From the second step on the losses differ, and at first the curve of four ranks is the rougher one.

# %%
def flat_model(steps=24, lr=1.0, max_norm=0.5, seed=0, group=None):
    """Train a small language model, its gradient clipped; each rank's optimizer has a shard.

    Returns {"losses": [of all rows], "norms": [before clipping], "weights": all}.
    """
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
                          nn.Linear(64, 256)).to(device())
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    shard = nn.Parameter(flat.chunk(R)[rank].clone())
    shard.grad = torch.empty_like(shard)
    optimizer = torch.optim.SGD([shard], lr, momentum=0.9)
    tokens, losses, norms = text_file(os.__file__).train, [], []
    for step in range(steps):
        inputs, targets = (each.chunk(R)[rank].to(device())
                           for each in batch_at(tokens, step, 48, 8, seed))
        loss = F.cross_entropy(model(inputs), targets[:, -1]) / R
        gradients = torch.autograd.grad(loss, model.parameters())
        gradient = nn.utils.parameters_to_vector(gradients)
        dist.reduce_scatter_single(shard.grad, gradient, group=group)
        norm = nn.utils.clip_grad_norm_([shard], max_norm)
        optimizer.step()
        dist.all_gather_single(flat, shard.detach(), group=group)
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "weights": flat}


# %% [markdown]
# **Look.** Compare the four ranks' norms of the first step with the norm on one rank.

# %%
for ranks in (1, 4):
    norms = [result["norms"][0] for result in launch(flat_model, ranks=ranks)]
    print(f"ranks={ranks}:", *(f"{norm:.3f}" for norm in norms))

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Each rank clips by the norm of its own rows' gradient, before they are averaged.
# 2. Each rank clips by the norm of its own shard.
# 3. Momentum is kept for each shard alone.
# 4. The gradient is divided by the number of ranks twice.
#
# </details>

# %%
check(clinic_flat_model_cause=...)

# %% [markdown]
# **Fixed.** Norms, losses and weights must match one process that clips with torch's own `clip_grad_norm_`. A gradient that is short enough stays as it is.

# %%
flat_model = check(flat_model)

# %% [markdown]
# > **Spine**: this lab's part ends here. On it goes in [08_tensor_parallel](08_tensor_parallel.ipynb); the rest of this lab is extra.

# %% [markdown]
# ### 8.2 Faster, and it diverges
# > difficulty 4/5 · importance 5/5 · 15 minutes · about 4 lines
#
# > To save time we gather the weights while the optimizer works. Since then the run diverges at a learning rate that was fine before. A quarter of that rate trains, but slowly. The held-out loss in the log is not the one that the checkpoint of the same step has. All ranks print the same numbers.

# %%
def gathered_model(steps=16, lr=1.0, seed=0, group=None):
    """Train a small language model: each rank keeps a shard, and gathers all of it for each step.

    Returns {"losses": [of all rows], "held_out": [after each fourth step], "weights": all}.
    """
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
                          nn.Linear(64, 256)).to(device())
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    shard, ahead = nn.Parameter(flat.chunk(R)[rank].clone()), torch.empty_like(flat)
    shard.grad = torch.empty_like(shard)
    optimizer = torch.optim.SGD([shard], lr, momentum=0.5)
    text, losses, held_out = text_file(os.__file__), [], []
    unseen, following = (each.to(device()) for each in held_out_batch(text.held_out, 48, 8))
    for step in range(steps):
        inputs, targets = (each.chunk(R)[rank].to(device())
                           for each in batch_at(text.train, step, 48, 8, seed))
        loss = F.cross_entropy(model(inputs), targets[:, -1]) / R
        gradients = torch.autograd.grad(loss, model.parameters())
        gradient = nn.utils.parameters_to_vector(gradients)
        dist.reduce_scatter_single(shard.grad, gradient, group=group)
        kept = shard.detach().clone()
        coming = dist.all_gather_single(ahead, kept, group=group, async_op=True)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
        if step % 4 == 3:
            with torch.no_grad():
                held_out.append(F.cross_entropy(model(unseen), following[:, -1]).item())
        coming.wait()
        flat.copy_(ahead)
    return {"losses": losses, "held_out": held_out, "weights": flat}


# %% [markdown]
# **Look.** Does it take four ranks to diverge? Does it take a large learning rate? Look at the first losses.

# %%
for ranks in (1, 4):
    losses = launch(gathered_model, ranks=ranks)[0]["losses"]
    print(f"ranks={ranks}:", *(f"{loss:.3f}" for loss in losses[:6]))

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. The forward uses weights from before the last step.
# 2. The gathered shards come in an order that differs between ranks.
# 3. The learning rate is too large for this batch.
# 4. The ranks' gradients are added up where their mean is due.
#
# </details>

# %%
check(clinic_gathered_model_cause=...)

# %% [markdown]
# **Fixed.** All weights, all losses and all held-out losses must match one process. The gather may stay asynchronous, with work that doesn't need it in between, but `coming` must be waited for.

# %%
gathered_model = check(gathered_model)

# %% [markdown]
# ## 9. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 06` in a terminal asks these and more, with other numbers each time.

# %%
questions("06_zero")

# %% [markdown]
# ## 10. On real GPUs
#
# ```bash
# torchrun --nproc-per-node 4 -m ranklab.projects.zero --size 1.3b --stage 2 --micro-batch 2
# python -m ranklab.projects.zero --size 1.3b --gpus 4 --gpu-gb 24 --write-config ds.json
# deepspeed --hostfile hosts --module ranklab.projects.zero --size 1.3b --config ds.json --engine deepspeed
# ```
#
# What changes? The backend is NCCL, and its messages run while the GPU computes. In stage 3 the first all-gather of a step has nothing to hide
# behind. On a GPU with 24 GB fragmentation matters (lab 01). DeepSpeed's own Adam (`--compiled`) is one kernel for all parameters, and its CPUAdam
# uses the CPU's vector units, which offloading needs.
#
# What to expect, from the paper and not measured by us: on 400 V100s ZeRO's stage 2, together with tensor parallelism, trained a model of 100 billion
# parameters at 38 TFLOP/s on each GPU, about 30% of the peak. Stage 3 sends 1.5 times as much, so expect less if the network between the nodes is
# slow. This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 11. Take with you
#
# 1. Of Adam's 16 bytes a parameter, 12 belong to the optimizer: stage 1 alone takes 13 billion parameters on 8 GPUs from 208 GB to 71.5 GB each.
# 2. The step goes between reduce-scatter and all-gather, so with one micro-batch stages 1 and 2 send what DDP sends. Stage 3 gathers twice, so it sends 1.5 times as much.
# 3. Take the lowest of the three stages that fits. ZeRO shards states, but neither activations nor computing.
#
# **What we left out**
#
# - **Gradients in float32.** The 16 bytes a parameter are the paper's. But sums over many micro-batches in bf16 lose small terms, so Llama 3 (arXiv
#   2407.21783, 3.3.2) and Megatron-LM with `--bf16` add up gradients in float32, which makes 2 + 4 + 12 = 18 bytes. DeepSpeed does this with
#   `data_types: {"grad_accum_dtype": "fp32"}`; its default is the model's type. And plain DDP holds the gradients a second time in its buckets,
#   unless you set `gradient_as_bucket_view=True` (lab 04).
# - **Making the model.** Before stage 3 can shard it, each process holds all of it. `deepspeed.zero.Init()` shards each parameter as it is made.
#   `from_pretrained` of transformers does this by itself, but only if it knows about stage 3, so make `TrainingArguments(deepspeed=...)` before the
#   model (modeling_utils.py, `is_deepspeed_zero3_enabled`).
# - **DeepSpeed's checkpoints** hold the shards of each rank. DeepSpeed copies `zero_to_fp32.py` next to them, a script that puts the float32 weights
#   together without DeepSpeed. `ds_to_universal.py` makes a checkpoint, with the optimizer's state, that a different number of ranks can load.
# - **Activations**: ZeRO shards states, not activations. Checkpointing (lab 01) makes them smaller; tensor parallelism (lab 08) shards them.
# - **ZeRO++** (Wang et al., arXiv 2306.10209): it gathers weights quantized to 8 bits, keeps a second copy of the shards inside each node so that
#   backward's gather stays there, and sends 4-bit gradients. That leaves a quarter of the traffic between nodes.
# - **ZeRO-Infinity** (arXiv 2104.07857): the parameters also live in CPU memory or on NVMe, and are gathered from there. For the optimizer, `Files`
#   in `offload_optimizer` does the same.
# - **A unit that only some ranks use.** All ranks must gather the same units in the same order, or they wait for each other forever. Mixtures of
#   experts (lab 11) get groups of their own.
#
# Next: [07_fsdp](07_fsdp.ipynb): stage 3 in torch itself, with each parameter cut along its first dimension.
#
# On the spine it is [08_tensor_parallel](08_tensor_parallel.ipynb).
