# %% [markdown]
# # 07 FSDP: sharding as PyTorch does it
#
# > 130 minutes, 30 more with Further, 10 with its bug · difficulty 4/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL; 4 x 24 GB for 7B

# %% [markdown]
# ## 1. Story
#
# In March 2023 a group at Stanford took LLaMA with 7 billion parameters, and 52,000 examples of instructions with answers. After three hours on eight
# 80 GB A100s they had Alpaca. The GPUs cost less than 100 dollars (crfm.stanford.edu, 13 March 2023). The README of its code warns: "Naively,
# fine-tuning a 7B model requires about 7 x 4 x 4 = 112 GB of VRAM". That is 16 bytes a parameter, in float32: the weight, its gradient and Adam's two
# moments. So they used PyTorch's FSDP, *fully sharded data parallel*.
#
# You know the idea from lab 06: it is ZeRO's stage 3. The FSDP of 2023 kept a block's parameters in one flat tensor, as you did in that lab. Today's
# FSDP2 cuts each parameter along its first dimension instead, and each rank keeps **some rows of each parameter**. Your model stays your model, and
# all you call is `fully_shard(block)`.
#
# Now say you have no A100s, only a machine with four GPUs of 24 GB. If you shard 7 billion parameters in float32 over the four GPUs, with gradients
# and Adam, how many GB does each GPU hold?

# %%
import contextlib
import functools
import math
import tempfile
import textwrap

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status


begin("07_fsdp")
check(fsdp_7b_gb=...)

# %% [markdown]
# So sharding alone is not enough. Section 7 adds what is missing: keep the rows in CPU memory (*offload*), and use a few GB of the GPU for the part
# that is being computed.
#
# This lab builds on lab 02 (all-gather, reduce-scatter), lab 03 (hooks) and lab 06 (stage 3). At the end torch's own FSDP2 trains the same model,
# with the same losses, the same rows and the same number of messages as yours.

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import fsdp as plots
from ranklab.plots.zero import memory_curves

plots.over_a_step()

# %% [markdown]
# A rank always has its own rows of every parameter. The other rows of a **block** arrive shortly before the block computes, and are freed afterwards.
# Parameters that are in no block (embedding, last norm, head) belong to the **root**, which is the model itself. The root stays whole from forward to
# backward.

# %% [markdown]
# ## 3. Smallest working code
#
# Take one linear layer, two ranks and one step of SGD. Gather the rows, use them, and send the rows of the gradient to the rank that owns them:

# %% tags=["nbval-check-output"]
weight = torch.arange(12.0).view(4, 3) / 10
x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]])  # rank r has x[r]


def step_in_rows(weight, x):
    rank, R = dist.get_rank(), dist.get_world_size()
    rows = weight.chunk(R)[rank].to(device())  # (4/R, 3): all that stays here
    whole = torch.empty(4, 3, device=device())
    dist.all_gather_single(whole, rows)
    whole.requires_grad_()
    F.linear(x[rank].to(device()), whole).square().sum().backward()
    gradient = torch.empty_like(rows)
    dist.reduce_scatter_single(gradient, whole.grad / R)  # the mean, of my rows
    return rows - 0.01 * gradient


weight.requires_grad_()
(F.linear(x, weight).square().sum() / 2).backward()
print("one process", weight.detach() - 0.01 * weight.grad)
for rank, rows in enumerate(launch(step_in_rows, weight.detach(), x, ranks=2)):
    print(f"rank {rank} of 2", rows)

# %% [markdown]
# This is FSDP already. What is missing? R may not divide the rows of a parameter, a whole block should travel in one message, the next block should
# travel while the current one computes, and clipping and saving must know about rows.

# %% [markdown]
# ## 4. Build it

# %% [markdown]
# ### 4.1 Shard by rows
# > difficulty 1/5 · importance 4/5 · 8 minutes · about 4 lines
#
# *After this you can say which rows of a parameter are on which rank in FSDP2.*
#
# torch cuts a parameter as `torch.chunk` does: each of R ranks takes n/R rows, rounded up, until none are left. So each rank knows which rows another
# rank has, without asking. A bias is cut like a matrix, and its rows are single numbers.
#
# **Predict.** A weight has 10 rows, and there are 4 ranks. How many rows does the last rank get?

# %%
check(fsdp_rows_last=...)

# %%
def shard_parameter(parameter, group=None):
    """Copy this rank's rows of `parameter`, so that the parameter can be freed.

    Each rank has ceil(n/R) rows; the last ranks may have fewer, or none. The copy has memory for
    its rows only, shares none with the parameter, and requires no gradient. The parameter is
    unchanged.
    group: the ranks that share the rows.
    Shape: (n, ...) -> (rows, ...).
    Cost: sends nothing.
    Raises: ValueError for a parameter without dimensions, because it has no rows.
    """
    if parameter.dim() == 0:
        raise ValueError("a parameter of shape () has no rows: give it the shape (1,)")
    raise NotImplementedError("exercise 4.1: about 4 lines")


# %%
shard_parameter = check(shard_parameter)

# %% [markdown]
# Here your function cuts a small MLP over four ranks. Crossed cells exist on no rank. They only travel, as zeros, because in a message every rank's
# part must have the same length:

# %%
def how_many_rows():
    layer = nn.ModuleDict({"up": nn.Linear(4, 10), "down": nn.Linear(10, 4)})
    return {name: len(shard_parameter(p)) for name, p in layer.named_parameters()}


counts = launch(how_many_rows, ranks=4)
plots.rows({name: [count[name] for count in counts] for name in counts[0]})

# %% [markdown]
# ### 4.2 A fully sharded block
# > difficulty 5/5 · importance 5/5 · 30 minutes · about 15 lines
#
# *After this you can write a module whose parameters are gathered for a layer, and freed after it.*
#
# Now write a module whose parameters come and go. *When* they come and go, you know from lab 06: `ShardedModule` uses the same engine, and the four
# methods of `ZeroStage3` in the library call yours. *How* they travel is your part, in three methods. All parameters of a block travel in **one
# message**, because each message pays a latency, and a block of our GPT has eight parameters.
#
# | given by `ShardedModule` | |
# |---|---|
# | `self.parameters`, `self.trained` | the block's parameters, in order; only those that are not frozen |
# | `p.padded_shard()` | this rank's rows of parameter `p`, ready to travel: flat, with zeros at the end, in the type used for computing. It has `p.numbers` numbers, the same on every rank |
# | `p.fill(parts)` | puts the whole `p` into its module. `parts` has the shape (R, `p.numbers`) and may be a view: row r is what rank r sent of `p` |
# | `p.padded_gradient()` | the whole gradient of `p`, ready to travel, (R, `p.numbers`): row r is for rank r. It is zeros if this rank has no gradient. If no rank has one, `p` gets none |
# | `p.whole.grad` | the whole gradient itself. Set it to None once it is in the message, so that its memory is freed and the next backward doesn't add to it |
# | `self.group`, `self.ranks` | the group that shares the rows, and its size |
#
# | set by you | |
# |---|---|
# | `self.work`, `self.gathered` | the handle and the message of a gather on its way, or None |
# | `self.is_whole` | True while the parameters are whole. `reshard()` sets it back |
# | `self.reduction` | `(mine, handle)` of a reduce-scatter on its way. `end_reduction()` waits for it, and sets this back to None |
#
# You know the collectives from lab 02. Here both are asynchronous: `dist.all_gather_single(whole, mine, group=..., async_op=True)`, and
# `dist.reduce_scatter_single(mine, whole, ...)` with a flat `whole`. The gradients must become means over ranks, not sums.
#
# There is a trap: in a gathered message the parts lie **rank by rank**, not parameter by parameter. First come rank 0's rows of all parameters, then
# rank 1's.
#
# **Predict.** A model has 100 MB of parameters in float32, all in blocks, and there are 4 ranks. Blocks are freed after forward, and gathered again
# for backward. How many MB does each rank send in a step?

# %%
from ranklab.fsdp import ShardedModule

check(fsdp_step_mb=...)

# %%
class FullyShardedBlock(ShardedModule):
    """Keep some rows of each parameter on each rank; gather all rows only while the module runs.

    After backward() the gradients are this rank's rows of the mean over ranks.
    Cost: one all-gather before forward, one before backward, one reduce-scatter after it; each is
        asynchronous, and sends all parameters of the block together. Frozen parameters are left out
        of the reduce-scatter. Messages have the dtypes of p.padded_shard() and p.padded_gradient().
    """

    def begin_unshard(self):
        """Start gathering the parameters, unless they are already whole or on their way."""
        if not self.parameters or self.is_whole or self.work:
            return
        raise NotImplementedError("exercise 4.2, first part: about 3 lines")

    def unshard(self):
        """Gather the parameters, and give the modules the whole ones."""
        self.begin_unshard()
        if not self.work:
            return
        raise NotImplementedError("exercise 4.2, second part: about 5 lines")

    def reduce_gradients(self):
        """Start averaging the gradients, each row on its owner; free the whole gradients."""
        if not self.trained:
            return
        raise NotImplementedError("exercise 4.2, third part: about 7 lines")


# %%
FullyShardedBlock = check(FullyShardedBlock)

# %% [markdown]
# Everybody makes this mistake once, with this class as with torch's: they make the optimizer first. But sharding puts new parameters into the model,
# so the optimizer steps tensors that nobody uses any more. You get no error, but the loss never changes:

# %% tags=["nbval-check-output"]
def losses_with_sgd(optimizer_first):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(device())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    FullyShardedBlock(model)
    optimizer = early if optimizer_first else torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 8, device=device())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


for name, first in {"sharded, then the optimizer": False, "the optimizer first": True}.items():
    losses = launch(losses_with_sgd, first, ranks=2)[0]
    print(f"{name:28}", *(f"{loss:.4f}" for loss in losses))

# %% [markdown]
# Next, your class shards a GPT of four blocks over four ranks: first each block, then the model. `reshard_after_forward=False` keeps the blocks whole
# from forward to backward. It saves a gather, and costs memory:

# %%
from ranklab.meter import MemoryCurve, Traffic, memory_of
from ranklab.models import GPT, GPTConfig


def sharded_gpt(**options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, n_ctx=16, n_embd=64, n_layer=4)).to(device())
    modules = (*model.blocks.values(), model)
    return model, [FullyShardedBlock(module, **options) for module in modules]


tokens = torch.randint(64, (4, 1, 16), generator=torch.Generator().manual_seed(1))  # rank r: [r]

# %%
def memory_over_a_step(keep_whole):
    model, blocks = sharded_gpt(reshard_after_forward=not keep_whole)
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = [p for block in blocks for p in block.parameters]
    whole = lambda: [*(block.gathered for block in blocks), *(p.whole for p in parameters)]
    batch = tokens[dist.get_rank()].to(device())

    def step(mark=lambda name: None):
        mark("forward")
        loss = model(batch, batch)
        mark("backward")
        loss.backward()
        mark("step")
        optimizer.step()

    step()  # makes Adam's state, and shows the order of the blocks
    optimizer.zero_grad()
    curve = MemoryCurve(model, optimizer, whole)
    with curve if dist.get_rank() == 0 else contextlib.nullcontext(), Traffic() as traffic:
        step(curve.mark)
    return curve, traffic


# %%
names = {"shards again after forward": False, "whole until backward": True}
runs = {name: launch(memory_over_a_step, keep, ranks=4)[0] for name, keep in names.items()}
memory_curves({name: curve for name, (curve, _) in runs.items()})

# %% [markdown]
# Look at the purple areas: the parameters that were gathered come and go on the left, and pile up until backward on the right. Here are the peak bytes of whole parameters, and what each of the two ways sent:

# %% tags=["nbval-check-output"]
print(f"{'':26}  bytes at once    all-gathers   reduce-scatters   bytes sent")
for name, (curve, traffic) in runs.items():
    peak = max(point.gathered_parameters for point in curve.points)
    print(f"{name:26} {peak:15,} {traffic.calls['all_gather']:13}",
          f"{traffic.calls['reduce_scatter']:17} {traffic.sent_bytes:12,}")

# %% [markdown]
# Check the first row: nine all-gathers are four blocks twice and the root once. Each of the five modules has one reduce-scatter.
#
# > **Take away.** FSDP sends 3 (R-1)/R of the parameters' bytes in a step: two all-gathers and a reduce-scatter, where DDP sends 2 (R-1)/R. For 7 billion parameters in bf16 on 64 ranks: 41.3 GB instead of 27.6. Blocks that stay whole from forward to backward save one of the three.

# %% [markdown]
# ### 4.3 Gradient clipping
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 9 lines
#
# *After this you can clip gradients that are sharded by the norm of all of them.*
#
# Gradient clipping takes all gradients of a model as one vector, and scales it down if its norm is above a maximum. As in torch, the factor is
# `max_norm / (norm + 1e-6)`, at most 1. But no rank has that vector: each rank has some rows. Norms of parts don't add up, but their squares do.
#
# **Predict.** There are 7 billion gradients on 4 ranks. The sum is kept in float64, because it has so many terms. How large is the message that the
# ranks all-reduce, in bytes?

# %%
check(fsdp_norm_bytes=...)

# %%
def clip_grad_norm_sharded(parameters, max_norm, group=None):
    """Scale the gradients, as one vector over all ranks, to a norm of at most max_norm.

    A parameter without a gradient (None) does not count, and a rank may have no gradients at all.
    Accumulate 16-bit gradients in a wider type. If the norm is below max_norm, gradients stay the
    same up to rounding. With offload they are on the CPU: move the factor to their device.
    group: the ranks that share the rows.
    Returns: the norm before clipping, as a tensor or a number, the same on all ranks: NaN or
        infinite on all if any gradient on any rank is; the gradients may then be anything.
    Cost: one all-reduce of 8 bytes.
    """
    raise NotImplementedError("exercise 4.3: about 9 lines")


# %%
clip_grad_norm_sharded = check(clip_grad_norm_sharded)

# %% [markdown]
# Your function clips the gradients of your blocks. Compare with torch's own clipping of the whole model in one process:

# %% tags=["nbval-check-output"]
def clipped():
    model, _ = sharded_gpt()
    batch = tokens[dist.get_rank()].to(device())
    model(batch, batch).backward()
    rows = math.hypot(*(p.grad.norm().item() for p in model.parameters() if p.grad.numel()))
    before = float(clip_grad_norm_sharded(model.parameters(), 0.5))
    return rows, before, float(clip_grad_norm_sharded(model.parameters(), 0.5))


torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=64, n_ctx=16, n_embd=64, n_layer=4))
model(tokens.flatten(0, 1), tokens.flatten(0, 1)).backward()
print(f"one process: norm {nn.utils.clip_grad_norm_(model.parameters(), 0.5).item():.4f}")
for rank, (rows, before, after) in enumerate(launch(clipped, ranks=4)):
    print(f"rank {rank}: its rows alone {rows:.4f}; norm {before:.4f}, after clipping {after:.4f}")

# %% [markdown]
# ### 4.4 What is a block?
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 8 lines · open: no recipe
#
# *After this you can choose where to cut a model into blocks, by memory and by messages.*
#
# So far, a block was a transformer block. If you make each linear layer a block, little is whole at a time, but you send many small messages. If the
# model is one block, you send only two messages, but all of it is whole. Write a function that decides for any model: **as few blocks as possible,
# and no more than `most_bytes` whole**.
#
# Not every module can be a block. A `ModuleList` has no forward, so nobody calls it, and its hooks never run. And if two modules share a parameter, a
# block must contain both or neither.
#
# | given | |
# |---|---|
# | `whole_bytes(model, blocks)` | the bytes of parameters that are whole at the worst moment of a step, without gradients. There are two such moments, and the larger counts: when the largest block arrives (the root, the block and its message), and when the root arrives (the root and its message) |
# | `parameter_bytes(module)` | the bytes of all its parameters, each counted once |
# | `can_be_a_block(model, module)` | True if the module has its own forward, and shares no parameter with modules outside (also for a module without parameters) |
# | `outermost(modules)` | the modules that are inside no other module of the list |
# | `without_needless(model, blocks, most_bytes)` | `blocks` without those that the root has room for |

# %%
from ranklab.fsdp import can_be_a_block, outermost, parameter_bytes, whole_bytes, without_needless

# %%
def wrap_policy(model, most_bytes):
    """Choose modules of `model` to shard as blocks, with whole_bytes(model, blocks) <= most_bytes.

    Choose no more than needed. No block is inside another, can_be_a_block(model, block) holds for
    each, and `model` itself is not one of them: it is the root. The check compares their number
    with the library's, on several models, and prints both.
    Raises: ValueError if even the smallest blocks are too large.
    """
    raise NotImplementedError("exercise 4.4: about 8 lines")


# %%
wrap_policy = check(wrap_policy)

# %% [markdown]
# Here is what your function finds for a GPT with eight blocks:

# %% tags=["nbval-check-output"]
gpt = GPT(GPTConfig(n_layer=8, n_embd=128))
print(f"{parameter_bytes(gpt):,} bytes of parameters")
for most_bytes in (20_000_000, 8_000_000, 2_000_000, 1_000_000, 700_000):
    blocks = wrap_policy(gpt, most_bytes)
    messages = 3 * len(blocks) + 2
    kinds = sorted({type(block).__name__ for block in blocks})
    print(f"{most_bytes:10,} allowed: {whole_bytes(gpt, blocks):10,} whole,",
          f"{len(blocks):2} blocks, {messages:3} messages in a step  {', '.join(kinds)}")

# %% [markdown]
# ### 4.5 The loss of instruction tuning
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 7 lines
#
# *After this you can average a loss over ranks that have different numbers of tokens.*
#
# An example is a question and an answer. The model should learn the answer and not the question, so the labels of the question's tokens are `IGNORE`.
# Then the ranks have different numbers of answer tokens, and you meet the mean of means from lab 01 again: the **mean over ranks of means over
# tokens**. If one rank has 9 answer tokens and another has 1, that one token counts nine times as much, and a rank without answer tokens divides by
# zero. (The Trainer of transformers had this mistake over micro-batches until October 2024, huggingface.co/blog/gradient_accumulation.)
#
# So divide by the number of answer tokens in the **whole batch**. Keep in mind that FSDP averages the gradients over ranks.
# `F.cross_entropy(..., ignore_index=IGNORE, reduction=...)` leaves the question out.

# %%
from ranklab.data import IGNORE

# %%
def masked_loss(logits, labels, count=None, group=None):
    """Return R times this rank's share of the mean loss over all answer tokens, in nats.

    The mean of these losses over ranks is the loss of the whole batch, and the mean of their
    gradients is its gradient, even if ranks have different numbers of answer tokens, or none. Each
    label is the token at its own position, or IGNORE; the logits at a position predict the next
    token. Accumulated in float32; the inputs stay unchanged.
    group: the ranks over which gradients are averaged; R is its size.
    Shape: logits (B, T, V), labels (B, T) -> ().
    count: how many labels count in the whole batch (with several micro-batches: in all of them), if
        this is known; None: count these labels on all ranks.
    Cost: one all-reduce of 8 bytes; none with `count`.
    Raises: ValueError on every rank if no label of the batch counts.
    """
    raise NotImplementedError("exercise 4.5: about 7 lines")


# %%
masked_loss = check(masked_loss)

# %% [markdown]
# Three ranks have 9, 1 and no answer tokens. The table compares the usual mean with your loss:

# %% tags=["nbval-check-output"]
logits = torch.randn(3, 1, 12, 7, generator=torch.Generator().manual_seed(3))
labels = torch.arange(12).remainder(7).repeat(3, 1, 1)
for rank, answers in enumerate((9, 1, 0)):
    labels[rank, :, : 12 - answers] = IGNORE


def both_losses():
    part, targets = logits[dist.get_rank()].to(device()), labels[dist.get_rank()].to(device())
    loss = F.cross_entropy(part[0, :-1], targets[0, 1:], ignore_index=IGNORE)
    return loss.item(), masked_loss(part, targets).item()


means, shares = zip(*launch(both_losses, ranks=3))
loss = F.cross_entropy(logits[:, 0, :-1].flatten(0, 1), labels[:, 0, 1:].flatten())
print("each rank's own mean   ", *(f"{loss:7.4f}" for loss in means))
print("masked_loss            ", *(f"{loss:7.4f}" for loss in shares))
print(f"mean over ranks: {sum(means) / 3:.4f} and {sum(shares) / 3:.4f}; one process: {loss:.4f}")

# %% [markdown]
# ### Further
#
# Two more exercises, both checked, that are not part of the 130 minutes: shard inside a node only, and put a whole model together from its rows.

# %% [markdown]
# #### `hybrid_shard_groups`
# > difficulty 2/5 · importance 4/5 · 8 minutes · about 4 lines
#
# Gathers are frequent, so let them stay where the links are fast: shard **inside a node**, and give every node a copy. After the reduce-scatter
# inside the node, the ranks with the same rows average their gradients over the nodes, by a small all-reduce. You pay with memory: each of four GPUs
# in a node holds 1/4 of the model, however many nodes there are.
#
# You need two kinds of groups. `group, _ = dist.new_subgroups_by_enumeration([[ranks], [ranks], ...])` makes several groups that have no rank in
# common, and returns the group of this rank. All ranks must call it with the same lists.
#
# **Predict.** A model has 100 MB of gradients, and is sharded inside each of two nodes of four GPUs. How many MB does each GPU send to the other node
# in a step?

# %%
check(fsdp_hybrid_mb=...)

# %%
def hybrid_shard_groups(shard_ranks):
    """Create (shards, replicas): the group of the ranks that, with this one, share one copy of the
    model, and the group of the ranks that hold the same rows as this one.

    Ranks 0 .. shard_ranks-1 share the first copy, and so on. Ranks are in increasing order in each
    group. Collective: call it on every rank.
    Raises: ValueError if shard_ranks does not divide the number of ranks.
    """
    R = dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError(f"shard_ranks={shard_ranks} must divide the {R} ranks")
    raise NotImplementedError("exercise hybrid_shard_groups: about 4 lines")


# %%
hybrid_shard_groups = check(hybrid_shard_groups)

# %% [markdown]
# These are your groups for two nodes of three GPUs:

# %%
groups = launch(lambda: [dist.get_process_group_ranks(g) for g in hybrid_shard_groups(3)], ranks=6)
plots.hybrid(groups, per_node=3)

# %% [markdown]
# Look at a dashed line: its ranks hold the same rows, so only the gradients of these rows cross from node to node.

# %% [markdown]
# #### `full_state_dict`
# > difficulty 3/5 · importance 4/5 · 12 minutes · about 7 lines
#
# To save a model, one rank must have all of it: rank 0, in CPU memory, because the GPU has no room for all of it at once.
# `gather_rows(parameter, group)` gathers one parameter from its shards, and returns it whole on the CPU of rank 0, and None on all others.
# `sharded_modules(model)` returns the blocks, each with its `parameters` and its `group`.

# %%
from ranklab.fsdp import gather_rows, sharded_modules

# %%
def full_state_dict(model):
    """Gather the plain model's {name: tensor} on the CPU of the group's rank 0; {} elsewhere.

    Weights are taken from the shards, in their dtype, not from what was gathered to compute. Only
    one parameter at a time is whole on a device, and only on rank 0. Names, tied parameters and
    buffers are the same as in model.state_dict(keep_vars=True), which holds each sharded parameter
    as its `.shard`.
    Cost: each rank sends its rows once, in one message per parameter.
    """
    raise NotImplementedError("exercise full_state_dict: about 7 lines")


# %%
full_state_dict = check(full_state_dict)

# %% [markdown]
# Three weights, first in rows and then whole again:

# %% tags=["nbval-check-output"]
def rows_and_whole():
    model, _ = sharded_gpt()
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    return shapes, {name: list(t.shape) for name, t in full_state_dict(model).items()}


(rows, whole), *pairs = launch(rows_and_whole, ranks=4)
for name in ("token.weight", "blocks.0.norm1.weight", "blocks.0.mlp.up.weight"):
    print(f"{name:24} rows on rank 0 {rows[name]!s:10} full_state_dict {whole[name]}")
print("on the other ranks:", [state for _, state in pairs])

# %% [markdown]
# #### Derive: how many tokens hide the gathers?
# > difficulty 4/5 · importance 5/5 · 10 minutes
#
# The answer is a formula. Shards of a model with P parameters (bf16, 2 bytes each) lie on the `gpus_per_node` GPUs of a node, and each node has a copy, as with `hybrid_shard_groups`. A GPU works on T tokens of its own at `flops` FLOP/s: 2 FLOPs for each parameter and token in forward, 4 in backward. Its links send `inside` bytes/s in the node and `between` bytes/s to other nodes, both at the same time. Forward gathers each parameter once; backward gathers it once more and reduce-scatters its gradient; then each GPU all-reduces its shard of the gradients with its peers in the other nodes, in a large ring that sends everything twice. Take (R-1)/R as 1. Each pass must hide its own messages. **From which T on does computing hide all of it?** (`lambda flops, inside, between, gpus_per_node: ...`)

# %%
check(hidden_shard_tokens=...)

# %%
from ranklab.fsdp import hidden_shard_tokens

for place, gpus_per_node, inside in (("shards in a node of 8, over NVLink", 8, 370e9),
                                     ("shards over all nodes, by one card", 1, 50e9)):
    print(f"{place}: {hidden_shard_tokens(400e12, inside, 50e9, gpus_per_node):,.0f} tokens for "
          "each GPU")

# %% [markdown]
# <details><summary>The derivation</summary>
#
# Inside the node, forward: `2 * P * T / flops = 2 * P / inside`, so T = `flops / inside`. Backward has twice the FLOPs and twice the bytes, so it gives the same T. Between nodes: `4 * P * T / flops = 2 * 2 * (P / gpus_per_node) / between`, so T = `flops / (gpus_per_node * between)`. Both links are busy at once, so the larger T counts.
# </details>
#
# > **Take away.** With 8 GPUs a node, `max(400e12 / 370e9, 400e12 / (8 * 50e9))` = 1,081 tokens hide everything. If the shards are spread over all nodes, each gather goes through the card, and it takes 8,000 tokens.

# %% [markdown]
# #### Gathers in 8 bits
#
# Where messages still show, weights can travel in 8 bits. In MXFP8 each 32 numbers share a scale of one byte, so that a number takes 1 + 1/32 bytes (you write it in lab 11). Gradients stay in bf16.
#
# **Predict.** 70 billion parameters, sharded over 8 GPUs. In bf16 each GPU sends 367.5 GB in a step: two gathers and a reduce-scatter. How many GB does it send if both gathers are in MXFP8?

# %%
check(fsdp_8bit_gb=...)

# %% [markdown]
# Megatron has `--fp8-param-gather` for it, and torchao `enable_fsdp_float8_all_gather`, which has one scale for a whole tensor. torchtitan's MXFP8 saves none of these bytes (pull request 4203): it gathers bf16, and rounds afterwards.

# %% [markdown]
# ## 5. The real thing
#
# torch's own FSDP2 is the function `fully_shard`. You call it like yours: on each block, then on the model. Now train the same GPT for five steps
# with your class, with FSDP2, and with DeepSpeed's stage 3 from lab 06: same weights at the start, same tokens, same AdamW. We take three ranks, so
# that the rows are uneven:

# %%
from torch.distributed.fsdp import fully_shard

from ranklab.peers.deepspeed_zero import train_with_deepspeed

adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def gpt_and_batches():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, n_ctx=16, n_embd=32, n_layer=3)).to(device())
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(64, (5, 4, 16), generator=generator).to(device())
    return model, [(batch, batch) for batch in tokens]


# %%
def losses_of(shard, model, batches):
    for module in (*model.blocks.values(), model):
        shard(module)
    optimizer, losses = adamw(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(tool):
    model, batches = gpt_and_batches()
    with Traffic() as traffic:
        losses = losses_of(FullyShardedBlock if tool == "yours" else fully_shard, model, batches)
    rows = {name: p.to_local() if tool == "FSDP2" else p for name, p in model.named_parameters()}
    return losses, traffic.calls, {name: tuple(p.shape) for name, p in rows.items()}


runs = {tool: launch(train, tool, ranks=3)[0] for tool in ("yours", "FSDP2")}
assert runs["yours"][1:] == runs["FSDP2"][1:], "the same messages, and the same rows"

# %%
def train_by_deepspeed():
    model, batches = gpt_and_batches()
    with Traffic() as traffic:
        return train_with_deepspeed(model, adamw, batches, stage=3), traffic.calls, {}


runs["DeepSpeed"] = launch(train_by_deepspeed, ranks=3)[0]
print(f"{'':9} {'losses of five steps':34}  all-gathers  reduce-scatters  rows of an MLP")
for tool, (losses, calls, rows) in runs.items():
    print(f"{tool:9}", *(f"{loss:.4f}" for loss in losses),
          f"{calls['all_gather']:12} {calls['reduce_scatter']:16} ",
          rows.get("blocks.1.mlp.up.weight", "flat"))
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(losses, runs["yours"][0]))

# %% [markdown]
# Your block of about 15 lines and FSDP2 have the same five losses, the same rows, and the same 35 all-gathers and 20 reduce-scatters. In FSDP2 a parameter is a `DTensor`, a tensor that knows how it is cut, so that FSDP2 works together with checkpoints and with tensor parallelism (lab 08). DeepSpeed's stage 3 gathers each parameter in its own message here, and sends the gradients of this small model in one message a step. You can change both in its configuration.
#
# To clip with FSDP2, call `nn.utils.clip_grad_norm_(model.parameters(), 0.5)` as always, because DTensors add up their squares over ranks by
# themselves. On *your* model the same line would clip by a different factor on each rank.
#
# `reshard_after_forward=False` is only one way in which FSDP2 can spend memory to send less. Others are (torch 2.13, `_fully_shard.py`):
#
# | | |
# |---|---|
# | `fully_shard(block, reshard_after_forward=8)` | from forward to backward each GPU keeps 1/8 of the block, so backward's gather stays inside a node of 8 |
# | `set_requires_gradient_sync(False)` | a micro-batch reduces nothing, and keeps whole gradients. `set_requires_all_reduce(False)` leaves out only the sum over copies |
# | `set_reshard_after_backward(False)` | the next micro-batch needs no gather (set it back for the last one). Together with `reshard_after_forward=False` you gather once a step |
# | `set_modules_to_forward_prefetch([...])`, `..._backward_prefetch` | gathers more than one block ahead |
#
# Your `full_state_dict` is `get_model_state_dict` with `StateDictOptions(full_state_dict=True, cpu_offload=True)`. If you combine tools, the order
# matters: first activation checkpoints, then `torch.compile` of each block, then `fully_shard` (as in torchtitan's `parallelize.py`).
#
# You will also meet older code. FSDP1 (`FullyShardedDataParallel`) puts the parameters of a block into one flat tensor, as lab 06 does, and you
# choose a strategy by its name:
#
# | FSDP1 | FSDP2 | yours | ZeRO |
# |---|---|---|---|
# | `FULL_SHARD` | `reshard_after_forward=True` | the same | stage 3 |
# | `SHARD_GRAD_OP` | `reshard_after_forward=False` | the same | between 2 and 3: whole from forward to backward only |
# | `NO_SHARD` | torch's DDP | lab 03 | stage 0 |
# | `HYBRID_SHARD` | a mesh (lab 12) of two axes, (copies, shards) | `hybrid_shard_groups` | stage 3 inside a node: MiCS |
# | `_HYBRID_SHARD_ZERO2` | the same mesh, and `False` | the same groups, and `False` | no name |
#
# Often a library calls FSDP for you, so check whether it really does. Here we ask Accelerate for FSDP. On GPUs it shards, and the cell prints the
# losses. On a CPU it trains with plain DDP and says nothing. One assertion on the model finds that out:

# %%
from ranklab.peers import hugging_face

losses = hugging_face.losses_on_ranks(hugging_face.train_with_accelerate, 4)
print(textwrap.fill(str(losses or hugging_face.NOT_HERE), 98))

# %% [markdown]
# You would not see it in the losses. The Trainer of transformers does shard on a CPU, if it uses DeepSpeed. Here it trains the same tiny Llama on two
# ranks, and so does our FSDP:

# %%
trainer_losses = hugging_face.losses_on_ranks(hugging_face.train_with_trainer, 4)
fsdp_losses = hugging_face.losses_on_ranks(hugging_face.train_with_ours, 4)
print("Trainer, DeepSpeed's stage 3 ", *(f"{loss:.4f}" for loss in trainer_losses))
print("our FSDP                     ", *(f"{loss:.4f}" for loss in fsdp_losses))
assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(trainer_losses, fsdp_losses))

# %% [markdown]
# ## 6. Project
#
# **A Llama learns to follow instructions.** We take the Llama of transformers as it is: it knows nothing about your class. The full size is
# Llama-2-7B on four GPUs of 24 GB. Here we run a small one with the same code. First it reads Python's library, so that there is something to tune.
# Then it learns from instructions with answers, made from real text, and must answer questions that it has not seen. *Exact match* is the share of
# answers that are right to the last character.

# %%
from ranklab.projects import fsdp as project

functions = {"block": FullyShardedBlock, "clip": clip_grad_norm_sharded, "loss": masked_loss,
             "policy": wrap_policy, "state": full_state_dict}
folder = tempfile.TemporaryDirectory()
results = project.run(ranks=2, save=folder.name, **functions)
print(project.report(results))

# %% [markdown]
# Your `full_state_dict` collected the tuned model for this file. Nothing in it shows that FSDP was used:

# %% tags=["nbval-check-output"]
if results:  # None where transformers is not installed
    from safetensors import safe_open

    with safe_open(f"{folder.name}/model.safetensors", "pt") as file:
        for name in list(file.keys())[:3]:
            print(f"{name:40} {file.get_slice(name).get_shape()}")

# %% [markdown]
# **Your turn.** Change one thing below. Before you run it, write down which numbers change, and by what factor. Try `recompute`, `precision="bf16"`,
# `most_bytes=300_000`, `ranks=4` (alone or with `shard_ranks=2`), or `engine="fsdp2"`, which shards and gathers without your block. The cell starts
# with `micro_batch=8`: above, a rank had one micro-batch of 16 examples, and now it has two of 8. What will a step send?

# %%
change = {"micro_batch": 8}
settings = {"ranks": 2, "pretrain": 5, "steps": 5, "eval_batch": 32}
print(project.report(project.run(**functions, **(settings | change))))

# %% [markdown]
# Because each micro-batch gathers the parameters and reduces the gradients, a step sends twice the bytes. Its peak is lower.

# %% [markdown]
# ## 7. Measure
#
# The table compares predictions with counts on rank 0, for 1 to 4 ranks. Rank 0 has the most rows, ceil(n/R) of each parameter. In float32 with Adam
# a number takes 16 bytes: the number itself, its gradient and two moments. If R does not divide the rows, zeros travel too. Counts are exact, so the
# cell asserts them.

# %%
def counted():
    model, _ = sharded_gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = tokens[dist.get_rank()].to(device())
    for _ in range(2):
        with Traffic() as traffic:
            model(batch, batch).backward()
        memory = memory_of(model, optimizer)
        optimizer.step()
    steps = 4 * len(optimizer.state)  # Adam counts its steps, in 4 bytes a tensor
    return memory.total - memory.buffers - steps, traffic.sent_bytes


# %% tags=["nbval-check-output"]
gpt = GPT(GPTConfig(vocab_size=64, n_ctx=16, n_embd=64, n_layer=4))
in_blocks = {id(p) for block in gpt.blocks.values() for p in block.parameters()}
print(" " * 8 + f"{'held':>20}{'sent in a step':>28}\n" + " " * 6 + "   predicted     counted" * 2)
for R in (1, 2, 3, 4):
    numbers = {id(p): math.ceil(len(p) / R) * p[0].numel() for p in gpt.parameters()}
    all_rows = sum(numbers.values())
    block_rows = sum(n for p, n in numbers.items() if p in in_blocks)
    gathered = 2 * block_rows + (all_rows - block_rows)  # in rows of each rank
    predicted = 16 * all_rows, (R - 1) * 4 * (gathered + all_rows)
    counts = launch(counted, ranks=R)[0]
    print(f"ranks {R}", *(f"{p:11,} {c:11,}" for p, c in zip(predicted, counts)))
    assert predicted == counts

# %% [markdown]
# And the 7B model on four GPUs of 24 GB? We have no such GPUs, but we can use the same formula, and add the temporary tensors: whole parameters,
# messages, activations. (A test compares it with a count, and they agree within 2%: one process plays a rank of four, and the Llama of transformers
# runs in our FSDP on tensors without memory.) These are the bytes at the peak, for one text of 1,024 tokens on each GPU, with bf16 and checkpointing:

# %% tags=["nbval-check-output"]
from ranklab.fsdp import predicted_memory
from ranklab.projects.fsdp import LLAMAS

parts = ("parameters", "gradients", "optimizer_state", "gathered_parameters", "activations",
         "total")
for offload in (False, True):
    memory = predicted_memory(LLAMAS["7b"], ranks=4, offload=offload)
    print(f"offload={offload!s:5}", ", ".join(
        f"{part.split('_')[0]} {getattr(memory, part) / 1e9:.1f}" for part in parts), "GB")

# %% [markdown]
# Llama-2-7B has 6.74 billion parameters, so the states take 27 GB on each GPU at the optimizer's step. Without offload the peak comes before that
# step: in backward at block 2, when all gradients but the last have arrived. With offload, rows, gradients and moments are not on the GPU, and the
# peak comes at block 32, the first in backward, because the inputs of all other blocks are still kept. That is why the second row shows more
# activations. (This column includes messages.)
#
# Offload takes 108 GB of CPU memory for the four GPUs, and it costs transfers and CPU time. In each micro-batch a rank's rows go to its GPU twice,
# for forward and for backward, and its gradients come back once. The CPU computes the step.

# %% [markdown]
# ## 8. Bug of the lab
#
# A bug of the lab is a program that breaks the idea of its lab and still runs. A colleague says what was seen, but not why. Look, write down why before you open the list of causes, and fix the program in its own cell: then it has the numbers of one process, also on other numbers of ranks and in a group of some of them ([16_clinic](16_clinic.ipynb) has bugs that belong to no single lab, and tools that find them).

# %%
import os

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from ranklab.data import batch_at, text_file

# %% [markdown]
# ### 8.1 The loss that does not move
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 1 line
#
# > We moved a run to fully_shard. There is no error and no warning, and it is as fast as we had hoped. But however long we wait, the loss stays where it began, at the loss of a guess among 256 bytes.

# %%
def moved_gpt(steps=12, lr=0.01, seed=0, group=None):
    """Train a GPT under torch's fully_shard.

    Returns {"losses": [of all rows], "weights": {name: the whole tensor}}.
    """
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_ctx=16, n_embd=32)).to(device())
    mesh = DeviceMesh.from_group(group, device().type) if group else None
    optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens, losses = text_file(os.__file__).train, []
    for step in range(steps):
        inputs, targets = (each.chunk(R)[rank].to(device())
                           for each in batch_at(tokens, step, 12, 16, seed))
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / R
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: weight.full_tensor().detach()
                                          for name, weight in model.named_parameters()}}


# %% [markdown]
# **Look.** What does a step change? Is there a gradient when the step is taken?

# %%
losses = launch(moved_gpt, ranks=4)[0]["losses"]
print(*(f"{loss:.3f}" for loss in losses), f"   a guess: {np.log(256):.3f}")

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Each rank trains on its own, and nothing is averaged.
# 2. The gradients are zeroed before the step.
# 3. The learning rate is too small for shards.
# 4. The optimizer has parameters that the model no longer uses.
#
# </details>

# %%
check(clinic_moved_gpt_cause=...)

# %% [markdown]
# **Fixed.** All weights must match one process, the two blocks and the rest must still be sharded, and the optimizer must have the model's parameters and no others.

# %%
moved_gpt = check(moved_gpt)

# %% [markdown]
# ## 9. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 07` in a terminal asks these and more, with other numbers each time.

# %%
questions("07_fsdp")

# %% [markdown]
# ## 10. On real GPUs
#
# ```bash
# torchrun --nproc-per-node 4 -m ranklab.projects.fsdp --size 7b --model models/Llama-2-7b --data alpaca.json --save tuned
# sbatch labs/jobs/fsdp.sbatch
# ```
#
# What changes?
#
# - **The meta device.** Four processes that each build 6.74 billion float32 parameters need 108 GB of host memory. So make the model with
#   `torch.device("meta")`, which has shapes but no memory. Then shard the blocks, and let `fill_shards` read into each shard its own rows. Buffers,
#   such as Llama's rotary angles, are in no file, so they must be computed again.
# - **bf16.** Rows are float32, and the optimizer steps them in float32. They travel and compute in bf16, which halves the gathers. Gradients are
#   reduced in float32. That is `Precision(torch.bfloat16, torch.float32)`, in FSDP2
#   `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`.
# - **Fragmentation** (lab 01). Large pieces of memory come and go all the time, so you may run out of memory with gigabytes reserved and unused.
#   `PYTORCH_ALLOC_CONF=expandable_segments:True` helps. Compare `torch.cuda.memory_reserved()` with `memory_allocated()`.
# - **Each forward is a collective.** A rank with one more batch than the others waits forever. The same is true for evaluation and for generating text: all ranks must call the model equally often. So is each backward, and there we were wrong: our root sent gradients only if its own rank had some, and a rank that alone had used a layer waited forever.
#
# What to expect, from the paper and not measured by us: FSDP trained a GPT of 175 billion parameters on 128 to 512 A100s at up to 186 TFLOP/s on each, 60% of the peak (Zhao et al., arXiv 2304.11277). On four 24 GB cards over PCIe, and with offload, expect much less. This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 11. Take with you
#
# 1. FSDP is ZeRO's stage 3 in rows. A block costs three messages in a step: two gathers and a reduce-scatter.
# 2. A rank holds 1/R of all states and, for a moment, the root and two whole blocks. So width costs memory, and depth does not.
# 3. 7B on four GPUs of 24 GB has 27 GB of states on each: offload them, or train fewer numbers (LoRA).
#
# **What we left out**
#
# - **FSDP or ZeRO-3?** It is the same idea, with nearly the same bytes. Take FSDP2 for new PyTorch code: you keep your own loop, and DTensors combine
#   with tensor and pipeline parallelism and with `torch.compile`. Take DeepSpeed if memory is very short (NVMe, a fast CPU Adam), if links are slow
#   (ZeRO++), or if your code uses it already.
# - **No sharding**: data parallelism sends less, if the model fits. LoRA trains a few million numbers instead of 7 billion, so its states are small.
#   Try both before you shard.
# - **Optimizers that look at a whole matrix** (Muon, Shampoo) see only rows. They must gather each matrix first, as a DTensor can (`full_tensor()`).
# - **Streams.** FSDP2 runs gathers, reduce-scatters and the copies around them in their own CUDA streams. Ours copies in the stream that computes.
# - **Checkpoints.** The project saves rows by name and position, so you can resume on any number of ranks (more in lab 14).
#   `torch.distributed.checkpoint` does it for DTensors.
#
# Next: [08_tensor_parallel](08_tensor_parallel.ipynb): a layer that is never gathered, because each rank computes its part.
