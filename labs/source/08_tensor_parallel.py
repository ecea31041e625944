# %% [markdown]
# # 08 Tensor parallelism: split the layer
#
# > 120 minutes, 30 more with Further, 15 with its bug · difficulty 4/5 · **spine**: 4.1 to 4.5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL; best with NVLink between them

# %% [markdown]
# ## 1. Story
#
# Llama 3 405B was trained on 16,384 GPUs with 16 million tokens in each batch (arXiv 2407.21783, table 4). A sequence had 8,192 tokens, so a batch was 2,048 sequences: **one for every eight GPUs**.
#
# Data parallelism needs at least one sequence for each GPU. So do ZeRO and FSDP: they split what is *stored*, but each rank still computes whole layers on its own tokens. And there is a second problem. One layer of this model has 3.2 billion parameters, and FSDP would gather all of it, 6.4 GB in bf16, on every GPU.
#
# So Meta spread each copy of the model over 128 GPUs: 16 groups of eight, one group after the other (lab 09). The eight GPUs of a group computed **each layer together**. Each GPU had an eighth of every matrix, and never a whole one. Megatron-LM introduced this in 2019, with a GPT-2 of 8.3 billion parameters on 512 V100s, eight to a layer, at 76% scaling efficiency (arXiv 1909.08053). It takes two one-line functions and two kinds of linear layer, and you write them in this lab.
#
# This lab builds on lab 01 (the GPT) and lab 02 (collectives). Until now the ranks did the same work on different data. Now **all ranks have the same data**, and each does a part of the work.

# %%
import importlib.util
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab.meter import SavedActivations, Timeline, Traffic

begin("08_tensor_parallel")

# %% [markdown]
# ## 2. Picture
#
# A transformer's MLP has two large matrices, and its attention has four. Here is how two ranks split them:

# %%
from ranklab.plots import tensor_parallel as plots

plots.regions()

# %% [markdown]
# The first matrix is cut by **columns**: each rank takes the whole x and computes some of the outputs. The second is cut by **rows**: each rank takes the inputs that it has, and computes one term of a *sum*. Nothing is sent between the two, because GELU looks at each number alone, and attention at each head alone.
#
# The stretch between the two cuts is a **region**: inside it, each rank has only its part. **f** is the function through which x enters the region, and **g** is the one through which y leaves. **tp**, the tensor-parallel size, is the number of ranks that share a layer. The code calls it R.

# %% [markdown]
# ## 3. Smallest working code
#
# Here is the MLP, split in two ways. `naive` cuts both matrices by columns, and gathers after each. `in_one_region` does what the picture shows:

# %% tags=["nbval-check-output"]
torch.manual_seed(0)
x, A, B = torch.randn(6, 4), torch.randn(4, 16), torch.randn(16, 4)  # y = gelu(x A) B


def all_columns(columns):
    parts = [torch.empty_like(columns) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, columns)
    return torch.cat(parts, 1)


def naive(x, A, B, rank, R):
    hidden = all_columns(x @ A.chunk(R, 1)[rank])
    return all_columns(F.gelu(hidden) @ B.chunk(R, 1)[rank])


def in_one_region(x, A, B, rank, R):
    y = F.gelu(x @ A.chunk(R, 1)[rank]) @ B.chunk(R, 0)[rank]
    dist.all_reduce(y)
    return y


# %% tags=["nbval-check-output"]
def counted(mlp):
    with Traffic() as traffic:
        y = mlp(*(t.to(device()) for t in (x, A, B)), dist.get_rank(), dist.get_world_size())
    return y, dict(traffic.calls), traffic.sent_bytes


for mlp in (naive, in_one_region):
    y, calls, sent = launch(counted, mlp, ranks=4)[0]
    right = torch.allclose(y.cpu(), F.gelu(x @ A) @ B, atol=1e-4)
    print(f"{mlp.__name__:14} {calls!s:18} {sent:5,} bytes sent, equal to one process: {right}")

# %% [markdown]
# One collective instead of two, and 2.5 times fewer bytes, because the hidden layer is four times as wide as x and is never gathered. Still missing: backward, attention, the vocabulary, and everything outside the regions.

# %% [markdown]
# ## 4. Build it

# %% [markdown]
# ### 4.1 Into the region: f
# > difficulty 2/5 · importance 5/5 · 6 minutes · about 1 line
#
# *After this you can say why the input of a parallel region needs an all-reduce in backward only.*
#
# x is the same on all ranks, so in forward f does nothing. Backward is different. Each rank used x for *its* columns, so each knows only a part of x's gradient. The whole gradient is the **sum** over ranks.
#
# | given | |
# |---|---|
# | `RegionFunction.apply(x, group, forward, backward)` | returns forward(x, group); in backward, x's gradient is backward(gradient, group) |
# | `identity` | x itself; sends nothing |
# | `all_reduce_sum` | the sum over ranks, in a new tensor |
# | `group` | the ranks that share the layer; None is all ranks |
#
# **Predict.** A transformer layer has two regions, its attention and its MLP. Each f has an all-reduce in backward, and each g has one in forward. How many all-reduces does one layer make in a step, forward and backward together?

# %%
from ranklab.tensor_parallel import RegionFunction, all_reduce_sum, identity

check(tp_all_reduces=...)

# %%
def copy_to_region(x, group=None):
    """Return x unchanged; in backward, sum its gradient over ranks (f).

    Neither x nor a rank's gradient is modified in place.
    Cost: nothing in forward; one all-reduce of x's bytes in backward.
    """
    raise NotImplementedError("exercise 4.1: about 1 line")


# %%
copy_to_region = check(copy_to_region)

# %% [markdown]
# ### 4.2 Out of the region: g
# > difficulty 2/5 · importance 5/5 · 4 minutes · about 1 line
#
# *After this you can say why the output of a parallel region needs an all-reduce in forward only.*
#
# At the end of a region each rank has one term of a sum, and in forward g adds the terms up. Backward needs no message: each term counts once in the sum, so its gradient is the gradient of the sum, and every rank has that already.

# %%
def reduce_from_region(x, group=None):
    """Return the sum of x over ranks; in backward, pass its gradient on unchanged (g).

    x itself is not modified.
    Cost: one all-reduce of x's bytes in forward; nothing in backward.
    """
    raise NotImplementedError("exercise 4.2: about 1 line")


# %%
reduce_from_region = check(reduce_from_region)

# %% [markdown]
# Do they work? We run the MLP of section 3 on four ranks with your f and g, and then with three mistakes. The last mistake is what `torch.distributed.nn.functional.all_reduce` does: it sums in backward as well. The table has the gradients of x and A on rank 0, as multiples of the right ones:

# %%
def gradients(f, g, x, A, B):
    x, A, B = leaves = [t.to(device(), copy=True).requires_grad_() for t in (x, A, B)]
    g(F.gelu(f(x) @ A) @ B).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def ratios(f, g):
    rank, R = dist.get_rank(), dist.get_world_size()
    x_grad, A_grad, _ = gradients(identity, identity, x, A, B)
    grads = gradients(f, g, x, A.chunk(R, 1)[rank], B.chunk(R, 0)[rank])
    reference = x_grad, A_grad.chunk(R, 1)[rank]
    return [((a * b).sum() / b.square().sum()).item() for a, b in zip(grads, reference)]


# %% tags=["nbval-check-output"]
def sums_back_too(y):
    return RegionFunction.apply(y, None, all_reduce_sum, all_reduce_sum)


tries = {"yours": (copy_to_region, reduce_from_region), "without f": (identity, reduce_from_region),
         "without g": (copy_to_region, identity), "sums back, too": (copy_to_region, sums_back_too)}
for name, pair in tries.items():
    x_ratio, A_ratio = launch(ratios, *pair, ranks=4)[0]
    print(f"{name:16} gradient of x {x_ratio:5.2f}   of A {A_ratio:5.2f}")

# %% [markdown]
# Two functions of one line, each the mirror image of the other, and every gradient is right. Without g even the loss is wrong. Without f the loss is right and the gradient of A is right, but all layers *below* learn from a part of their gradient. With a sum in both directions every gradient is four times too large. None of these mistakes raises an error.

# %% [markdown]
# ### 4.3 Column-parallel linear
# > difficulty 2/5 · importance 5/5 · 12 minutes · about 3 lines
#
# *After this you can cut a linear layer by its outputs, so that no message is needed.*
#
# The paper writes y = x A. torch keeps A transposed: the weight of `nn.Linear(in, out)` is (out, in). So a **column of A is a row of `weight`**. The bias has one number for each output, so it is cut in the same place.
#
# `split_parameter(parameter, dim, group, parts)` is given. It returns this rank's equal part along `dim`, as a parameter that knows where it was cut, because clipping and checkpoints will ask. If there is no bias, `None` stays `None`.
#
# What is `parts`? Some models keep several matrices in one. GPT-2 does so with q, k and v, and `parts` lists how many outputs each of them has, such as (4, 4, 4). Then each is cut by itself. Cut as one matrix, rank 0 of two would get all of q and half of k. A gated MLP that fuses its gate and up matrices has the same trap: rank 0 of two would get the gate alone.

# %%
from ranklab.tensor_parallel import split_parameter

# %%
class ColumnParallelLinear(nn.Module):
    """Compute this rank's 1/R of the outputs of `linear`.

    `weight` and `bias` are made by split_parameter. `linear` itself is not modified.
    enter: brings x into the region; called as enter(x, group), once in each forward.
    parts: passed on to split_parameter.
    Shape: (..., in) -> (..., out/tp).
    Cost: what enter sends: for copy_to_region nothing in forward, one all-reduce of x in backward.
    Raises: split_parameter's ValueError if the number of ranks does not divide the outputs.
    """

    def __init__(self, linear, group=None, enter=copy_to_region, parts=None):
        super().__init__()
        self.group, self.enter = group, enter
        raise NotImplementedError("exercise 4.3, first part: about 2 lines")

    def forward(self, x):
        raise NotImplementedError("exercise 4.3, second part: about 1 line")


# %%
ColumnParallelLinear = check(ColumnParallelLinear)

# %% [markdown]
# Here is a fused q, k, v with four outputs each, in your layer on two ranks. Which outputs does each rank get, without `parts` and with?

# %% tags=["nbval-check-output"]
def outputs(parts):
    fused = nn.Linear(1, 12, bias=False).to(device())
    fused.weight.data = torch.arange(12.0, device=device())[:, None]
    y = ColumnParallelLinear(fused, parts=parts)(torch.ones(1, 1, device=device()))
    return [f"{'qkv'[int(number) // 4]}{int(number) % 4}" for number in y.flatten()]


for parts in (None, (4, 4, 4)):
    for rank, names in enumerate(launch(outputs, parts, ranks=2)):
        print(f"parts={parts!s:10} rank {rank}:", *names)

# %% [markdown]
# ### 4.4 Row-parallel linear
# > difficulty 2/5 · importance 5/5 · 8 minutes · about 4 lines
#
# *After this you can cut a linear layer by its inputs, and add the bias once.*
#
# Now the other half: the inputs are cut, and a sum comes out. The trap is the bias. If each rank adds it *before* the sum, y gets it R times.
#
# **Predict.** A transformer layer (attention and MLP) of width 4096 in bf16, 8 sequences of 1,024 tokens, tp=8. In an all-reduce over R ranks, each rank sends 2 (R-1)/R of the tensor. How many MB does each rank send for this layer in a step?

# %%
check(tp_layer_mb=...)

# %%
class RowParallelLinear(nn.Module):
    """Compute `linear` from this rank's 1/R of the inputs, as ColumnParallelLinear outputs them.

    `weight` is made by split_parameter. `bias` is linear's own, not split, and is added once.
    leave: sums the output over ranks and takes it out of the region; called as leave(y, group).
    outside: applied to the bias before it is added, as outside(bias, group): identity here,
        copy_to_region where each rank has its own tokens outside the region (see Further).
    Shape: (..., in/tp) -> (..., out).
    Cost: what leave sends: for reduce_from_region one all-reduce in forward, nothing in backward.
    Raises: split_parameter's ValueError if the number of ranks does not divide the inputs.
    """

    def __init__(self, linear, group=None, leave=reduce_from_region, outside=identity):
        super().__init__()
        self.group, self.leave, self.outside = group, leave, outside
        raise NotImplementedError("exercise 4.4, first part: about 2 lines")

    def forward(self, x):
        raise NotImplementedError("exercise 4.4, second part: about 2 lines")


# %%
RowParallelLinear = check(RowParallelLinear)

# %% [markdown]
# Your two layers make an MLP, with biases, on 64 tokens of width 32. `SavedActivations` counts what autograd keeps for backward:

# %%
def two_layers(width=32):
    torch.manual_seed(0)
    up, down = nn.Linear(width, 4 * width).to(device()), nn.Linear(4 * width, width).to(device())
    return up, down, torch.randn(64, width, device=device(), requires_grad=True)


def mlp_counted():
    up, down, x = two_layers()
    right = down(F.gelu(up(x)))
    split = nn.Sequential(ColumnParallelLinear(up), nn.GELU(), RowParallelLinear(down))
    with SavedActivations(split) as saved, Traffic() as forward:
        y = split(x)
    with Traffic() as backward:
        y.sum().backward()
    numbers = sum(p.numel() for p in split.parameters())
    return numbers, saved.bytes, forward.calls, backward.calls, torch.allclose(y, right, atol=1e-5)


# %% tags=["nbval-check-output"]
print("ranks  numbers held  bytes saved  all-reduces forward  backward  equal to one process")
for R in (1, 2, 4, 8):
    numbers, saved, forward, backward, same = launch(mlp_counted, ranks=R)[0]
    calls = forward["all_reduce"], backward["all_reduce"]
    print(f"{R:5} {numbers:13,} {saved:12,} {calls[0]:20} {calls[1]:9}  {same}")

# %% [markdown]
# The matrices and the hidden layer are divided by R. x, y and the second bias are not.
#
# **While x's gradient travels**, a rank can compute the weight's gradient, because neither needs the other. The library's `OverlappedColumnLinear` has its own backward for this:
#
# ```python
# of_x = gradient @ weight
# handle = dist.all_reduce(of_x, group=ctx.group, async_op=True)
# of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)      # meanwhile
# handle.wait()
# ```
#
# Here is the backward of one wide layer, first with your f, and then overlapped. Look at *when the message begins*, not at how long it takes.

# %%
from ranklab.plots.data_parallel import timeline
from ranklab.tensor_parallel import OverlappedColumnLinear


def profiled(kind, width=768):
    layer = kind(nn.Linear(width, 2 * width).to(device()))
    x = torch.randn(1024, width, device=device(), requires_grad=True)
    layer(x).sum().backward()  # the first step allocates
    y = layer(x).sum()
    dist.barrier()
    with Timeline() as record:
        y.backward()
    return record.events


timeline(launch(profiled, ColumnParallelLinear, ranks=2),
         "With f the message begins when the computing is over")

# %%
timeline(launch(profiled, OverlappedColumnLinear, ranks=2),
         "Overlapped, it begins before the second product")

# %% [markdown]
# ### 4.5 Parallel attention
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 7 lines
#
# *After this you can cut attention by heads, and say what limits the number of ranks.*
#
# A head needs nothing from another head, so each rank takes some of the heads: q, k and v are cut by columns, `out` by rows. The attention module reads the number of its heads off the outputs of q, k and v, so you replace these four submodules and nothing else. There are two traps:
#
# - x should enter **once** for q, k and v together. If each of the three lets x enter, backward has three all-reduces instead of one.
# - With *grouped queries*, several query heads share a key head: Llama 3 405B has 128 query heads and 8 key heads. A rank needs the key heads of **its** query heads. If there are more ranks than key heads, several ranks hold the same key head.
#
# | given | |
# |---|---|
# | `shard_range(n, rank, R)` | which of n things a rank has (lab 00) |
# | `KeyValueHeads(linear, needed, D, group)` | a layer that replaces k or v. `needed` is a list: for each query head of this rank, the number of its key head. The layer holds each of these heads once. If other ranks hold the same head, it adds up their gradients |
# | `enter_before(module, enter, group)` | from now on the module's input goes through `enter`, once |
# | `identity` | the `enter` of a layer whose input is already in the region |
#
# **Predict.** 64 query heads, 8 key heads, tp=16. How many key heads does each rank hold?

# %%
from ranklab.ranks import shard_range
from ranklab.tensor_parallel import KeyValueHeads, enter_before

check(tp_kv_heads=...)

# %%
def parallel_attention(attention, group=None, enter=copy_to_region, leave=reduce_from_region):
    """Make `attention` compute only this rank's heads, in place; return it.

    Its children q, k, v and out are nn.Linear, and its head_size is D. Each rank has H/tp heads of
    q, in rank order, and the heads of k and v that these need: with grouped queries, H/KV heads of
    q share one head of k and v. x enters the region once, for q, k and v together.
    Cost: what enter and leave send; if the ranks do not divide KV, also an all-reduce of k's and
        of v's gradients in backward.
    Raises: ValueError if the ranks do not divide H, or KV does not divide H.
    """
    D, rank, R = attention.head_size, dist.get_rank(group), dist.get_world_size(group)
    H, KV = attention.q.out_features // D, attention.k.out_features // D
    if H % R or H % KV:
        raise ValueError(f"tp={R} and n_kv_head={KV} must divide n_head={H}")
    raise NotImplementedError("exercise 4.5: about 7 lines")


# %%
parallel_attention = check(parallel_attention)

# %% [markdown]
# Which heads does your function give to each rank? Here are eight query heads on four ranks, first with eight key heads, then with two:

# %% tags=["nbval-check-output"]
from ranklab.models import GPT, Attention, GPTConfig


def heads_of(weight, D=8):
    rows = weight.shard_spec.ranges  # split_parameter notes which rows of the whole these are
    return [row // D for start, stop in rows for row in range(start, stop, D)]


def who_has(key_heads):
    attention = Attention(GPTConfig(n_embd=64, n_head=8))
    attention.k, attention.v = (nn.Linear(64, key_heads * 8, bias=False) for _ in "kv")
    parallel_attention(attention)
    return heads_of(attention.q.weight), heads_of(attention.k.weight)


for key_heads in (8, 2):
    for rank, (q, k) in enumerate(launch(who_has, key_heads, ranks=4)):
        print(f"{key_heads} key heads, rank {rank}: query heads {q}, key heads {k}")

# %% [markdown]
# Now a whole transformer layer. The library changes a model **from outside, by name**: a *plan* says how each module is split, and `TPConfig` holds the functions that do it, here yours. In the first plan x enters once. In the second, q, k and v each let it enter:

# %%
from ranklab.tensor_parallel import TPConfig, plan, tensor_parallel

functions = {"copy": copy_to_region, "reduce": reduce_from_region, "column": ColumnParallelLinear,
             "row": RowParallelLinear, "attention": parallel_attention}
mlp = {"blocks.*.mlp.up": plan.column, "blocks.*.mlp.down": plan.row}
once = {"blocks.*.attention": plan.heads, **mlp}
thrice = {"blocks.*.attention.[qkv]": plan.column, "blocks.*.attention.out": plan.row, **mlp}
plans = {"x enters once": once, "three times": thrice}

# %% tags=["nbval-check-output"]
def one_layer(plan):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_embd=64, n_head=8, n_ctx=32)).to(device())
    x = torch.randn(2, 32, 64, device=device(), requires_grad=True)
    block = tensor_parallel(model, plan, TPConfig(**functions)).blocks["0"]
    with Traffic() as forward:
        y = block(x)
    with Traffic() as backward:
        y.sum().backward()
    return forward.calls["all_reduce"], backward.calls["all_reduce"], \
        forward.sent_bytes + backward.sent_bytes


x_bytes = 2 * 32 * 64 * 4
print(f"predicted: 2 + 2 all-reduces, {4 * 2 * 3 * x_bytes // 4:,} bytes sent")
for name, layer_plan in plans.items():
    forward, backward, sent = launch(one_layer, layer_plan, ranks=4)[0]
    print(f"{name:14} {forward} + {backward} all-reduces, {sent:,} bytes sent")

# %% [markdown]
# > **Take away.** A layer has four all-reduces of its activations, two in forward and two in backward, so each rank sends 4 x 2 (R-1)/R x B T C numbers for it: 470 MB for 8 sequences of 1,024 tokens, C = 4,096, bf16 and R = 8. In forward nothing hides them, unless products are cut into pieces (section 10). So tensor ranks share a node.

# %% [markdown]
# > **Spine**: this lab's part ends here. On it goes in [09_pipeline_parallel](09_pipeline_parallel.ipynb); the rest of this lab is extra.

# %% [markdown]
# ### 4.6 Vocab-parallel cross-entropy
# > difficulty 5/5 · importance 5/5 · 25 minutes · about 12 lines · open: no recipe
#
# *After this you can compute a loss over a sharded vocabulary without gathering the logits.*
#
# The model's last matrix, `head`, makes the logits. It is a column layer, so each rank has the logits of *its* part of the vocabulary. If you gathered them, every rank would hold the largest tensor of the model. But the loss of a target needs very little of it: the log of the sum of all exponentials, and the one logit of the target.
#
# This exercise is **scored**. The check prints what your loss costs for each target, in bytes and in collectives, next to Megatron's (three all-reduces of 4 bytes) and to gathering. You pass with at most 16 bytes in at most 3 collectives in forward, and nothing in backward.
#
# **Predict.** 8,192 targets, a vocabulary of 128,256, and Megatron's three all-reduces. How many KB are all-reduced in all? (The logits in bf16 are 2.1 GB.)

# %%
from ranklab.data import IGNORE

check(tp_loss_kb=...)

# %%
def vocab_parallel_cross_entropy(logits, targets, vocab_size, group=None):
    """Compute the loss of each target, in nats, from logits whose columns are split over ranks.

    A rank's columns are shard_range(vocab_size, rank, R). The loss is 0 where a target is IGNORE.
    It is computed in float32, and must be right even for logits of 10,000: exp must never be
    infinite. All ranks get the same losses, and each gets the gradient of its own logits. Logits
    and targets are not modified.
    Shape: logits (n, V/tp), targets (n,) -> (n,).
    Cost: at most 16 bytes a target, in at most 3 collectives; nothing in backward. On 4 ranks an
        all-reduce of 4 bytes a target counts as 4, and an all-gather of 4 bytes from each rank as
        8, because it sends twice as much.
    """
    raise NotImplementedError("exercise 4.6: about 12 lines")


# %%
vocab_parallel_cross_entropy = check(vocab_parallel_cross_entropy)

# %% [markdown]
# How much does your loss send, compared with the shortest code that gathers? Take 64 targets, four ranks, and a growing vocabulary:

# %%
def gathered_loss(logits, targets, vocab_size):
    parts = [logits.new_empty(len(logits), len(shard_range(vocab_size, rank, 4)))
             for rank in range(4)]
    dist.all_gather(parts, logits)
    return F.cross_entropy(torch.cat(parts, 1), targets, reduction="none")


def bytes_a_target(loss, V, n=64):
    torch.manual_seed(0)
    whole, targets = torch.randn(n, V, device=device()), torch.randint(V, (n,), device=device())
    columns = shard_range(V, dist.get_rank(), 4)
    with Traffic() as traffic:
        losses = loss(whole[:, columns.start : columns.stop].contiguous(), targets, V)
    assert torch.allclose(losses, F.cross_entropy(whole, targets, reduction="none"), atol=1e-4)
    return sum(op.payload_bytes for op in traffic.ops) // n


# %% tags=["nbval-check-output"]
sizes, losses = (256, 1024, 4096), (vocab_parallel_cross_entropy, gathered_loss)
counts = launch(lambda: [[bytes_a_target(loss, V) for loss in losses] for V in sizes], ranks=4)[0]
print("   V  yours  gathered   bytes in collectives for each target")
for V, (sent, gathered) in zip(sizes, counts):
    print(f"{V:4} {sent:6} {gathered:9,}")

# %% [markdown]
# ### Further
#
# Three more exercises, all checked, that are not part of the 120 minutes: the embedding, norms on a rank's own tokens, and dropout.

# %% [markdown]
# #### `vocab_parallel_embedding`
# > difficulty 2/5 · importance 4/5 · 8 minutes · about 4 lines
#
# The embedding is often the same matrix as the head, so it is cut in the same way: each rank has some of the rows. A token's row is on one rank, and the other ranks add zeros.

# %%
def vocab_parallel_embedding(tokens, w_shard, vocab_size, group=None, leave=reduce_from_region):
    """Look up tokens in an embedding of which this rank has only the rows `w_shard`.

    These are the rows shard_range(vocab_size, rank, R).
    leave: called as leave(x, group), to sum the result over ranks.
    Shape: tokens (B, T), w_shard (V/tp, C) -> (B, T, C).
    Cost: what leave sends: one all-reduce of the result.
    """
    raise NotImplementedError("exercise vocab_parallel_embedding: about 4 lines")


# %%
vocab_parallel_embedding = check(vocab_parallel_embedding)

# %% [markdown]
# Three ranks look up five tokens: 0, 7, 3, 3, 5. What does each rank contribute to the sum? (Row t of the embedding holds t + 1.)

# %% tags=["nbval-check-output"]
def brought():
    rows = shard_range(8, dist.get_rank(), 3)
    w_shard = torch.arange(1.0, 9.0, device=device())[rows.start : rows.stop, None]
    tokens = torch.tensor([[0, 7, 3, 3, 5]], device=device())
    return rows, [vocab_parallel_embedding(tokens, w_shard, 8, leave=leave).flatten().int().tolist()
                  for leave in (identity, reduce_from_region)]


for rank, (rows, (part, total)) in enumerate(launch(brought, ranks=3)):
    print(f"rank {rank}, rows {rows.start} to {rows.stop - 1}: brings {part}, has {total}")

# %% [markdown]
# #### `sequence_parallel_norm`
# > difficulty 3/5 · importance 4/5 · 8 minutes · about 2 lines
#
# Outside the regions all ranks still do the same work: norms, dropout, residuals. With *sequence parallelism* (arXiv 2205.05198) each rank does it for **its own tokens** only. Then f is an all-gather of the tokens in forward, and a reduce-scatter in backward. g is the reverse. A ring's all-reduce is made of these two, so the bytes are the same.

# %%
plots.outside()

# %% [markdown]
# The trap is the norm's weight. It is on all ranks, but each rank sees only the gradient from its own tokens. Without a sum the copies drift apart, slowly and without an error. You have already written a function that sums gradients. `functional_call(norm, {name: tensor}, x)` runs the norm on x with these tensors as its parameters.

# %%
def sequence_parallel_norm(norm, x, group=None):
    """Return norm(x) of this rank's tokens; in backward, sum the norm's gradients over ranks.

    These are the gradients of its parameters. `norm` is not modified: no hook, no new parameter.
    Shape: (B, T/tp, C) -> (B, T/tp, C).
    Cost: one all-reduce for each parameter of the norm, in backward.
    """
    raise NotImplementedError("exercise sequence_parallel_norm: about 2 lines")


# %%
sequence_parallel_norm = check(sequence_parallel_norm)

# %% [markdown]
# Four ranks with different tokens train a norm for twenty steps of SGD, first without the sum, then with yours. How far apart are their weights at the end?

# %% tags=["nbval-check-output"]
def trained_norm(call):
    torch.manual_seed(dist.get_rank())  # each rank's tokens
    norm = nn.LayerNorm(8, bias=False).to(device())
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.01)
    for _ in range(20):
        x = torch.randn(2, 4, 8).to(device())
        call(norm, x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return norm.weight.detach()


for name, call in {"norm(x)": lambda norm, x: norm(x), "yours": sequence_parallel_norm}.items():
    weights = torch.stack(launch(trained_norm, call, ranks=4)).cpu()
    print(f"{name:8} largest distance {(weights - weights[0]).abs().max():.3f}")

# %% [markdown]
# Now the whole GPT with sequence parallelism, on your functions. It sends the same bytes (apart from the norms' gradients), and keeps less for backward:

# %%
functions |= {"cross_entropy": vocab_parallel_cross_entropy, "embed": vocab_parallel_embedding,
              "norm": sequence_parallel_norm}
tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(1))


def gpt_step(split=None, sequence_parallel=False):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=64, n_head=4, n_ctx=32)).to(device())
    if split is not None:
        split(model, TPConfig(**functions, sequence_parallel=sequence_parallel))
    batch = tokens.to(device())
    with SavedActivations(model) as saved, Traffic() as traffic:
        loss = model(batch[:, :-1], batch[:, 1:])
    with traffic:
        loss.backward()
    return loss.item(), saved.bytes, traffic


# %%
from ranklab.tensor_parallel import parallel_gpt

loss, saved, _ = launch(gpt_step, ranks=1)[0]
print(f"one process             loss {loss:.4f}  {saved:9,} bytes kept")
for sequence in (False, True):
    loss, saved, traffic = launch(gpt_step, parallel_gpt, sequence, ranks=4)[0]
    print(f"sequence_parallel={sequence!s:5} loss {loss:.4f}  {saved:9,} bytes kept",
          f"{traffic.sent_bytes:9,} sent\n       ", dict(traffic.calls))

# %% [markdown]
# #### `dropout_seeds`
# > difficulty 3/5 · importance 3/5 · 6 minutes · about 2 lines
#
# All ranks of a tensor group hold the same x, so they must drop the same numbers, or x is no longer the same. What only one rank has, such as its heads, needs a mask of its own. So each rank needs two seeds. And with data parallelism, each copy of the model has different rows and needs different seeds.

# %%
from ranklab.tensor_parallel import SPREAD

# %%
def dropout_seeds(seed, data_rank, tensor_rank, tensor_ranks):
    """Return (shared, own): the seed for tensors that all tensor ranks hold, and one for the rest.

    shared is the same on all tensor_ranks of one data_rank, and differs between data_ranks, because
    their rows differ. own differs on every rank. All seeds of a run differ from one another, and
    from those of a run whose `seed` is the next number: the first seeds of the two runs are SPREAD
    apart.
    Cost: nothing is sent.
    """
    raise NotImplementedError("exercise dropout_seeds: about 2 lines")


# %%
dropout_seeds = check(dropout_seeds)

# %% [markdown]
# Two data groups with two tensor ranks each. What do they drop (the dots) of 24 numbers?

# %% tags=["nbval-check-output"]
def mask(seed):
    bits = torch.rand(24, generator=torch.Generator().manual_seed(seed)) > 0.4
    return "".join("x" if keep else "." for keep in bits)


for data_rank in range(2):
    for tensor_rank in range(2):
        shared, own = dropout_seeds(0, data_rank, tensor_rank, 2)
        print(f"data {data_rank}, tensor {tensor_rank}: shared {mask(shared)}   own {mask(own)}")

# %% [markdown]
# #### Derive: how many tensor ranks?
# > difficulty 3/5 · importance 5/5 · 8 minutes
#
# The answer is a formula. A layer of width `width` has 12 `width`^2 parameters, cut over R tensor ranks. For each token it takes 2 FLOPs a parameter in forward, at `flops` FLOP/s. Its two all-reduces sum x, `width` numbers of 2 bytes for each token, by rings of many ranks, which send everything twice at `bandwidth` bytes/s. Nothing hides them. **On how many ranks do the sums of forward take as long as its products?** (`lambda width, flops, bandwidth: ...`)

# %%
check(largest_tensor_parallel=...)

# %%
from ranklab.tensor_parallel import largest_tensor_parallel

for link, bytes_per_second in (("NVLink, a ring", 370e9), ("a card of 400 Gbit/s", 50e9)):
    limit = largest_tensor_parallel(8192, 400e12, bytes_per_second)
    print(f"width 8,192, 400 TFLOP/s, {link}: {limit:.1f} ranks; "
          f"on 8 the sums take {8 / limit:.2f} times as long as the products")

# %% [markdown]
# <details><summary>The derivation</summary>
#
# Products: `2 * 12 * width**2 * T / R / flops`. Sums: `2 * 2 * 2 * T * width / bandwidth`. They are equal at `R = 3 * width * bandwidth / flops`. T has cancelled out.
# </details>
#
# > **Take away.** `3 * 8192 * 370e9 / 400e12` = 23 ranks over NVLink, 3 over a card. So tensor ranks stay in a node, and a wider model can have more of them.

# %% [markdown]
# ## 5. The real thing
#
# torch's `parallelize_module` takes a plan of names as well, and turns each parameter into a `DTensor` (lab 07). Here are the two plans, side by side:
#
# | module | our plan | DTensor's plan |
# |---|---|---|
# | `token` | `vocabulary` | `RowwiseParallel(input_layouts=Replicate())` |
# | `blocks.*.attention` | `heads` | `PrepareModuleInput`, so that x enters once; `ColwiseParallel` for q, k, v; `RowwiseParallel` for out |
# | `blocks.*.mlp.up`, `.down` | `column`, `row` | `ColwiseParallel`, `RowwiseParallel` |
# | `blocks.*.norm?`, `norm` | `norm` | `SequenceParallel`, or nothing |
# | `head` | `logits` | `ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)` |
# | the loss | `vocab_parallel_loss` | `with loss_parallel():`, for backward as well |
#
# Both split the same GPT, with the same weights, tokens and AdamW. We train five steps on four ranks, and one meter counts both:

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from ranklab.peers import dtensor

# %%
def by_dtensor(model, config):
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    return dtensor.parallelize_gpt(model, mesh, sequence_parallel=config.sequence_parallel)


def train(split, sequence_parallel):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=64, n_head=4, n_ctx=32)).to(device())
    model = split(model, TPConfig(**functions, sequence_parallel=sequence_parallel))
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.01), []
    batch, targets = (part.to(device()) for part in (tokens[:, :-1], tokens[:, 1:]))
    for _ in range(5):
        with Traffic() as traffic:
            loss = model(batch, targets, "sum") / targets.numel()
            with loss_parallel():  # DTensor's; yours needs none
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    return " ".join(losses), traffic.sent_bytes, dict(traffic.calls)


# %%
ways = {"yours": parallel_gpt, "DTensor": by_dtensor}
results = launch(lambda: {(sequence, name): train(split, sequence) for sequence in (False, True)
                          for name, split in ways.items()}, ranks=4)[0]
for (sequence, name), (losses, sent, calls) in results.items():
    print(f"{name:8} sequence_parallel={sequence!s:5} {losses}  {sent:,} bytes\n        ", calls)

# %% [markdown]
# The losses are the same, and the counts nearly so. DTensor's loss has three messages, while the library's has two, with the same bytes. With sequence parallelism, DTensor's norms get their sum late, when AdamW reads the gradients. The meter has stopped by then, so it misses 15 small all-reduces, three for each norm.
#
# Next comes the Llama of transformers, with grouped queries and a gated MLP. Its modules have other names, so it needs another plan. The functions are still yours.

# %% tags=["nbval-check-output"]
from ranklab.peers.llama import parallel_llama


def llama_losses(batch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=1)
    for split in (lambda model, config: None, parallel_llama):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(device())
        split(model, TPConfig(**functions))
        loss = model(input_ids=batch.to(device()), labels=batch.to(device())).loss
        loss.backward()
        norm = model.model.norm.weight.grad.norm()  # all ranks hold this gradient
        yield f"loss {loss.item():.4f}, gradient of the last norm {norm.item():.4f}"


if importlib.util.find_spec("transformers"):
    heavy = ["transformers.modeling_utils"]  # imported once, and not on each rank
    texts = launch(lambda: [*llama_losses(tokens % 250)], ranks=2, preload=heavy)[0]
    for ranks, text in enumerate(texts, start=1):
        print(f"Llama, ranks to a layer: {ranks}, {text}")

# %% [markdown]
# Last, Megatron-core's own two linear layers, on one MLP. Megatron-core is an extra: `python -m pip install -c constraints.txt -e '.[megatron]'`, 17 MB.

# %%
def mlp_of(split):
    torch.manual_seed(0)
    up, down, x = nn.Linear(64, 256), nn.Linear(256, 64), torch.randn(8, 64)
    up, down = split(up.to(device()), down.to(device()))
    x = x.to(device()).requires_grad_()
    with Traffic() as traffic:
        y = down(up(x).relu())
        y.square().sum().backward()
    return f"y {y.norm().item():.5f}, x's gradient {x.grad.norm().item():.5f},", dict(traffic.calls)


if importlib.util.find_spec("megatron"):
    from ranklab.peers.megatron import parallel_linears

    layers = {"yours": lambda up, down: (ColumnParallelLinear(up), RowParallelLinear(down)),
              "Megatron-core": parallel_linears}
    for name, split in layers.items():
        print(f"{name:14}", *launch(mlp_of, split, ranks=4)[0])
else:
    print("Megatron-core is not installed.")

# %% [markdown]
# ## 6. Project
#
# **GPT-2, split by hand and split by tensors.** When a GPT is too large for one GPU, most people first put some of its layers on the next one. It works, but one GPU computes while the others wait. This is `naive` in the table. In the other rows all ranks work in every layer, on your functions. Each model trains on the source of Python's library, and all must end with the same held-out loss.

# %%
from ranklab.projects import tensor_parallel as project

settings = {"ranks": 4, "steps": 10}
print(project.report(project.run(method="all", **functions, **settings)))

# %% [markdown]
# Compare held, sent and loss. tokens/s says nothing here, because the ranks share cores. Messages are counted as a ring sends them: 2 for an all-reduce. The formulas leave out a few small things: Adam's counters, a scalar, one more message of DTensor's loss.

# %% [markdown]
# **Your turn.** Change one thing below. First write down which numbers change, and by what factor. Ideas: `ranks=2`; `sequence_parallel=True`; `overlap=True`; `method="dtensor"`. With two ranks, what will each hold and send, and does the loss change?

# %%
change = {"ranks": 2}
print(project.report(project.run(**(functions | {"method": "tensor"} | settings | change))))

# %% [markdown]
# With two ranks, each holds twice as much. It sends two thirds of the bytes, because 2 (R-1)/R is 1 instead of 1.5, and a third of the messages, because the ring has two steps instead of six. The loss is the same.

# %% [markdown]
# ## 7. Measure
#
# What does a rank hold and send in a step of the small GPT? We predict four all-reduces of x in each layer, one for the embedding, one for the head's gradient, and 12 bytes a target for Megatron's loss. If your loss sends less, the two columns differ by that:

# %% tags=["nbval-check-output"]
B, T, C, L, n = 4, 32, 64, 2, 128
numbers = 12 * C * C * L + 256 * C  # all matrices; the norms are on all ranks
print("ranks   numbers held: predicted  counted   bytes sent: predicted  counted")


def held_and_sent():
    model = GPT(GPTConfig(n_embd=C, n_head=4, n_ctx=T)).to(device())
    model = parallel_gpt(model, TPConfig(**functions))
    return sum(p.numel() for p in model.parameters()), gpt_step(parallel_gpt)[2].sent_bytes


for R in (1, 2, 4):
    share = 2 * (R - 1) / R
    predicted = numbers // R + (2 * L + 1) * C, share * ((4 * L + 2) * B * T * C * 4 + 12 * n)
    count, sent = launch(held_and_sent, ranks=R)[0]
    print(f"{R:5} {predicted[0]:25,} {count:8,} {predicted[1]:23,.0f} {sent:8,}")

# %% [markdown]
# ### How far does tp go?
#
# With more ranks, each computes less but sends nearly the same bytes. Take the layer of 4.4. Its matrix products take 20 ms on one H100 at half its peak, and 2.5 ms on eight. Its messages add 1.04 ms: 469.8 MB over NVLink's 450 GB/s. What happens with sixteen ranks, on two nodes?
#
# A ring enters and leaves a node **once** (nccl issue 687). NCCL runs a ring through each network card of the node, and the cards' bytes/s add up (nccl issue 412).
#
# **Predict.** tp=16 on two whole nodes, each with eight cards of 50 GB/s. Each rank sends 2 * 15/16 of x, four times: 503.3 MB. How many ms do these bytes take?

# %%
check(tp_fit_ms=...)

# %% [markdown]
# So eight cards are nearly as fast as NVLink. Now take a model with 32 of these layers and a vocabulary of 128,256, and compute its step with lab 02's alpha + n beta. The step is the computing divided by tp, plus all messages, with nothing hidden. "1 a node" is a machine with one GPU and one card.

# %%
from ranklab.projects.tensor_parallel import links

shape = GPTConfig(vocab_size=128_256, n_ctx=1024, n_layer=32, n_head=32, n_embd=4096)
ranks = (1, 2, 4, 8, 16, 32)
seconds = links.curves(shape, 8, ranks=ranks)
plots.curves(ranks, seconds)

# %% [markdown]
# Look past 8 ranks, the size of a node: with eight cards a node little changes, and with one card a step takes longer than on 8 ranks.

# %% tags=["nbval-check-output"]
print("ms for a step     ", *(f"{f'tp={R}':>6}" for R in ranks))
for name, times in seconds.items():
    print(f"{name:18}", *(f"{1e3 * time:6.0f}" for time in times))

# %% [markdown]
# With one card for eight GPUs, tp=16 is slower than tp=2. This lab once gave every node that one card, and taught that more than eight ranks gain nothing. With eight cards, sixteen ranks need 107 ms and eight need 133. That is a fifth less for twice the GPUs, while two groups of eight do *two* batches in 133 ms. And 32 ranks gain nothing over 16, even if NVLink joined all of them. Most of their step is messages: 38 ms of bytes and 41 ms of **latency**, because each of the 133 all-reduces has 2 steps.
#
# That is a model of H100s, and of rings. There are racks in which NVLink joins 72 GPUs (GB200 NVL72), at 900 GB/s each. And inside an NVLink domain NCCL can let the switches add up the numbers (NVLink SHARP, or NVLS). Its own cost model gives such an all-reduce one latency of 25 us, whatever R is (`src/graph/tuning.cc`). Here is the step on GB200s, also at half their peak:

# %% tags=["nbval-check-output"]
for name, times in links.curves(shape, 8, links.RACK, ranks, links.GB200.peak_flops / 2).items():
    print(f"{name:18}", *(f"{1e3 * time:6.0f}" for time in times))

# %% [markdown]
# With a ring, 32 ranks are slower than 16, because faster GPUs and links do not shorten the steps. With the switch they need 31 ms instead of 39: again a fifth less for twice the GPUs. The latency is gone, but the bytes stay. And the model promises them the full 900 GB/s. On all 72 GPUs of such a rack, a bus bandwidth of 835 GB/s was measured with messages of 4 GB, and 586 with 512 MB (coreweave/nccl-tests, pull request 43). An all-reduce of this model has 67 MB.
#
# On nodes of eight, the model is kind to sixteen ranks. It leaves out:
#
# - **Sums in the switch.** Eight H100s in a node also have NVLS. A bus bandwidth of about 480 GB/s is usual with it, and 370 with a ring (nccl-tests issue 212). On 248 nodes of eight GPUs it was about 350, at times below 300 (nccl-tests issue 283).
# - **Narrow products.** With tp=16 each of q, k and v has 256 outputs on a rank. Such a product does 1 / (1/256 + 1/4096 + 1/8192) = 234 FLOPs a byte, but an H100 needs 295 to be busy (lab 01). With tp=8 it does 431.
# - **Other traffic.** The gradients of the data-parallel copies use the same cards.
# - **Heads.** tp must divide their number.
#
# Data parallelism can hide its messages behind backward, but here the sum in forward has nothing to hide behind, unless you cut a product into pieces (section 10). So tp usually stops at eight, where NVLink stops on most machines.

# %% [markdown]
# ## 8. Bug of the lab
#
# A bug of the lab is a program that breaks the idea of its lab and still runs. A colleague says what was seen, but not why. Look, write down why before you open the list of causes, and fix the program in its own cell: then it has the numbers of one process, also on other numbers of ranks and in a group of some of them ([16_clinic](16_clinic.ipynb) has bugs that belong to no single lab, and tools that find them).

# %%
import os

from ranklab.data import batch_at, text_file
from ranklab.tensor_parallel import own_random

# %% [markdown]
# ### 8.1 Two ranks, one batch, two losses
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 4 lines
#
# > Since we cut the wide layer in two, the two ranks of a pair print different losses from the first step on, although they read the same rows. At the start the weights that both of them hold are equal. At the end rank 0's head differs from rank 1's. Our checkpoint keeps rank 0's.

# %%
def wide_layer(steps=12, lr=0.5, p=0.25, tensor=2, seed=0, group=None):
    """Train a small language model whose wide layer is split over `tensor` ranks.

    Each set of `tensor` ranks has its own rows of the batch.

    Returns {"losses": [of this rank's rows], "weights": {name: this rank's tensor}}.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    row, column = divmod(rank, tensor)
    inside = dist.new_group(ranks[row * tensor:][:tensor], use_local_synchronization=True)
    across = dist.new_group(ranks[column::tensor], use_local_synchronization=True)
    torch.manual_seed(seed)
    model = nn.ModuleDict({
        "embed": nn.Embedding(256, 16), "up": nn.Linear(128, 96, bias=False),
        "down": nn.Linear(96, 32, bias=False), "head": nn.Linear(32, 256)}).to(device())
    for name, dim in (("up", 0), ("down", 1)):
        part = model[name].weight.detach().chunk(tensor, dim)[column].clone()
        model[name].weight = nn.Parameter(part)
    torch.manual_seed(seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    tokens, losses = text_file(os.__file__).train, []
    for step in range(steps):
        inputs, targets = (each.chunk(len(ranks) // tensor)[row].to(device())
                           for each in batch_at(tokens, step, 24, 8, seed))
        x = copy_to_region(model["embed"](inputs).flatten(1), inside)
        h = F.dropout(F.relu(model["up"](x)), p)
        y = F.dropout(reduce_from_region(model["down"](h), inside), p)
        loss = F.cross_entropy(model["head"](y), targets[:, -1])
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=across)
            weight.grad /= len(ranks) // tensor
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": {n: w.detach() for n, w in model.named_parameters()}}


# %% [markdown]
# **Look.** The four ranks are two pairs. A pair begins a step with equal tensors and ends it with two losses. Which tensor is the last one that is still equal on both ranks? Print in the program, or return more from it. Sometimes a setting shows more than a print does: try `p` and `steps`.

# %%
for rank, result in enumerate(launch(wide_layer, ranks=4)):
    print(f"rank {rank}: the first losses", *(f"{loss:.4f}" for loss in result["losses"][:3]))

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Gradients are averaged over the wrong ranks.
# 2. Ranks that hold the same numbers drop different ones.
# 3. The two halves of the wide layer are never added up.
# 4. The two ranks of a pair read different rows.
#
# </details>

# %%
check(clinic_wide_layer_cause=...)

# %% [markdown]
# **Fixed.** It is not enough that the two ranks of a pair agree. The check reads what `F.dropout` drops on every rank, so keep both calls, as `F.dropout` or `nn.Dropout`, and it compares your program with one process that drops the same. It also tries `tensor=1` and `tensor=3`.

# %%
wide_layer = check(wide_layer)

# %% [markdown]
# ## 9. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 08` in a terminal asks these and more, with other numbers each time.

# %%
questions("08_tensor_parallel")

# %% [markdown]
# ## 10. On real GPUs
#
# ```bash
# torchrun --nproc-per-node 4 -m ranklab.projects.tensor_parallel --size gpt2 --method tensor --sequence-parallel
# sbatch labs/jobs/tensor_parallel.sbatch
# ```
#
# GPT-2 has 12 heads, so it runs on 4 ranks, but not on 8.
#
# What Megatron does beyond this lab:
#
# - **Fused kernels**: bias and GELU in one kernel, softmax with its mask, cross entropy in one pass over the logits.
# - **Messages inside a product** (*user buffers*; in torch *async tensor parallelism*): a matrix product is cut into pieces, and while one piece is computed, another one travels. So messages can hide in forward as well.
# - **Gathering again**: with sequence parallelism our library keeps what it has gathered. Megatron keeps only a rank's own tokens, and gathers once more in backward (arXiv 2205.05198, section 4.2.2). That makes five halves of an all-reduce for each region instead of four, so 25% more bytes.
# - **Sums in the switch** make the all-reduce faster, but not its two halves (nccl issue 1506: 470 GB/s against 350 by a ring). So on such machines sequence parallelism costs some time. It is usual all the same, because it saves memory.
# - `CUDA_DEVICE_MAX_CONNECTIONS=1` in its scripts: kernels start in the order of their calls, so a message begins before the product that is meant to hide it.
# - **Padded vocabularies**: a multiple of 128 times tp. We split the vocabulary unevenly instead.
#
# What to expect (published, not measured by us): 8.3 billion parameters on eight V100s, 77% of linear weak scaling (arXiv 1909.08053); Llama 3 405B with tp=8 inside each node, 16 pipeline stages and 128 replicas, 41% MFU (arXiv 2407.21783). This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 11. Take with you
#
# 1. Columns, then rows: one region with `f` before it and `g` after it. Four all-reduces of x in each layer, and all that follows waits for them.
# 2. Never gather logits: the loss needs three numbers for each target, not a vocabulary of 128,000.
# 3. Sequence parallelism sends the same bytes and keeps 1/tp of the activations outside the regions. What all ranks hold must stay equal on all.
#
# **What we left out**
#
# - **Two and more dimensions** (2D, 2.5D, 3D tensor parallelism): the matrices are cut both ways. It is rarely used.
# - **Long sequences.** The attention scores of a head stay on one rank. Lab 10 cuts the sequence inside attention as well.
# - **Experts** (lab 11): a rank gets whole small layers, not a part of each layer.
# - **Inference.** Serving uses the same two layers, forward only, to answer sooner. Its messages are tiny, so latency is what counts.
#
# Next: [09_pipeline_parallel](09_pipeline_parallel.ipynb): whole layers on each rank, as in the naive split, but with all ranks at work.
#
# On the spine it is [09_pipeline_parallel](09_pipeline_parallel.ipynb).
