# %% [markdown]
# # 08 Tensor parallelism: split the layer
#
# > 120 minutes · difficulty 4/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL; best with NVLink between them

# %% [markdown]
# ## 1. Story
#
# Llama 3 405B learnt on 16,384 GPUs, with 16 million tokens in each batch (arXiv 2407.21783, table 4). A sequence had 8,192 tokens, so a batch was 2,048 sequences: **one for every eight GPUs**.
#
# Data parallelism needs a sequence for each GPU. So do ZeRO and FSDP, because they share out what is *stored*: each rank still computes whole layers on tokens of its own. And one layer of this model has 3.2 billion parameters, 6.4 GB in bf16 that FSDP would gather on each GPU.
#
# So one copy of the model was 128 GPUs: 16 groups of eight in a row (lab 09). The eight of a group worked on **one layer together**. Each had an eighth of every matrix, and none ever had a whole one. Megatron-LM did this in 2019: a GPT-2 of 8.3 billion parameters on 512 V100s, eight to a layer, with 76% scaling efficiency (arXiv 1909.08053). It takes two functions of one line, and two kinds of linear layer. You write them today.
#
# This lab builds on lab 01 (the GPT) and lab 02 (collectives). Until now ranks had different data and the same work. Now **all ranks have the same data**, and each does a part of the work.

# %%
import importlib.util
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from ranklab import answer, check, device, hint, launch, questions
from ranklab.meter import SavedActivations, Timeline, Traffic

# %% [markdown]
# ## 2. Picture
#
# Two matrices of a transformer's MLP, and the four of its attention, on two ranks:

# %%
from ranklab.plots import tensor_parallel as plots

plots.regions()

# %% [markdown]
# The first matrix is cut by **columns**: each rank computes some of the outputs, from the whole x. The second is cut by **rows**: each rank takes the inputs that it has, and computes a part of a *sum*. Between them nothing is sent, because a GELU, or attention within a head, needs each number or head alone.
#
# So there is a **region** in which each rank has its part. **tp**, the tensor-parallel size, is the number of ranks that share a layer; in code it is R.
#
# **f** stands where x enters it, and **g** where y leaves it.

# %% [markdown]
# ## 3. Smallest working code
#
# The same MLP, split twice. Naive: cut each matrix by columns, and gather after each. Then as in the picture:

# %% tags=["nbval-check-output"]
torch.manual_seed(0)
x, A, B = torch.randn(6, 4), torch.randn(4, 16), torch.randn(16, 4)  # y = gelu(x A) B


def all_columns(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
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
# One message instead of two, and 2.5 times fewer bytes: the hidden layer is four times as wide as x, and it is never gathered. What is left: backward, attention, the vocabulary, and all that is outside of the regions.

# %% [markdown]
# ## 4. Build it

# %% [markdown]
# ### 4.1 Into the region: f
# > difficulty 2/5 · importance 5/5 · 6 minutes · about 1 line
#
# x is the same on all ranks, so forward f does nothing. Backward is another matter: each rank has used x for *its* columns, so each knows a part of x's gradient. The gradient is the **sum** over ranks.
#
# | given | |
# |---|---|
# | `RegionFunction.apply(x, group, forward, backward)` | forward(x, group); and in backward x's gradient becomes backward(gradient, group) |
# | `identity` | x itself; sends nothing |
# | `all_reduce_sum` | all-reduces, into a new tensor |
# | `group` | the ranks that share the layer; None is all ranks |
#
# **Predict.** A transformer's layer has two regions, its attention and its MLP. f has an all-reduce backward, and g one forward. How many all-reduces has one layer in a step, forward and backward?

# %%
from ranklab.tensor_parallel.regions import RegionFunction, identity, all_reduce_sum

check(tp_all_reduces=...)

# %%
def copy_to_region(x, group=None):
    """x as it is; its gradient is the sum over ranks (f).

    x and the gradients that ranks bring stay as they are.
    cost   nothing forward; backward one all-reduce of x's bytes
    """
    raise NotImplementedError("exercise 4.1: about 1 line")


# %%
copy_to_region = check(copy_to_region)

# %% [markdown]
# ### 4.2 Out of the region: g
# > difficulty 2/5 · importance 5/5 · 4 minutes · about 1 line
#
# Each rank has a part of a sum. Forward g adds the parts up. Each part counts once in the sum, so its gradient is that of the sum.

# %%
def reduce_from_region(x, group=None):
    """The sum over ranks of x; its gradient goes to each rank as it is (g).

    x itself is unchanged.
    cost   forward one all-reduce of x's bytes; nothing backward
    """
    raise NotImplementedError("exercise 4.2: about 1 line")


# %%
reduce_from_region = check(reduce_from_region)

# %% [markdown]
# The MLP of section 3 with your f and g, and with three mistakes. The last one is what `torch.distributed.nn.functional.all_reduce` does, whose backward sums as well. The gradients of x and of A on rank 0, on four ranks, as multiples of the right ones:

# %%
def gradients(f, g, x, A, B):
    x, A, B = leaves = [t.to(device(), copy=True).requires_grad_() for t in (x, A, B)]
    g(F.gelu(f(x) @ A) @ B).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def ratios(f, g):
    rank, R = dist.get_rank(), dist.get_world_size()
    of_x, of_A, _ = gradients(identity, identity, x, A, B)
    mine = gradients(f, g, x, A.chunk(R, 1)[rank], B.chunk(R, 0)[rank])
    right = of_x, of_A.chunk(R, 1)[rank]
    return [((m * r).sum() / r.square().sum()).item() for m, r in zip(mine, right)]


# %% tags=["nbval-check-output"]
def sums_back_too(y):
    return RegionFunction.apply(y, None, all_reduce_sum, all_reduce_sum)


tries = {"yours": (copy_to_region, reduce_from_region), "without f": (identity, reduce_from_region),
         "without g": (copy_to_region, identity), "sums back, too": (copy_to_region, sums_back_too)}
for name, pair in tries.items():
    of_x, of_A = launch(ratios, *pair, ranks=4)[0]
    print(f"{name:16} gradient of x {of_x:5.2f}   of A {of_A:5.2f}")

# %% [markdown]
# Without g the loss itself is wrong. Without f the loss is right, the gradient of A is right, and all layers *below* learn from a part. With two sums every gradient is four times too large. No rank sees an error.

# %% [markdown]
# ### 4.3 Columns
# > difficulty 2/5 · importance 5/5 · 12 minutes · about 3 lines
#
# The paper writes y = x A. torch keeps A transposed: the weight of `nn.Linear(in, out)` is (out, in). So a **column of A is a row of `weight`**, and the bias is cut with it.
#
# `split_parameter(parameter, dim, group, parts)` is given: this rank's even part along `dim`, a parameter that knows where it was cut (`None` stays `None`). Clipping and checkpoints need to know that.
#
# `parts`, such as (4, 4, 4), are the outputs of several matrices in one: GPT-2 keeps q, k and v so. Cut as one, rank 0 of two would hold q and half of k. The same trap waits where a gated MLP keeps its gate and its up in one matrix: cut as one, rank 0 of two has the gate alone.

# %%
from ranklab.tensor_parallel.split import split_parameter

# %%
class ColumnParallelLinear(nn.Module):
    """`linear`, of whose outputs this rank computes 1/R.

    It has `weight` and `bias`, made by split_parameter. `linear` stays as it is.
    enter  how x gets into the region: called as enter(x, group), once each forward
    parts  handed on to split_parameter
    shape  (..., in) -> (..., out/tp)
    cost   that of enter: copy_to_region sends nothing forward, one all-reduce of x backward
    error  ValueError where the ranks do not divide the outputs: split_parameter's
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
# A fused q, k, v, four outputs of each, on two ranks in your layer. In the table each output has its name:

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
# ### 4.4 Rows
# > difficulty 2/5 · importance 5/5 · 8 minutes · about 4 lines
#
# The other half: inputs are cut, and a sum leaves. The trap is the bias. Each rank that adds it *before* the sum adds it once more.
#
# **Predict.** A transformer's layer (attention and MLP) of width 4096 in bf16, 8 sequences of 1,024 tokens, tp=8. An all-reduce over R ranks sends 2 (R-1)/R of the tensor from each rank. How many MB does each rank send for this layer in a step?

# %%
check(tp_layer_mb=...)

# %%
class RowParallelLinear(nn.Module):
    """`linear`, of whose inputs this rank has 1/R: what ColumnParallelLinear put out.

    It has `weight`, made by split_parameter, and the `bias` of linear itself, whole and added once.
    leave    how the sum over ranks gets out of the region: called as leave(y, group)
    outside  what the bias goes through before it is added, outside(bias, group): identity here,
             copy_to_region where each rank has its own tokens outside (see Further)
    shape    (..., in/tp) -> (..., out)
    cost     that of leave: reduce_from_region sends one all-reduce forward, nothing backward
    error    ValueError where the ranks do not divide the inputs: split_parameter's
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
# An MLP with biases in your two layers, 64 tokens of width 32. `SavedActivations` counts what autograd keeps for backward:

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
    held = sum(p.numel() for p in split.parameters())
    return held, saved.bytes, forward.calls, backward.calls, torch.allclose(y, right, atol=1e-5)


# %% tags=["nbval-check-output"]
print("ranks  numbers held  bytes saved  all-reduces forward  backward  equal to one process")
for R in (1, 2, 4, 8):
    held, saved, forward, backward, same = launch(mlp_counted, ranks=R)[0]
    calls = forward["all_reduce"], backward["all_reduce"]
    print(f"{R:5} {held:13,} {saved:12,} {calls[0]:20} {calls[1]:9}  {same}")

# %% [markdown]
# Matrices and hidden numbers are divided; x, y and the second bias are not.
#
# **While x's gradient travels**, the weight's gradient can be computed: they do not need each other. `OverlappedColumnLinear` of the library does it, in a backward of its own:
#
# ```python
# of_x = gradient @ weight
# handle = dist.all_reduce(of_x, group=ctx.group, async_op=True)
# of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)      # meanwhile
# handle.wait()
# ```
#
# The backward of one wide layer, with your f and then overlapped. Look at *when the message begins*, not at how long it takes.

# %%
from ranklab.plots.data_parallel import timeline
from ranklab.tensor_parallel.linear import OverlappedColumnLinear


def profiled(kind, width=768):
    layer = kind(nn.Linear(width, 2 * width).to(device()))
    x = torch.randn(1024, width, device=device(), requires_grad=True)
    layer(x).sum().backward()  # the first step allocates
    y = layer(x).sum()
    dist.barrier()
    with Timeline() as seen:
        y.backward()
    return seen.events


timeline(launch(profiled, ColumnParallelLinear, ranks=2), "Backward with f")

# %%
timeline(launch(profiled, OverlappedColumnLinear, ranks=2), "Backward, overlapped")

# %% [markdown]
# ### 4.5 Attention
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 7 lines
#
# Attention takes the number of its heads from what q, k and v put out, so you change its four children, and nothing else. A head needs nothing of another head, so heads are what you share out: q, k and v by columns, `out` by rows. Two traps:
#
# - x enters **once** for q, k and v together. Three layers that each enter have three all-reduces backward, for one.
# - With *grouped queries* several query heads share a key head. Llama 3 405B has 128 query heads and 8 key heads. A rank needs the key heads of **its** query heads; where there are more ranks than key heads, several ranks hold the same one.
#
# | given | |
# |---|---|
# | `shard_range(n, rank, R)` | which of n a rank has (lab 00) |
# | `KeyValueHeads(linear, needed, D, group)` | a layer that replaces k or v. `needed` is a list: for each query head of this rank, the number of its key head. The layer holds each of these heads once. If other ranks hold one of them, too, it adds up their gradients |
# | `enter_before(module, enter, group)` | what is given to the module enters first, once |
# | `identity` | for a layer whose input is in the region already |
#
# **Predict.** 64 query heads, 8 key heads, tp=16. How many key heads does each rank hold?

# %%
from ranklab.ranks import shard_range
from ranklab.tensor_parallel.attention import KeyValueHeads, enter_before

check(tp_kv_heads=...)

# %%
def parallel_attention(attention, group=None, enter=copy_to_region, leave=reduce_from_region):
    """`attention` computes this rank's heads; changed in place, and returned.

    Its children q, k, v and out are nn.Linear, its head_size is D. Each rank has H/tp heads of q in
    rank order, and the heads of k and v that these need: with grouped queries H/KV heads of q share
    one. x enters once for all three.
    cost   those of enter and leave; where the ranks do not divide KV, an all-reduce of k's and of
           v's gradients in backward
    error  ValueError where the ranks do not divide H, or KV does not divide H
    """
    D, rank, R = attention.head_size, dist.get_rank(group), dist.get_world_size(group)
    H, KV = attention.q.out_features // D, attention.k.out_features // D
    if H % R or H % KV:
        raise ValueError(f"tp={R} and n_kv_head={KV} must divide n_head={H}")
    raise NotImplementedError("exercise 4.5: about 7 lines")


# %%
parallel_attention = check(parallel_attention)

# %% [markdown]
# Which rank has which heads, by your function: eight query heads on four ranks, with as many key heads and with two.

# %% tags=["nbval-check-output"]
from ranklab.models.gpt import GPT, Attention, GPTConfig


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
# Now a whole transformer layer. The library changes a model **from outside, by names**: a *plan* says which module is split in which way, and `TPConfig` hands in your functions. Beside it stands a plan in which q, k and v enter by themselves:

# %%
from ranklab.tensor_parallel import TPConfig, plan, tensor_parallel

yours = {"copy": copy_to_region, "reduce": reduce_from_region, "column": ColumnParallelLinear,
         "row": RowParallelLinear, "attention": parallel_attention}
mlp = {"blocks.*.mlp.up": plan.column, "blocks.*.mlp.down": plan.row}
once = {"blocks.*.attention": plan.heads, **mlp}
thrice = {"blocks.*.attention.[qkv]": plan.column, "blocks.*.attention.out": plan.row, **mlp}
plan_of = {"x enters once": once, "three times": thrice}

# %% tags=["nbval-check-output"]
def one_layer(plan):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_embd=64, n_head=8, n_ctx=32)).to(device())
    x = torch.randn(2, 32, 64, device=device(), requires_grad=True)
    block = tensor_parallel(model, plan, TPConfig(**yours)).blocks["0"]
    with Traffic() as forward:
        y = block(x)
    with Traffic() as backward:
        y.sum().backward()
    return forward.calls["all_reduce"], backward.calls["all_reduce"], \
        forward.sent_bytes + backward.sent_bytes


x_bytes = 2 * 32 * 64 * 4
print(f"predicted: 2 + 2 all-reduces, {4 * 2 * 3 * x_bytes // 4:,} bytes sent")
for name, of in plan_of.items():
    forward, backward, sent = launch(one_layer, of, ranks=4)[0]
    print(f"{name:14} {forward} + {backward} all-reduces, {sent:,} bytes sent")

# %% [markdown]
# ### 4.6 The loss
# > difficulty 5/5 · importance 5/5 · 25 minutes · about 12 lines · open: no recipe
#
# The head is a column layer: each rank has the logits of *its* part of the vocabulary. Gathered, they would be the largest tensor of the model, on every rank. But the loss of a target needs little of them: the log of a sum over all logits, and the one logit of the target.
#
# This one is **scored**. The check prints what each target costs, in bytes and in collectives, beside Megatron's (three all-reduces of 4 bytes) and beside gathering. At most 16 bytes in at most 3 collectives forward, and nothing backward, is a pass.
#
# **Predict.** 8,192 targets, a vocabulary of 128,256, and Megatron's three all-reduces. How many KB are all-reduced in all? (The logits in bf16 are 2.1 GB.)

# %%
from ranklab.targets import IGNORE

check(tp_loss_kb=...)

# %%
def vocab_parallel_cross_entropy(logits, targets, vocab_size, group=None):
    """The loss of each target in nats, from logits of which each rank has some columns.

    The columns are shard_range(vocab_size, rank, R). 0 where a target is IGNORE. Computed in
    float32, and right for logits of 10,000 as well: exp must never be infinite. All ranks get the
    same losses, and each the gradient of its own logits; logits and targets stay as they are.
    shape  logits (n, V/tp), targets (n,) -> (n,)
    cost   at most 16 bytes a target, in at most 3 collectives; nothing backward. For 4 ranks: an
           all-reduce of 4 bytes a target counts 4, an all-gather of 4 from each rank counts 8
    """
    raise NotImplementedError("exercise 4.6: about 12 lines")


# %%
vocab_parallel_cross_entropy = check(vocab_parallel_cross_entropy)

# %% [markdown]
# What yours sends, beside the shortest code that gathers. 64 targets, four ranks, and a growing vocabulary:

# %%
def gathered_loss(logits, targets, vocab_size):
    parts = [logits.new_empty(len(logits), len(shard_range(vocab_size, rank, 4)))
             for rank in range(4)]
    dist.all_gather(parts, logits)
    return F.cross_entropy(torch.cat(parts, 1), targets, reduction="none")


def bytes_a_target(loss, V, n=64):
    torch.manual_seed(0)
    whole, targets = torch.randn(n, V, device=device()), torch.randint(V, (n,), device=device())
    mine = shard_range(V, dist.get_rank(), 4)
    with Traffic() as traffic:
        losses = loss(whole[:, mine.start : mine.stop].contiguous(), targets, V)
    assert torch.allclose(losses, F.cross_entropy(whole, targets, reduction="none"), atol=1e-4)
    return sum(op.payload_bytes for op in traffic.ops) // n


# %% tags=["nbval-check-output"]
sizes, losses = (256, 1024, 4096), (vocab_parallel_cross_entropy, gathered_loss)
found = launch(lambda: [[bytes_a_target(loss, V) for loss in losses] for V in sizes], ranks=4)[0]
print("   V  yours  gathered   bytes in collectives for each target")
for V, (sent, gathered) in zip(sizes, found):
    print(f"{V:4} {sent:6} {gathered:9,}")

# %% [markdown]
# ### Further
#
# Three more, all checked, not in the 120 minutes: the embedding, the norm where each rank has its tokens, and dropout.

# %% [markdown]
# #### `vocab_parallel_embedding`
# > difficulty 2/5 · importance 4/5 · 8 minutes · about 4 lines
#
# The embedding is often the same matrix as the head, so it is cut in the same way: each rank has some rows. A token's row is on one rank; the others add zeros.

# %%
def vocab_parallel_embedding(tokens, w_shard, vocab_size, group=None, leave=reduce_from_region):
    """Each token's row of the whole embedding, of which this rank has the rows `w_shard`.

    Rows are in rank order, shard_range(vocab_size, rank, R) of them.
    shape  tokens (B, T), w_shard (V/tp, C) -> (B, T, C)
    cost   that of leave, called as leave(x, group): one all-reduce of the result
    """
    raise NotImplementedError("exercise vocab_parallel_embedding: about 4 lines")


# %%
vocab_parallel_embedding = check(vocab_parallel_embedding)

# %% [markdown]
# What each of three ranks brings for five tokens, before the sum (row t of the embedding is t + 1):

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
# Outside of the regions all ranks do the same work: norms, dropout, residuals. Better: each does it for **its tokens** (*sequence parallelism*, arXiv 2205.05198). Then f is an all-gather of the tokens, and backward a reduce-scatter; g is the reverse. A ring's all-reduce is these two, so the bytes are the same.

# %%
plots.outside()

# %% [markdown]
# The trap: the norm's weight is on all ranks, and each sees the gradient of its own tokens. Without a sum the copies drift apart, slowly and without an error. You have written already what sums up gradients. `functional_call(norm, {name: tensor}, x)` runs the norm on x with these tensors as its parameters.

# %%
def sequence_parallel_norm(norm, x, group=None):
    """norm(x), where x is this rank's tokens; the norm's gradients are the sums over ranks.

    `norm` is unchanged: no hook, no new parameter.
    shape  (B, T/tp, C) -> (B, T/tp, C)
    cost   backward one all-reduce for each parameter of the norm
    """
    raise NotImplementedError("exercise sequence_parallel_norm: about 2 lines")


# %%
sequence_parallel_norm = check(sequence_parallel_norm)

# %% [markdown]
# Twenty steps of SGD on a norm, four ranks with their own tokens, without the sum and with yours. How far are the ranks' weights apart?

# %% tags=["nbval-check-output"]
def trained_norm(call):
    torch.manual_seed(dist.get_rank())  # each rank's tokens
    norm = nn.LayerNorm(8, bias=False).to(device())
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.01)
    for _ in range(20):
        x = torch.randn(2, 4, 8, device=device())
        call(norm, x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return norm.weight.detach()


for name, call in {"norm(x)": lambda norm, x: norm(x), "yours": sequence_parallel_norm}.items():
    weights = torch.stack(launch(trained_norm, call, ranks=4)).cpu()
    print(f"{name:8} largest distance {(weights - weights[0]).abs().max():.3f}")

# %% [markdown]
# Sequence parallelism counted, on the GPT with your functions: the same bytes (but for the norms' gradients), and less kept for backward.

# %%
yours |= {"cross_entropy": vocab_parallel_cross_entropy, "embed": vocab_parallel_embedding,
          "norm": sequence_parallel_norm}
tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(1))


def gpt_step(split=None, sequence_parallel=False):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=64, n_head=4, n_ctx=32)).to(device())
    if split is not None:
        split(model, TPConfig(**yours, sequence_parallel=sequence_parallel))
    batch = tokens.to(device())
    with SavedActivations(model) as saved, Traffic() as traffic:
        loss = model(batch[:, :-1], batch[:, 1:])
    with traffic:
        loss.backward()
    return loss.item(), saved.bytes, traffic


# %% tags=["nbval-check-output"]
from ranklab.tensor_parallel import parallel_gpt

loss, saved, _ = launch(gpt_step, ranks=1)[0]
print(f"one process             loss {loss:.5f}  {saved:9,} bytes kept")
for sequence in (False, True):
    loss, saved, traffic = launch(gpt_step, parallel_gpt, sequence, ranks=4)[0]
    print(f"sequence_parallel={sequence!s:5} loss {loss:.5f}  {saved:9,} bytes kept",
          f"{traffic.sent_bytes:9,} sent\n       ", dict(traffic.calls))

# %% [markdown]
# #### `dropout_seeds`
# > difficulty 3/5 · importance 3/5 · 6 minutes · about 2 lines
#
# What ranks hold alike they must drop alike, or it is alike no more. What each has for itself, such as its heads, needs a mask of its own. So each rank has two seeds. With data parallelism beside it, other rows need other seeds.

# %%
from ranklab.tensor_parallel.dropout import SPREAD

# %%
def dropout_seeds(seed, data_rank, tensor_rank, tensor_ranks):
    """(shared, own): seeds for what the ranks of a tensor group hold alike, and for the rest.

    shared is the same on all tensor_ranks of one data_rank, and another one for each data_rank,
    which has other rows. own is another one on every rank. All of a run's seeds differ, and runs
    with seeds next to each other share none: their first seeds are SPREAD apart.
    cost  sends nothing
    """
    raise NotImplementedError("exercise dropout_seeds: about 2 lines")


# %%
dropout_seeds = check(dropout_seeds)

# %% [markdown]
# Two tensor ranks in each of two data groups, and what they drop of 24 numbers:

# %% tags=["nbval-check-output"]
def mask(seed):
    kept = torch.rand(24, generator=torch.Generator().manual_seed(seed)) > 0.4
    return "".join("x" if keep else "." for keep in kept)


for data_rank in range(2):
    for tensor_rank in range(2):
        shared, own = dropout_seeds(0, data_rank, tensor_rank, 2)
        print(f"data {data_rank}, tensor {tensor_rank}: shared {mask(shared)}   own {mask(own)}")

# %% [markdown]
# ## 5. The real thing
#
# torch's `parallelize_module` takes a plan of names as well, and makes each parameter a `DTensor` (lab 07). Ours, and what corresponds to it there:
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
# The same GPT, weights, tokens and AdamW, five steps on four ranks, counted by one meter:

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from ranklab.tensor_parallel import dtensor

# %%
def by_dtensor(model, how):
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    return dtensor.parallelize_gpt(model, mesh, sequence_parallel=how.sequence_parallel)


def train(split, sequence_parallel):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=64, n_head=4, n_ctx=32)).to(device())
    model = split(model, TPConfig(**yours, sequence_parallel=sequence_parallel))
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
found = launch(lambda: {(sequence, name): train(split, sequence) for sequence in (False, True)
                        for name, split in ways.items()}, ranks=4)[0]
for (sequence, name), (losses, sent, calls) in found.items():
    print(f"{name:8} sequence_parallel={sequence!s:5} {losses}  {sent:,} bytes\n        ", calls)

# %% [markdown]
# The same losses, and nearly the same counts. DTensor's loss has three messages; the library's has two, of the same bytes. With sequence parallelism AdamW sums up the gradients of DTensor's norms when it reads them, after what was counted here: 15 small all-reduces, three for each norm.
#
# And transformers' Llama, with grouped queries and a gated MLP. Its names are others, so its plan is another; the functions are yours.

# %% tags=["nbval-check-output"]
from ranklab.tensor_parallel import parallel_llama


def llama_losses(batch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=1)
    for split in (lambda model, how: None, parallel_llama):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(device())
        split(model, TPConfig(**yours))
        loss = model(input_ids=batch.to(device()), labels=batch.to(device())).loss
        loss.backward()
        norm = model.model.norm.weight.grad.norm()  # all ranks hold this gradient
        yield f"loss {loss.item():.4f}, gradient of the last norm {norm.item():.4f}"


if importlib.util.find_spec("transformers"):
    for ranks, text in enumerate(launch(lambda: [*llama_losses(tokens % 250)], ranks=2)[0], 1):
        print(f"Llama, ranks to a layer: {ranks}, {text}")

# %% [markdown]
# Megatron-core's own two linears, on one MLP. It is an extra: `python -m pip install -c constraints.txt -e '.[megatron]'`, 17 MB.

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
    from ranklab.tensor_parallel.megatron import parallel_linears

    layers = {"yours": lambda up, down: (ColumnParallelLinear(up), RowParallelLinear(down)),
              "Megatron-core": parallel_linears}
    for name, split in layers.items():
        print(f"{name:14}", *launch(mlp_of, split, ranks=4)[0])
else:
    print("Megatron-core is not installed.")

# %% [markdown]
# ## 6. Project
#
# **GPT-2, split by hand and split by tensors.** Most people first put some layers of a large GPT on this GPU, and the others on the next one. It works, and one GPU computes while the others wait. Then comes the same model with all ranks in every layer, by your functions. It learns the source of Python's library, and each way must end with the same held-out loss.

# %%
from ranklab.projects import tensor_parallel as project

few = {"ranks": 4, "steps": 10}
print(project.report(project.run(method="all", **yours, **few)))

# %% [markdown]
# Compare held, sent and loss; tokens/s says nothing where ranks share cores. Messages are the ring's: 2 for an all-reduce. The formulas leave small things out: Adam's counters, a scalar, one more message of DTensor's loss.

# %% [markdown]
# **Your turn.** Change one thing below. First write down which numbers change, and by which factor. Ideas: `ranks=2`; `sequence_parallel=True`; `overlap=True`; `method="dtensor"`. What will two ranks hold and send, and is the loss another one?

# %%
change = {"ranks": 2}
print(project.report(project.run(**(yours | {"method": "tensor"} | few | change))))

# %% [markdown]
# Each rank holds twice as much. It sends two thirds of the bytes, because 2 (R-1)/R of each x is 1 instead of 1.5, and a third of the messages, because the ring has two steps, not six. The loss is the same.

# %% [markdown]
# ## 7. Measure
#
# Predicted beside counted, for a step of the small GPT. Four all-reduces of x in each layer, one for the embedding, one for the head's gradient, and 12 bytes a target for Megatron's loss. If yours sends less, the two differ by that:

# %% tags=["nbval-check-output"]
B, T, C, L, n = 4, 32, 64, 2, 128
numbers = 12 * C * C * L + 256 * C  # all matrices; the norms are on all ranks
print("ranks   numbers held: predicted  counted   bytes sent: predicted  counted")


def held_and_sent():
    model = GPT(GPTConfig(n_embd=C, n_head=4, n_ctx=T)).to(device())
    model = parallel_gpt(model, TPConfig(**yours))
    return sum(p.numel() for p in model.parameters()), gpt_step(parallel_gpt)[2].sent_bytes


for R in (1, 2, 4):
    share = 2 * (R - 1) / R
    predicted = numbers // R + (2 * L + 1) * C, share * ((4 * L + 2) * B * T * C * 4 + 12 * n)
    held, sent = launch(held_and_sent, ranks=R)[0]
    print(f"{R:5} {predicted[0]:25,} {held:8,} {predicted[1]:23,.0f} {sent:8,}")

# %% [markdown]
# ### How far does tp go?
#
# With more ranks the bytes of a rank hardly change, while its computing shrinks. The layer of 4.4 takes 20 ms of products on one H100 at half its peak, and 2.5 ms on eight. Its messages take 1.04 ms more: 469.8 MB over NVLink's 450 GB/s. And sixteen ranks, on two nodes?
#
# A ring enters and leaves a node **once** (nccl issue 687). NCCL runs a ring through each network card of the node, and their bytes/s add up (nccl issue 412).
#
# **Predict.** tp=16 on two whole nodes. Each rank sends 2 * 15/16 of x, four times: 503.3 MB. Each node has eight cards of 50 GB/s. How many ms do these bytes take?

# %%
check(tp_fit_ms=...)

# %% [markdown]
# So eight cards are nearly as fast as NVLink. Now 32 of these layers and a vocabulary of 128,256, by lab 02's alpha + n beta: computing divided by tp, then all messages, nothing hidden. "1 a node" is a machine with one GPU and one card.

# %%
from ranklab.projects.tensor_parallel import links

shape = GPTConfig(vocab_size=128_256, n_ctx=1024, n_layer=32, n_head=32, n_embd=4096)
ranks = (1, 2, 4, 8, 16, 32)
seconds = links.curves(shape, 8, ranks=ranks)
plots.curves(ranks, seconds)

# %% tags=["nbval-check-output"]
print("ms for a step     ", *(f"{f'tp={R}':>6}" for R in ranks))
for name, times in seconds.items():
    print(f"{name:18}", *(f"{1e3 * time:6.0f}" for time in times))

# %% [markdown]
# With one card for eight GPUs, tp=16 is slower than tp=2. With eight cards, sixteen ranks need 107 ms and eight need 133. That is a fifth less for twice the GPUs: two groups of eight do *two* batches in 133 ms. And 32 ranks win nothing, even with NVLink between all of them, as among the 72 GPUs of a GB200 NVL72. Messages are what is left of the step there: 38 ms of bytes and 41 ms of **latency**, because each of the 130 all-reduces has 2 steps.
#
# The model is kind to sixteen ranks. It leaves out:
#
# - **Sums in the switch.** Inside a node NVLink's switches add up (NVLink SHARP, or NVLS). About 480 GB/s of bus bandwidth are usual there, 370 with a ring (nccl-tests issue 212). On 248 nodes of eight GPUs it was about 350, at times below 300 (nccl-tests issue 283).
# - **Narrow products.** With tp=16 each of q, k and v gives 256 outputs on a rank. Such a product has 1 / (1/256 + 1/4096 + 1/8192) = 234 FLOPs a byte, and an H100 needs 295 to be busy (lab 01). With tp=8 it has 431.
# - **Other traffic.** Gradients of the data-parallel copies use the same cards.
# - **Heads.** tp must divide them.
#
# A data-parallel copy's messages hide behind its backward. Here a forward sum hides behind nothing, unless a product is cut (section 9). So tp usually ends at eight, where NVLink ends on most machines.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 08` in a terminal asks these and more, with other numbers each time.

# %%
questions("08_tensor_parallel")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# torchrun --nproc-per-node 4 -m ranklab.projects.tensor_parallel --size gpt2 --method tensor --sequence-parallel
# sbatch labs/jobs/tensor_parallel.sbatch
# ```
#
# GPT-2 has 12 heads: 4 ranks, not 8.
#
# What real Megatron adds:
#
# - **Fused kernels**: bias and GELU in one, softmax with its mask, cross entropy in one pass over the logits.
# - **Messages inside of a product** (*user buffers*; in torch *async tensor parallelism*): a product is cut in pieces, and while one is computed another one travels. So forward messages can hide, too.
# - **Gathering again**: with sequence parallelism the library keeps what it has gathered. Megatron keeps a rank's own tokens, and gathers once more in backward (arXiv 2205.05198, section 4.2.2): five halves of an all-reduce for each region, not four, so 25% more bytes.
# - **Sums in the switch** make the all-reduce faster, not its two halves (nccl issue 1506: 470 GB/s against 350 by a ring). So on such machines sequence parallelism costs some time. It saves memory, and is usual all the same.
# - `CUDA_DEVICE_MAX_CONNECTIONS=1` in scripts: kernels start in the order of their calls, so that a message begins before the product that is to hide it.
# - **Padded vocabularies**, a multiple of 128 times tp. Ours are shared out unevenly.
#
# What to expect, published and not measured by us: 8.3 billion parameters on eight V100s, 77% of linear weak scaling (arXiv 1909.08053); Llama 3 405B with tp=8 inside each node, 16 pipeline stages and 128 replicas, 41% MFU (arXiv 2407.21783). This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 10. What we left out
#
# - **Two and more dimensions** (2D, 2.5D, 3D tensor parallelism): matrices cut both ways; rarely used.
# - **Long sequences.** Attention scores of one head stay on one rank. Lab 10 cuts the sequence inside of attention, too.
# - **Experts** (lab 11) are split by layer, not inside of one.
# - **Inference.** Serving uses the same two layers, forward only, to answer sooner. The messages are tiny then, so latency counts.
#
# Next: **09_pipeline_parallel**: whole layers on each rank, as in the naive split, but with all ranks at work.
