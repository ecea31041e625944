# %% [markdown]
# # 10 Context parallelism: split the sequence
#
# > 150 minutes, 55 more with Further · difficulty 4/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# Llama 3 was trained on sequences of 8,192 tokens, and at the end on sequences of 131,072 (arXiv 2407.21783). The weights stayed the same, but the activations of *one* sequence grew sixteenfold. And because a batch of one sequence cannot be divided over data-parallel ranks, sixteen ranks shared each sequence (its Table 4: cp 16, with tp 8 and 16 pipeline stages).
#
# Most of a transformer does not mind. Norms, matrices and the loss look at one token at a time, so each rank can work on its own tokens and needs no other rank. **Attention does mind**, because a query looks at the keys of all tokens before it. And causal attention is uneven: the last token has 131,072 keys to look at, and the first has one.
#
# In this lab you build attention over tokens that are on other ranks, in two ways. Keys and values go round a **ring** (lab 02), or ranks trade tokens for heads (**Ulysses**). You need labs 00 to 03, and it helps to have read an attention layer once.

# %%
import importlib.util

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab import context_parallel as cp

begin("10_context_parallel")

# %% [markdown]
# ## 2. Picture
#
# Here is a sequence of eight parts on four ranks. Each cell is a block of scores: its colour is the rank that has the queries, which computes the block, and its number is the rank that has the keys. The bars count each rank's cells (a cell on the diagonal counts as a whole one), and the dashed line is the mean.

# %%
from ranklab import context_parallel
from ranklab.plots import context_parallel as plots

plots.masks({"consecutive parts": context_parallel.contiguous_shard(8, 4),
             "zigzag": context_parallel.zigzag_shard(8, 4)})

# %% [markdown]
# In the upper plan all ranks wait for rank 3. In the lower one every rank has the same work and the same number of tokens. You will write the lower one.
#
# **Predict.** A long sequence is cut into four consecutive parts, one for each of four ranks. How many times the mean does the last rank compute? (A block on the diagonal counts as half.)

# %%
check(cp_last_rank=...)

# %% [markdown]
# ## 3. Smallest working code
#
# A query need not see all keys at once. The keys can come in parts, if the result of each part says how much it weighs. That is `lse`, the logarithm of the sum of exp(score):

# %% tags=["nbval-check-output"]
torch.manual_seed(0)
scores, v = torch.randn(8), torch.randn(8)  # of one query
whole = scores.softmax(0) @ v
parts = [(scores[at].softmax(0) @ v[at], scores[at].logsumexp(0))
         for at in (slice(0, 3), slice(3, 8))]
(a, lse_a), (b, lse_b) = parts
weight = torch.sigmoid(lse_a - lse_b)  # exp(lse_a) / (exp(lse_a) + exp(lse_b))
print(f"whole {whole:.4f}, of two parts {weight * a + (1 - weight) * b:.4f}")

# %% [markdown]
# One number for each query joins the parts without a seam: -0.4058 from two halves, -0.4058 from the whole. So a rank can look at one block of keys, forget it, and go on with the next. Here are two ranks, each with half of the tokens and without a mask. Each gets its second part from the other rank:

# %% tags=["nbval-check-output"]
def two_ranks():
    rank = dist.get_rank()
    part = [x[4 * rank : 4 * rank + 4].to(device()) for x in (scores, v)]
    peer_part = [torch.empty_like(x) for x in part]
    for x, buffer in zip(part, peer_part):
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, buffer, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    (a, lse_a), (b, lse_b) = [(s.softmax(0) @ u, s.logsumexp(0)) for s, u in (part, peer_part)]
    weight = torch.sigmoid(lse_a - lse_b)
    return f"{weight * a + (1 - weight) * b:.4f}"


print(launch(two_ranks, ranks=2))

# %% [markdown]
# ## 4. Build it
#
# Letters: B sequences, H heads, KV heads of keys and values (fewer, if several query heads share one: *grouped queries*), T tokens, D numbers a head, R ranks. A rank has `q` (B, H, T/R, D), and `k` and `v` (B, KV, T/R, D). These functions are given:

# %%
from ranklab.context_parallel import (
    Hop, Trade, begins_of, block_attention, block_gradients, refuse_uneven,
)
from ranklab.ranks import shard_range

# %% [markdown]
# `shard_range(n, rank, size)` is lab 00's. `refuse_uneven(tokens, parts)` raises a ValueError if the parts do not divide the tokens. We explain the others where you need them.

# %% [markdown]
# ### 4.1 What attention keeps
# > difficulty 2/5 · importance 4/5 · 10 minutes · about 6 lines
#
# *After this you can say how many bytes attention keeps, with and without a fused kernel.*
#
# **Predict.** Llama 3 8B has 32 heads. Plain attention keeps a probability for each head, each query and each key, even for hidden keys. With 131,072 tokens in bf16, how many TB is that, for one layer of one sequence?

# %%
check(cp_scores_tb=...)

# %% [markdown]
# No one keeps that. FlashAttention (arXiv 2205.14135) goes through the keys block by block, as in section 3. It keeps only `lse`, and computes the probabilities again in backward.

# %%
def attention_memory(tokens, n_head, n_kv_head, head_size, ranks=1, element=2, keeps_scores=False):
    """Count the bytes that attention keeps for backward, on each rank that shares a sequence.

    These are q, k, v, the output, and a float32 for each query and head. With keeps_scores, count
    plain attention on one rank: q, k, v, and in each head the probabilities of all token pairs.
    element  bytes per number: 2 for bf16
    Raises: ValueError if the ranks do not divide the tokens, or for keeps_scores on several ranks.
    """
    raise NotImplementedError("exercise 4.1: about 6 lines")


# %%
attention_memory = check(attention_memory)

# %% [markdown]
# Your function on one layer of Llama 3 8B. The line is an H100's 80 GB:

# %%
lengths = [2**n for n in range(12, 21)]
llama = {"n_head": 32, "n_kv_head": 8, "head_size": 128}
plots.by_length(lengths, {
    "plain": [attention_memory(n, **llama, keeps_scores=True) for n in lengths],
    "flash": [attention_memory(n, **llama) for n in lengths],
    "flash, 8 ranks": [attention_memory(n, **llama, ranks=8) for n in lengths],
}, budget=80e9)

# %% [markdown]
# When the sequence doubles, plain attention keeps four times as much, and flash keeps twice as much. At 2^20 tokens flash needs 21.6 GB for one layer. That is still too much, because there are 32 layers, each with an MLP as well. So we divide by R.

# %% [markdown]
# ### 4.2 Online softmax: two results become one
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 5 lines
#
# *After this you can merge two partial softmax results without overflow, also when one is empty.*
#
# Do section 3 again, now for tensors and for any scores. There are two dangers: exp(89) is infinite in float32, and a row may have seen no key at all so far, because with a mask a whole block can lie in its future. Make new tensors: the check makes sure that the four inputs are unchanged.

# %%
def online_softmax_merge(out, lse, other, other_lse):
    """Merge the attention over two sets of keys, (out, lse) and (other, other_lse), into one.

    The arguments are not modified.
    Shape: out, other (..., T, D), float32; lse, other_lse (..., T), float32. A row that has seen
        no key has lse -inf and out 0, in the arguments and in the result.
    Returns: (out, lse) over both sets.
    """
    raise NotImplementedError("exercise 4.2: about 5 lines")


# %%
online_softmax_merge = check(online_softmax_merge)

# %% [markdown]
# ### 4.3 Ring attention
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 10 lines
#
# *After this you can compute exact attention over a sequence that no rank holds as a whole.*
#
# Each rank keeps its queries, and the blocks of keys and values go round. In each step a rank looks at the block that it has. Meanwhile the same block is already on its way to the next rank, and another block comes from the previous rank (Liu et al. 2023, arXiv 2310.01889). If looking takes longer than sending, sending costs no time.
#
# These are given:
#
# - `Hop(x, group)` sends the tensor `x` to the next rank, and does not wait. Its `.wait()` returns what comes from the previous rank. Stack k and v, so that a hop is one message.
# - `block_attention(q, k, v, visible)` returns (out, lse) over one block of keys, in float32. If a row sees no key of the block, it gets zeros and -inf.
# - `visible[r]` says what this rank's queries see of the keys of rank r. `cp.causal_blocks(positions, rank)` makes this list from the positions of all tokens. Pass `visible[r]` on: you need not look inside. Rows and columns of scores that are wholly hidden are not computed.
#
# **Predict.** Llama 3 8B again: 8 key heads of 128, bf16, 131,072 tokens on 8 ranks. How many MB does a rank send in the forward of a layer?

# %%
check(cp_ring_mb=...)

# %%
def ring_attention(q, k, v, visible, group=None):
    """Return (out, lse) of this rank's queries over the keys of all ranks.

    Both are accumulated in float32 and returned in it, whatever the dtype of q. The next block
    travels while this one is computed, even if this rank sees none of it. No argument is modified.
    visible: [what this rank's queries see of the keys of rank 0, 1, ...]; see causal_blocks.
    Shape: q (B, H, T/R, D); k, v (B, KV, T/R, D): heads of q may share a head of k and v. They may
        be transposed views, as in a model.
    Cost: R - 1 messages, each with the bytes of k and v.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    raise NotImplementedError("exercise 4.3: about 10 lines")


# %%
ring_attention = check(ring_attention)

# %% [markdown]
# ### 4.4 Ring attention, backward
# > difficulty 5/5 · importance 4/5 · 30 minutes · about 12 lines
#
# *After this you can send the gradients of keys home around the same ring.*
#
# A query's gradient stays on its rank. But a key was seen by the queries of *many* ranks, and each rank knows a part of the key's gradient. So the blocks go round once more, and each block takes along the sum of the gradients that it has collected so far. A rank can compute its part from one block alone, because exp(score - lse) with the final lse is the probability among *all* keys.
#
# `block_gradients(grad_out, q, k, v, out, lse, visible)` returns (dq, dk, dv) of one block. They are float32, whatever the type of k, because many parts are added up. (Transformer Engine sends them in the type of k: fewer bytes, more rounding.)

# %%
def ring_attention_backward(grad_out, q, k, v, out, lse, visible, group=None):
    """Return (dq, dk, dv), the gradients of q, k and v; out and lse come from ring_attention.

    All three are accumulated in float32 and returned in it, whatever the dtype of q. No argument is
    modified. Here blocks need not travel during a computation.
    Cost: R - 1 messages with the bytes of k and v, and R with the bytes of their gradients (none
        on one rank).
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    raise NotImplementedError("exercise 4.4: about 12 lines")


# %%
ring_attention_backward = check(ring_attention_backward)

# %% [markdown]
# Now your two functions become one that autograd knows. We count the FLOPs of each rank, first with consecutive parts:

# %%
from torch.utils.flop_counter import FlopCounterMode

def attention(q, k, v, visible, group=None):
    return cp.context_attention(q, k, v, visible, group, ring_attention, ring_attention_backward)


def work(plan, tokens=64):
    R, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, heads, tokens // R, 8, device=device(), requires_grad=True)
               for heads in (4, 2, 2))
    visible = cp.causal_blocks(plan(tokens, R), rank)
    with FlopCounterMode(display=False) as flops:
        attention(q, k, v, visible).sum().backward()
    return flops.get_total_flops()


# %% tags=["nbval-check-output"]
print("consecutive parts:", launch(work, context_parallel.contiguous_shard, ranks=4))

# %% [markdown]
# ### 4.5 Zigzag
# > difficulty 2/5 · importance 5/5 · 8 minutes · about 2 lines
#
# *After this you can cut a causal sequence so that all ranks have equal work.*
#
# Each rank should have the same amount of work, and its tokens should still come in a few long pieces. Then most blocks of scores are either hidden as a whole, and cost nothing, or seen as a whole, and need no mask.

# %%
def zigzag_shard(tokens, ranks):
    """Give rank r parts r and 2R - 1 - r of 2R equal parts, so that all ranks have the same work.

    Shape: (R, T/R); row r has the positions of rank r's tokens, in ascending order.
    Raises: ValueError if 2R does not divide T.
    """
    refuse_uneven(tokens, 2 * ranks)
    raise NotImplementedError("exercise 4.5: about 2 lines")


# %%
zigzag_shard = check(zigzag_shard)

# %% [markdown]
# The same count with your shard:

# %% tags=["nbval-check-output"]
print("zigzag:           ", launch(work, zigzag_shard, ranks=4))

# %% [markdown]
# The sum is the same, but now no rank waits. (With consecutive parts the fullest rank had 1.6 times the mean and not 1.75, because `block_attention` computes a block on the diagonal whole, with its hidden half.)
#
# There is a new trap: a rank's tokens are no longer neighbours. Whatever depends on the position must be told, so rotary embeddings take `positions`. If you forget it, the loss is wrong, and still a plausible number:

# %%
from ranklab.models import GPT, GPTConfig

config = GPTConfig(n_ctx=64, n_embd=32)
tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(0))


def loss_of(tells_positions=True):
    torch.manual_seed(0)
    model, R, rank = GPT(config).to(device()), dist.get_world_size(), dist.get_rank()
    for p in model.parameters():
        p.detach().mul_(5)  # fresh weights are so small that attention hardly matters
    positions = zigzag_shard(64, R)[rank]
    visible = cp.causal_blocks(zigzag_shard(64, R), rank)
    for block in model.blocks.values():
        block.attention.attend = lambda q, k, v: attention(q, k, v, visible)
    x, y = (t[:, positions].to(device()) for t in (tokens[:, :-1], tokens[:, 1:]))
    share = model(x, y, "sum", positions=positions.to(device()) if tells_positions else None)
    dist.all_reduce(share := share.detach() / tokens[:, 1:].numel())
    return round(share.item(), 3)


# %% tags=["nbval-check-output"]
print("one process:", launch(loss_of, ranks=1)[0], "  four ranks:", launch(loss_of, ranks=4)[0],
      "  four ranks, positions forgotten:", launch(loss_of, False, ranks=4)[0])

# %% [markdown]
# Two more rules. Take the targets from the whole sequence *before* you split it, because the target of a part's last token is the first token of the next part, which is mostly on another rank. And the mean is over all targets: add up the sums of all ranks, and divide once.

# %% [markdown]
# ### 4.6 Ulysses
# > difficulty 3/5 · importance 4/5 · 12 minutes · about 6 lines
#
# *After this you can trade tokens for heads by an all-to-all, and say when that is cheaper.*
#
# No head needs another head, so ranks can trade. With an all-to-all (lab 02), a rank sends every other rank *that* rank's heads of its own tokens, and gets its own heads of all tokens. Then any attention will do, and the result goes back the same way (Jacobs et al. 2023, arXiv 2309.14509).
#
# `Trade.apply(x, cut, join, group)` is given. It cuts x into R parts along dim `cut`, sends part r to rank r, and joins the parts it receives along dim `join`. Its gradient goes the other way.
#
# **Predict.** With the numbers of 4.3 (and 32 query heads), how many MB does a rank send in forward, for q, k, v and the result?

# %%
check(cp_ulysses_mb=...)

# %%
def ulysses_attention(q, k, v, attend, group=None):
    """Compute attention over the tokens of all ranks, with attend(q, k, v) on this rank's heads.

    attend gets the tokens of rank 0, then those of rank 1, and so on, in the dtype of q, k and v.
    Shape: q (B, H, T/R, D), k and v (B, KV, T/R, D), perhaps transposed views, as in a model;
        attend gets (B, H/R, T, D) and (B, KV/R, T, D).
    Cost: (R-1)/R of the bytes of q, k, v and the result, forward and backward: one all-to-all for
        each, or for several together.
    Raises: ValueError if R does not divide both H and KV.
    """
    raise NotImplementedError("exercise 4.6: about 6 lines")


# %%
ulysses_attention = check(ulysses_attention)

# %% [markdown]
# ### Further
#
# #### `shard_documents`
# > difficulty 5/5 · importance 3/5 · 30 minutes · about 25 lines · open: no recipe
#
# Real batches are packed: documents of very different lengths share one sequence, and no token may look into another document. Then zigzag is no longer even, above all on more than two ranks. Find a plan in which no rank waits. There is no recipe, and no best plan. The check compares the scores of the fullest rank with the mean (at most 1.1 times), and prints for how many tokens the ranks must fetch keys from other ranks. `begins_of(lengths)` tells you for each token where its document begins.

# %%
def shard_documents(lengths, ranks):
    """Split packed documents of these lengths over the ranks, with nearly equal work.

    A rank's work is its number of (query, key) pairs: a query sees its document's tokens up to
    itself. The rank with the most work has at most 1.1 times the mean, unless one token alone has
    too many keys for that. Each token is on one rank, and all ranks have the same number of tokens.
    `lengths` is not modified.
    Returns: the positions of each rank's tokens, (R, T/R), each row ascending.
    Raises: ValueError if the ranks do not divide the tokens.
    """
    refuse_uneven(sum(lengths), ranks)
    raise NotImplementedError("exercise shard_documents: about 25 lines")


# %%
shard_documents = check(shard_documents)

# %% [markdown]
# #### `tiled_logits_loss`
# > difficulty 4/5 · importance 4/5 · 25 minutes · about 30 lines
#
# "Out of memory at 128K tokens, and it is not attention." With flash attention, memory grows only in proportion to the tokens. But so does everything else, and some of it is wider. The loss needs a logit for each token and each word of the vocabulary, usually in float32.
#
# **Predict.** All Llama 3 models have a vocabulary of 128,256. How many GB are the logits of 131,072 tokens in float32?

# %%
check(cp_logits_gb=...)

# %% [markdown]
# A loss looks at one token at a time, and so does an MLP. So neither needs the whole sequence at once: Arctic Long Sequence Training (ALST, Bekman et al. 2025, arXiv 2506.13996) computes both in tiles. Here is one rank with Llama 3 8B, checkpointed. Each layer keeps its input, one layer at a time is computed again, and the logits have a gradient of the same size. The tiles are as large as ALST's: 2,048 tokens make about 1 GB of logits, and the MLP takes as many tokens as the model is wide.

# %% tags=["nbval-check-output"]
lengths = [2**n for n in range(12, 21)]
whole = {"inputs of 32 layers": [32 * n * 4096 * 2 for n in lengths],
         "attention of a layer": [attention_memory(n, **llama) for n in lengths],
         "MLP of a layer": [cp.mlp_memory(n, 14336) for n in lengths],
         "logits and their gradient": [cp.logits_memory(n, 128256) for n in lengths]}
tiled = {"MLP of a layer": [cp.mlp_memory(n, 14336, tile=4096) for n in lengths],
         "logits and their gradient": [cp.logits_memory(n, 128256, tile=2048) for n in lengths]}
rows = whole | {f"{name}, in tiles": values for name, values in tiled.items()}
columns = [lengths.index(1024 * n) for n in (4, 16, 64, 128, 256, 1024)]
print(f"{'GB':35}", *(f"{f'{lengths[i] // 1024}K':>8}" for i in columns))
for name, values in rows.items():
    print(f"{name:35}", *(f"{values[i] / 1e9:8.1f}" for i in columns))

# %%
plots.held_by_length(lengths, whole, tiled, at=131_072, budget=80e9)

# %% [markdown]
# Look at the dotted lines: in tiles, logits and MLP stop growing. What still grows is the inputs of the layers, which ALST moves to the CPU, and attention, which is divided over ranks as in this lab.
#
# Checkpointing each tile would free its logits, but computes all of them twice. There is a better way, because the loss is **one number**. Its backward only multiplies gradients by a factor. So forward can compute a tile's part of both gradients right after its loss, while its logits still exist.
#
# | given | |
# |---|---|
# | `torch.autograd.Function` | `forward(ctx, ...)`, in which autograd is off, so that `torch.is_grad_enabled()` is always False; `ctx.needs_input_grad`, which is True under `torch.no_grad()` as well; `backward(ctx, grad_loss)`, which returns one value for each argument of forward; `ctx.save_for_backward(...)`, which also takes None |
# | `F.cross_entropy(logits, y, ignore_index=IGNORE, reduction="sum")` | the sum of the losses |
# | the gradient of that sum by the logits | softmax(logits), minus 1 at the target; a row of zeros where the target is IGNORE |
#
# **Your target:** at most four tiles of logits at the peak, and each logit computed once.

# %%
from ranklab.data import IGNORE


def tiled_logits_loss(hidden, weight, targets, tile, reduction="mean"):
    """Return the cross-entropy of the logits hidden @ weight.T, made for `tile` tokens at a time.

    Targets equal to IGNORE do not count. Logits are computed in the dtype of hidden and weight;
    softmax, loss and the sum of the weight's gradient are float32. The gradients have the dtype of
    hidden and weight. The arguments are not modified, and hidden may be a view.
    reduction: "mean" over the targets that count, or "sum"
    Shape: hidden (B, T, C), weight (V, C), targets (B, T); the last tile may be shorter.
    Returns: the loss, float32. Its backward gives the gradients of hidden and weight.
    Raises: ValueError if `tile` is less than 1, or for another reduction.
    Memory: at most four tiles of float32 logits, and twice the gradients of hidden and weight.
    Cost: 2 B T V C FLOPs for the logits, and as many for each gradient that is needed: none of a
        frozen tensor, and none under torch.no_grad().
    """
    raise NotImplementedError("exercise tiled_logits_loss: about 30 lines")


# %%
tiled_logits_loss = check(tiled_logits_loss)

# %% [markdown]
# Now four ways to the same loss: all logits at once, checkpointed tiles (`loss_chunks` of lab 01), yours, and DeepSpeed's `TiledFusedLogitsLoss`. We count the peak, without hidden and weight themselves, and the matrix products of the size B T V C. A plain step has three: the logits, and two gradients.

# %%
from torch import nn

from ranklab.meter import MemoryPeak
from ranklab.models import cross_entropy
from ranklab.peers.deepspeed_ulysses import deepspeed_tiled_loss, deepspeed_tiled_mlp


def checkpointed_tiles(hidden, weight, targets, tile):
    return cross_entropy(lambda x: F.linear(x, weight).float(), hidden, targets,
                         chunks=targets.numel() // tile)


def all_at_once(hidden, weight, targets, tile):
    return cross_entropy(lambda x: F.linear(x, weight).float(), hidden, targets)


def loss_costs(loss_of, factor=1, tokens=1024, C=32, V=4096, tile=64):
    torch.manual_seed(0)
    head = nn.ParameterDict({"hidden": torch.randn(1, tokens, C), "weight": torch.randn(V, C)})
    head.to(device())
    targets = torch.randint(V, (1, tokens), device=device())
    flops, aten = FlopCounterMode(display=False), torch.ops.aten
    flops.flop_registry[aten.addmm_] = flops.flop_registry[aten.addmm]  # torch leaves it out
    with flops, MemoryPeak(head) as memory:
        loss = loss_of(head["hidden"], head["weight"], targets, tile)
        (loss * factor).backward()
    return (loss.item(), head["hidden"].grad.norm().item(), head["weight"].grad.norm().item(),
            memory.peak_bytes - memory.points[0].total,
            flops.get_total_flops() / (2 * tokens * V * C))


# %% tags=["nbval-check-output"]
ways = {"all at once": all_at_once, "checkpointed tiles": checkpointed_tiles,
        "yours": tiled_logits_loss, "DeepSpeed": deepspeed_tiled_loss}
print("                      loss   |dhidden|  |dweight|   peak MB  products")
for name, way in ways.items():
    loss, hidden_norm, weight_norm, peak, products = loss_costs(way)
    print(f"{name:18} {loss:7.3f} {hidden_norm:11.4f} {weight_norm:10.4f} {peak / 1e6:9.1f} "
          f"{products:9.1f}")

# %% [markdown]
# Backward must multiply **both** gradients. With gradient accumulation the loss is divided by the number of micro-batches:

# %% tags=["nbval-check-output"]
for name, way in ways.items():
    _, hidden_norm, weight_norm, *_ = loss_costs(way, factor=1 / 4)
    print(f"{name:18} |dhidden| {hidden_norm:.4f}, |dweight| {weight_norm:.4f}")

# %% [markdown]
# DeepSpeed (0.19.8) adds to the weight's `.grad` in forward, as if nothing came after the loss. Its backward multiplies the gradient of hidden alone. So every division of the loss, also by the number of targets, belongs in the function that it calls for each tile. The loss itself does not show such a mistake, and other fused losses have made it (fla-org/flash-linear-attention#963, linkedin/Liger-Kernel#1298).
#
# An MLP returns as many numbers as it takes, so forward does not know their gradients. It has to be computed again, tile by tile, and lab 01's `checkpointed` does that:

# %%
from ranklab.baseline import checkpointed


class SwiGLU(nn.Module):
    def __init__(self, C=32, width=1024):
        super().__init__()
        self.gate, self.up = nn.Linear(C, width), nn.Linear(C, width)
        self.down = nn.Linear(width, C)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def tiled_mlp(mlp, x, tile):
    return torch.cat([checkpointed(mlp, part) for part in x.split(tile, dim=1)], dim=1)


def mlp_costs(way, tokens=1024, tile=64):
    torch.manual_seed(0)
    mlp = SwiGLU().to(device())
    x = torch.randn(1, tokens, 32, device=device(), requires_grad=True)
    with MemoryPeak(mlp) as memory:
        way(mlp, x, tile).square().mean().backward()
    return x.grad.norm().item(), mlp.up.weight.grad.norm().item(), memory.peak.activations


# %% tags=["nbval-check-output"]
for name, way in {"all at once": lambda mlp, x, tile: mlp(x), "checkpointed": tiled_mlp,
                  "DeepSpeed": deepspeed_tiled_mlp}.items():
    x_norm, up_norm, peak = mlp_costs(way)
    print(f"{name:12} |dx| {x_norm:.6f}, |dup| {up_norm:.6f}, "
          f"peak {peak / 1e6:.1f} MB of activations")

# %% [markdown]
# ## 5. The real thing
#
# DeepSpeed's `DistributedAttention` is Ulysses too, for tensors (B, T/R, H, D). It gets the same q, k and v as yours, and we compare values and bytes:

# %%
from ranklab.peers.deepspeed_ulysses import deepspeed_ulysses
from ranklab.meter import Traffic


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def side_by_side():
    torch.manual_seed(dist.get_rank())
    qkv = [torch.randn(2, heads, 16, 8).to(device()) for heads in (8, 4, 4)]
    for attend in (ulysses_attention, deepspeed_ulysses):
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        with Traffic() as traffic:
            out = attend(q, k, v, sdpa)
            out.square().sum().backward()
        yield (f"out {out.detach().double().norm():.3f}, dk {k.grad.double().norm():.3f}, "
               f"{traffic.sent_bytes:,} bytes in {traffic.calls['all_to_all']} all-to-alls")


# %% tags=["nbval-check-output"]
lines = launch(lambda: [*side_by_side()], ranks=4)[0]
for name, line in zip(("yours", "DeepSpeed"), lines):
    print(f"{name:10}", line)

# %% [markdown]
# The Llama of transformers has grouped queries, and takes any function as its attention. Compare it on four ranks, with your attention, to the whole model in one process:

# %% tags=["nbval-check-output"]
from ranklab.peers.llama import context_llama


def llama_losses(ids):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model, (x, y) = LlamaForCausalLM(shape).to(device()), (ids[:, :-1], ids[:, 1:])
    whole = F.cross_entropy(model(x, use_cache=False).logits.flatten(0, 1), y.flatten())
    shards = cp.TokenShard(dist.group.WORLD, attention=attention)
    logits = context_llama(model, shards)(x)
    targets = y[:, shards.positions]
    share = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / y.numel()
    dist.all_reduce(share := share.detach())
    return f"one process {whole.item():.3f}, ring {share.item():.3f}"


if importlib.util.find_spec("transformers"):
    heavy = ["transformers.modeling_utils"]  # imported once, and not on each rank
    print(launch(lambda: llama_losses(tokens.to(device()) % 250), ranks=4, preload=heavy)[0])

# %% [markdown]
# torch has its own `context_parallel` (`torch.distributed.tensor.experimental`, 2.13). It needs a GPU's attention kernels and raises on a CPU, so we do not run it here. Megatron-LM's is in Transformer Engine: `--context-parallel-size`, and `--cp-comm-type` with `p2p` (a ring), `a2a` (Ulysses), `all_gather`, or `a2a+p2p`, which is both. For `a2a+p2p` it also demands `--hierarchical-context-parallel-sizes 8 4`: here 8 ranks trade heads, and 4 form a ring.
#
# How many ranks may trade? In your function and in Transformer Engine their number must divide the key heads. DeepSpeed's `DistributedAttention` also needs a key head for each rank. But its `UlyssesSPAttentionHF`, for models of transformers, sends a key head to several ranks where there are more ranks than key heads, so its limit is the number of **query** heads (0.19.8).

# %% [markdown]
# ## 6. Project
#
# **A GPT on sequences that do not fit.** We limit a rank's memory (emulated, and counted): it can hold the activations of 16 tokens. Eight ranks together train on sequences of 128, with your functions. Is the long context worth anything? To find out, a model of the same size trains on the same number of tokens in windows of 16, and both read the same held-out text.

# %%
from ranklab.projects import context_parallel as project

functions = {"attention": attention, "shard": zigzag_shard, "trade": ulysses_attention}
outcome = project.run(**functions)
print(project.report(outcome))

# %%
plots.by_position(outcome.by_position)

# %% [markdown]
# In the first part of a sequence both models have the same number of earlier tokens to look at, so the gap there is not due to the context. Only its growth in later parts is. (Our first report called the gap in the last part, 0.081 nats, the worth of a long context. In the first part it was 0.082.) Here it grows little: the model is small, and 80 steps are few.
#
# **Your turn.** Change one thing, and first write down which numbers will change. Ideas: `method="ulysses"`; `method="both"`; `ranks=4`; a `shard` of your own; `documents=True`, so that no token sees past the beginning of its file.

# %%
change = {"method": "ulysses"}
print(project.report(project.run(**(functions | {"steps": 2, "compare": False} | change))))

# %% [markdown]
# ## 7. Measure
#
# How many bytes does a rank send for the attention of one layer, forward and backward, in float32? Predicted and counted:

# %%
def counted(method, tokens=64, H=8, KV=8, D=8):
    R, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = (torch.randn(1, n, tokens // R, D, device=device(), requires_grad=True)
               for n in (H, KV, KV))
    visible = cp.causal_blocks(zigzag_shard(tokens, R), rank)
    with Traffic() as traffic:
        if method == "ring":
            attention(q, k, v, visible).sum().backward()
        else:
            ulysses_attention(q, k, v, sdpa).sum().backward()
    return traffic.sent_bytes


# %% tags=["nbval-check-output"]
print("ranks      ring: predicted  counted   Ulysses: predicted  counted")
for R in (2, 4, 8):
    ring, ulysses = (launch(counted, method, ranks=R)[0] for method in ("ring", "ulysses"))
    print(f"{R:5} {cp.ring_bytes(64, 8, 8, R, element=4):20,} {ring:8,} "
          f"{cp.ulysses_bytes(64, 8, 8, 8, R, element=4):20,} {ulysses:8,}")

# %% [markdown]
# The ring's bytes level off, because all keys pass through each rank, whatever R is. With Ulysses a rank sends less when there are more ranks. So why use the ring? Its messages hide behind the computing, and it goes on where Ulysses ends: at the key heads (8 in Llama 3 8B), or with copies of them at the query heads (32).
#
# And the time? We compute it with lab 02's alpha + n beta, for one layer of Llama 3 8B and 131,072 tokens on H100s at half their peak. Up to 8 ranks share a node's NVLink, 450 GB/s each. With 16 or more, the ring's messages from node to node go through **one** card of 50 GB/s, because only one rank of a node has its next rank in another node. A step of the ring takes as long as its computing or its message, whichever is longer.

# %%
from ranklab.context_parallel import layer_seconds

ranks = [2, 4, 8, 16, 32, 64]
plots.by_ranks(ranks, layer_seconds(131_072, **llama, ranks=ranks))

# %% [markdown]
# Up to 16 ranks the ring costs nothing. On 32, a rank has 4,096 tokens, too few to hide a message through one card, so more ranks gain nothing. There it helps to run Ulysses inside a node and a ring between the nodes, because then all eight cards carry a part.
#
# This is a model of context parallelism alone. With tp=8 inside each node, as in section 1, 32 GPUs are only four context ranks of 32,768 tokens, and each GPU of a node has a ring and a card of its own. The model also leaves out that NCCL's kernels take some SMs from attention.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 10` in a terminal asks these and more, with other numbers each time.

# %%
questions("10_context_parallel")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# python -m ranklab.projects.context_parallel --method ring
# torchrun --nproc-per-node 8 -m ranklab.projects.context_parallel --size gpt2 --method both
# sbatch labs/jobs/context_parallel.sbatch
# ```
#
# What changes there:
#
# - **Kernels.** `block_attention` is written to be read: it makes the block's scores, (T/R, T/R) for each head. FlashAttention's kernels never make them, and they also return `lse`, which is all that a ring needs.
# - **Ring or all-gather.** Llama 3 first gathered all keys and values, and then computed. With grouped queries they are small compared with the queries, masks of documents are easier, and the gather takes little time next to attention, which grows with the square (arXiv 2407.21783, section 3.3.2). Llama 3 also cut in zigzag.
# - **Both.** Ulysses inside a node, a ring between nodes: `TokenShard(ring=..., ulysses=...)` here, `a2a+p2p` in Megatron.
# - **Out of memory, but not because of attention.** `tiled_logits_loss`, under Further, has the numbers. ALST adds tiles to Ulysses, and moves the layers' inputs to the CPU. The Trainer of transformers (5.23) takes DeepSpeed's Ulysses by `ParallelismConfig(sp_size=8, sp_backend="deepspeed")`, but not the tiles: the docstring of `TiledMLP` shows how to patch a model, and a comment in its backward says that DDP and FSDP need more. `use_liger_kernel=True` is another way to a loss without logits; Liger adds up the weight's gradient in the weight's dtype unless `accum_dtype` names another. Tensor parallelism divides the logits as well (lab 08).
# - **Packed documents.** Fast kernels take the documents' borders, `cu_seqlens`, instead of a mask: flash-attn's varlen functions, torch's `varlen_attn`, the `thd` format of Transformer Engine. With cp, Transformer Engine cuts each document in zigzag, so each must be padded to a multiple of 2 R tokens. And a short document pays for messages that it does not need. So Megatron-LM has `--hybrid-context-parallel`: a document gets as many ranks as `--max-seqlen-per-dp-cp-rank` demands, rounded up to a power of two (but not together with pipeline stages). It is not the `a2a+p2p` that an older page of Megatron-Bridge called "hybrid".
# - **The other axes.** Context ranks hold the same weights, so gradients are summed over them as over data ranks, and ZeRO or FSDP shard over both. `ranklab compare --layouts 1x1x1,cp=4 2x1x1,cp=2 1x2x1,cp=2` shows cp together with the axes of lab 12. The sequence parallelism of lab 08 is something else: it divides tokens between the matrices, and gathers them before each.
#
# What to expect (published, not measured by us): Llama 3 405B with sequences of 131,072 and cp 16 reached 380 TFLOP/s a GPU, 38% MFU. With 8,192 tokens and cp 1, on the same number of GPUs, it was 400 and 41% (Table 4). This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 10. Take with you
#
# 1. Only attention needs other tokens. With `lse`, one number for each query and head, it can look at the keys in parts.
# 2. A ring sends k and v R-1 times and hides them if a rank has enough tokens. Ulysses sends less, and ends at the heads: 8 key heads, 8 ranks.
# 3. Causal work is uneven: with four runs of tokens, the last rank has 7 times the first one's work. In zigzag all have the same.
#
# **What we left out**
#
# - **Inference**: one new token looks at a long cache, which is another problem.
# - **Sparse and windowed attention**, which does not look at all keys.
# - **Striped attention** (arXiv 2311.09431): each rank takes every R-th token, which is also nearly even.
# - **Plans by measured time**: `shard_documents` counts scores, but short pieces cost more time than their scores say.
#
# Next: [11_expert_parallel](11_expert_parallel.ipynb), where experts are on different ranks and tokens travel to them.
