# %% [markdown]
# # 11 Expert parallelism: a token visits a few of many experts
#
# > 150 minutes, 100 more with Further · difficulty 4/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# In the labs so far, each token went through each weight, and a model with twice the weights cost twice the FLOPs. A **mixture of experts** breaks that link. Each block has several MLPs, the *experts*, and a small matrix, the *router*, sends each token to the best k of them. Mixtral has 8 experts in each of 32 layers, and a token goes to two. DeepSeek-V3 has 671 billion parameters, and a token uses 37 billion of them (arXiv 2412.19437).
#
# So FLOPs are cheap, but memory is not, because all experts must be somewhere. **Expert parallelism** puts them on different ranks, and *tokens travel* to the ranks that have their experts, and back. The router decides in each step which expert gets how many tokens. So before the router has run, no rank knows how large its messages will be.
#
# In this lab you build the router, the two all-to-alls, and what keeps the loads even. You need labs 00 to 03.

# %%
import importlib.util
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab import expert_parallel as ep
from ranklab.meter import Traffic

begin("11_expert_parallel")

# %% [markdown]
# ## 2. Picture
#
# Four ranks have four tokens each, and two of the eight experts each. Each token goes to two experts, and the colour of a line is the rank of its token. On the right you see how many rows each rank gets. With even loads each would get 8.

# %%
from ranklab.plots import expert_parallel as plots

logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
logits[:, 2] += 1.5  # one expert is liked more than the others
picture = logits.topk(2).indices
plots.layer(picture.tolist(), ranks=4, n_experts=8)

# %% [markdown]
# **Predict.** Mixtral 8x7B has width 4,096 and 32 layers, with 8 experts in each. Embedding and head are two matrices of 32,000 x 4,096. Attention has q and the output, 4,096 x 4,096 each, and k and v, 4,096 x 1,024 each. An expert has three matrices of 4,096 x 14,336. How many billion parameters are there? (Norms and routers don't matter.)

# %%
check(moe_total_billions=...)

# %% [markdown]
# ## 3. Smallest working code
#
# Two ranks have one expert each. Rank 0 has three tokens, and rank 1 has one. Here an expert just multiplies by 10 or by 100. In `all_to_all_single(out, x, came, to)`, rows of `x` are sent and rows arrive in `out`; `came` says how many come from each rank, and `to` how many go to each.

# %% tags=["nbval-check-output"]
def two_experts():
    rank = dist.get_rank()
    x = torch.tensor([[1.0], [2], [3]] if rank == 0 else [[4.0]], device=device())
    to = [1, 2] if rank == 0 else [1, 0]  # rank 0 keeps the first row, and sends the other two
    came = [1, 1] if rank == 0 else [2, 0]
    rows = x.new_empty(sum(came), 1)
    dist.all_to_all_single(rows, x, came, to)
    rows *= (10, 100)[rank]
    dist.all_to_all_single(x, rows, to, came)  # the way back: the sizes change places
    return x.flatten().tolist()


print(launch(two_experts, ranks=2))

# %% [markdown]
# That is the whole idea. Four questions are left: which token goes to which expert, in which order rows must lie, how a rank knows what will come, and how to keep one expert from getting everything.

# %% [markdown]
# ## 4. Build it
#
# Letters: B sequences of T tokens, N = B T tokens of a rank, C width, E experts, k experts per token, R ranks. Rank r has experts r E/R to (r+1) E/R - 1. These are given:

# %%
from ranklab.expert_parallel import AllToAll, Sent, chosen_together, expert_slots

# %% [markdown]
# ### 4.1 The router
# > difficulty 2/5 · importance 5/5 · 12 minutes · about 6 lines
#
# *After this you can route tokens to experts by both conventions, and say what the router learns from.*
#
# For each token, the router gives each expert a number: the `logits`. The k best experts are *chosen*, and their outputs are added up with *weights*. There are two conventions. Mixtral's weights add up to 1. Switch's weights are the probabilities among all experts, so an expert that was chosen with little conviction adds less. The choice itself has no gradient: from the tokens' loss, the router learns through the weights alone. So with k = 1 take Switch's. Weights that add up to 1 would all *be* 1, and teach the router nothing.
#
# A `bias` can push tokens to experts that have too few. It changes which experts are chosen, but never the weights (see 4.5).

# %%
def top_k_route(logits, k, renormalize=True, bias=None):
    """Return (chosen, weights): the k best experts of each token, best first, and their weights.

    The best experts have the largest logits; with a bias, the largest probability + bias. Of equal
    ones, the one with the lowest number comes first.
    Shape: logits (..., E); chosen (..., k), int64; weights (..., k), float32.
    renormalize: if True, a token's weights add up to 1, by a softmax over its k experts (Mixtral).
        If False, the softmax is over all E, and its k weights are not rescaled (Switch).
    bias: (E,), added to the probabilities of all E, only to choose experts, not to weight them
        (DeepSeek-V3 adds it to sigmoids).
    Raises: ValueError if k is not between 1 and E.
    """
    raise NotImplementedError("exercise 4.1: about 6 lines")


# %%
top_k_route = check(top_k_route)

# %% [markdown]
# ### 4.2 Capacity
# > difficulty 3/5 · importance 4/5 · 20 minutes · about 6 lines
#
# *After this you can say how many tokens a capacity factor drops.*
#
# The first large models gave each expert a fixed number of places, `factor` times the mean, so that all tensors have a known size. A token that finds no place is *dropped*: the residual connection carries it past the layer. GShard counts places in groups of tokens (arXiv 2006.16668). Here a group is a sequence, so it does not matter for the result which rank has the sequence.
#
# **Predict.** A sequence has 4,096 tokens, there are 8 experts, each token makes 2 choices, and the factor is 1.25. How many places does an expert have?

# %%
check(moe_slots=...)

# %% [markdown]
# `expert_slots(T, n_experts, k, factor)` gives this number, rounded up. No choice in `chosen` is -1 (dropped) yet.

# %%
def capacity(chosen, n_experts, factor):
    """Return a copy of `chosen`, with -1 wherever an expert has no room left.

    In each sequence an expert takes at most expert_slots(T, n_experts, k, factor) tokens: all first
    choices before all second ones, and within each of these, earlier tokens first.
    Shape: chosen (..., T, k).
    """
    T, k = chosen.shape[-2:]
    raise NotImplementedError("exercise 4.2: about 6 lines")


# %%
capacity = check(capacity)

# %% [markdown]
# How many choices does a skewed router lose? We make it prefer one expert more and more, and use your function:

# %% tags=["nbval-check-output"]
logits = torch.randn(8, 256, 8, generator=torch.Generator().manual_seed(0))
for bonus in (0.0, 1.0, 2.0):
    chosen, _ = top_k_route(logits + bonus * F.one_hot(torch.tensor(0), 8), 2)
    shares = [(capacity(chosen, 8, factor) < 0).float().mean() for factor in (1.0, 1.25, 2.0)]
    print(f"logit + {bonus:.0f}: expert 0 gets {(chosen == 0).float().mean():.0%} of all choices; "
          "dropped at factor 1, 1.25, 2: " + ", ".join(f"{share:.0%}" for share in shares))

# %% [markdown]
# Today many models are *dropless*: an expert takes whatever comes, and ranks ask each other for the sizes. The next exercise handles both cases, because a dropped choice is just -1.

# %% [markdown]
# ### 4.3 Dispatch
# > difficulty 5/5 · importance 5/5 · 35 minutes · about 11 lines
#
# *After this you can send each row to its expert's rank, when no rank knows how many rows will come.*
#
# Take six tokens, a to f: two on each of three ranks, with one expert a rank and k = 1. This is what the library's function does with them:

# %% tags=["nbval-check-output"]
def letters(x):
    return " ".join("abcdef"[int(number)] for number in x.flatten())


def six_tokens():
    rank = dist.get_rank()
    x = torch.arange(6.0, device=device()).view(3, 2, 1)[rank]  # of width 1: the token's number
    chosen = torch.tensor([[2, 0], [1, 0], [0, 2]], device=device())[rank].unsqueeze(1)
    rows, sent = ep.dispatch_tokens(x, chosen, n_experts=3)
    return (f"has {letters(x)}, for experts {chosen.flatten().tolist()}",
            f"has {letters(rows)}  order {sent.order.tolist()}  to {sent.to}  came {sent.came}")


for moment, lines in zip(("before", "after"), zip(*launch(six_tokens, ranks=3))):
    for rank, line in enumerate(lines):
        print(f"{moment:6} rank {rank} {line}")

# %% [markdown]
# Follow rank 0. Its token a chose expert 2, and b chose expert 0, so it sends b first: `order` is [1, 0]. One row goes to rank 0 (itself), none to rank 1, one to rank 2: `to`. It then has expert 0's tokens b, d, e, one from each rank: `came`. Expert 1 got one token, so loads are uneven.
#
# **Predict.** Each of 8 ranks has 4,096 tokens of width 4,096 in bf16, and one of 8 experts; k = 2, and loads are even. How many MB does a rank send to other ranks when it dispatches?

# %%
check(moe_dispatch_mb=...)

# %% [markdown]
# `AllToAll.apply(x, to, came, group)` is given. Of the rows of x, the first `to[0]` go to rank 0, the next `to[1]` to rank 1, and so on. From rank r come `came[r]` rows, and the result has them in rank order. Its gradient goes the other way. `to` and `came` are lists of numbers.
#
# `Sent` holds what the way back needs. Its fields are:
#
# - `order`: which places of `chosen.flatten()` were sent, in the order in which they were sent, which is by expert. Place i belongs to token i // k.
# - `to`, `came`: how many rows went to each rank, and how many came from each; two lists of R numbers.
# - `by_expert`: the order that sorts the arrived rows by expert. (They arrive sorted by rank.)
# - `counts`: how many rows each expert of this rank has, (E/R,). A list will do.
#
# How does a rank know what will come? An all-to-all without sizes sends equal parts. If each rank sends its E counts this way, every rank gets, from each rank in turn, the counts for *its own* E/R experts. Then it knows how many rows come, and the expert of each row: label the rows with their experts, and sort the labels. All sorts are stable.

# %%
def dispatch_tokens(x, chosen, n_experts, group=None):
    """Send the rows of x to their experts' ranks; return (rows, Sent), the rows for this rank.

    Rank r has experts r E/R to (r+1) E/R - 1. The rows are sorted by expert, then by the rank that
    they come from, then by their order on that rank. A row that chose several experts of this rank
    comes once for each of them.
    First the ranks exchange how many rows each expert gets; `to` and `came` are sums of these.
    In Sent, order and by_expert are tensors, to and came lists, and counts a tensor or a list.
    The arguments are not modified.
    Shape: x (N, C); chosen (N, k), -1 for none; rows (n, C), in the dtype of x.
    Cost: an all-to-all of E counts, and one of at most k N rows, which backward repeats.
    Raises: ValueError if R does not divide E.
    """
    R, k, flat = dist.get_world_size(group), chosen.shape[1], chosen.flatten()
    raise NotImplementedError("exercise 4.3: about 11 lines")


# %%
dispatch_tokens = check(dispatch_tokens)

# %% [markdown]
# ### 4.4 Combine
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 5 lines
#
# *After this you can bring the experts' outputs back to their tokens, weighted and in order.*
#
# The experts have computed their outputs. Now undo everything, the last step first. A rank may have no token at all: N = 0.

# %%
def combine_tokens(rows, sent, weights, group=None):
    """Send `rows`, the experts' outputs, back; return each token's weighted sum, (N, C) in float32.

    A token without an expert gets zeros.
    Shape: rows (n, C), in the order of dispatch_tokens; weights (N, k).
    Cost: an all-to-all of the rows in forward, and one in backward.
    """
    raise NotImplementedError("exercise 4.4: about 5 lines")


# %%
combine_tokens = check(combine_tokens)

# %% [markdown]
# Now the whole layer runs on your functions, on 1, 2 and 4 ranks. The eight tokens are the same, and so is the result. `ep.MoE` has the router and the experts, `vars(layer).update` puts your functions in, and `ep.spread_experts` leaves each rank only its own experts. On four ranks, a rank has half the tokens that it has on two. Does it send half as much?

# %% tags=["nbval-check-output"]
parts = {"route": top_k_route, "limit": capacity, "dispatch": dispatch_tokens,
         "combine": combine_tokens}
small = ep.MoEConfig(n_embd=8, n_head=2, n_expert=4, top_k=2, balance="none")  # that is 4.5


def same_tokens():
    R, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layer, x = ep.MoE(small), torch.randn(4, 2, 8)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    vars(layer).update(parts)
    layer = ep.spread_experts(layer.to(device()), dist.group.WORLD)
    with Traffic() as traffic:
        out = layer(x.chunk(R)[rank].to(device()))
    dist.all_reduce(total := out.detach().double().square().sum())
    numbers = sum(p.numel() for p in layer.parameters())
    return f"{total.item():.2f}; a rank has {numbers} numbers and sends {traffic.sent_bytes} bytes"


for ranks in (1, 2, 4):
    print(f"ranks {ranks}: sum of squares", launch(same_tokens, ranks=ranks)[0])

# %% [markdown]
# No, because the fewer experts a rank has, the more of its rows leave it: 1/2 on two ranks, 3/4 on four, and nearly all on many. But the result is 160.39 each time: rows have travelled to other processes and back, and nothing shows it.

# %% [markdown]
# ### 4.5 Load balancing
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 4 lines
#
# *After this you can keep the experts' loads even, by a loss or by a bias.*
#
# An expert that gets more tokens learns more, becomes better, and gets even more tokens. Left alone, a router often ends with a few experts that do everything. And all ranks wait for the one with the fullest expert.
#
# Switch adds a loss (arXiv 2101.03961). f_e is the share of all choices that fell on expert e. It is a count, so it has no gradient. P_e is the mean probability that the router gave to e, and does have one. E times the sum of f_e P_e is 1 for even loads, and more if large f go with large P. Its gradient lowers the probability of the experts that have too much.
#
# The other way needs no loss. After each step a bias goes up a little for experts with too few tokens, and down for the others (arXiv 2408.15664). DeepSeek-V3 does that, together with a very small loss in each sequence (arXiv 2412.19437). `ep.balance_bias` is one line, `bias += rate * (loads.float().mean() - loads).sign()`. The loss is added here with a weight of 0.01, the same for each token.

# %%
def load_balance_loss(logits, chosen):
    """Return the load-balancing loss of each sequence: E times the sum of f_e P_e over all experts.

    f_e is the fraction of all choices that fell on expert e (a count, without a gradient), and P_e
    is the mean probability that the router gave it. Even loads give a loss of 1.
    Count the choices in `chosen`: with a bias, these are not the k largest logits.
    Shape: logits (..., T, E); chosen (..., T, k), before any is dropped; the result (...), float32.
    """
    E = logits.shape[-1]
    raise NotImplementedError("exercise 4.5: about 4 lines")


# %%
load_balance_loss = check(load_balance_loss)

# %% [markdown]
# "In each sequence" is a choice. You could also count over a micro-batch, over a rank's rows, or over the whole batch. Each gives a different loss, because a mean of products is not the product of the means. Counted in each sequence, the loss is the same for any number of ranks. The price is that every single sequence must be even, while a text about one subject may want few experts.

# %% [markdown]
# ### 4.6 Gradients of experts
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 5 lines
#
# *After this you can say over which ranks each gradient of a mixture of experts is averaged.*
#
# Ranks with different experts also have different rows. So for the router, the norms and attention they are data-parallel ranks: *these* gradients are averaged over all ranks. But an expert is on a few ranks only. Take 8 ranks that dispatch in two halves of 4. Each half has all experts, a quarter of them on each rank. `own` joins the 2 ranks, one from each half, that have the same quarter; `group` is all 8.
#
# In backward an expert gets gradients from the tokens of its whole half, because the all-to-all brings them. Summed over `own`, its gradient covers the tokens of all 8 ranks.
#
# **Predict.** 8 ranks, each expert on 2 of them. Each rank's loss is the mean over its own tokens, and all ranks have equally many. Someone averages an expert's gradient over its 2 ranks. How many times too large is it?

# %%
check(moe_too_large=...)

# %%
def expert_gradients(shared, experts, own, group=None):
    """Give each parameter the gradient of the mean loss over all ranks' tokens.

    Before the call, backward has left the gradients of each rank's mean loss over its own tokens;
    all ranks have the same number of tokens. An expert's gradient already covers all tokens sent to
    this rank. Sum it over the ranks of `own`, and divide the sum by the number of *all* ranks.
    shared, experts: lists of parameters of any dtype; one without a gradient counts as zeros.
    own: the group of the ranks that hold the same experts, perhaps this rank only.
    Cost: at most an all-reduce of each gradient: an expert's over `own`, the others over `group`.
    """
    raise NotImplementedError("exercise 4.6: about 5 lines")


# %%
expert_gradients = check(expert_gradients)

# %% [markdown]
# ### Further
#
# #### `moe_traffic`
# > difficulty 2/5 · importance 4/5 · 10 minutes · about 5 lines
#
# How much does each rank send to each other rank? Think of the four all-to-alls of a layer, and which way each of them goes.

# %%
def moe_traffic(counts, row_bytes):
    """Return the bytes that rank r sends to rank s in a layer, forward and backward: (R, R), int64.

    A row travels to its expert and back, and in backward its gradient takes both ways again. Rows
    that stay on their rank are not traffic. (The counts that ranks exchange are left out.)
    counts: (R, E), perhaps a view: how many rows of rank r chose expert e; rank 0 has the first E/R
        experts, and so on.
    row_bytes: bytes of one row of C numbers.
    Raises: ValueError if R does not divide E.
    """
    R, E = counts.shape
    raise NotImplementedError("exercise moe_traffic: about 5 lines")


# %%
moe_traffic = check(moe_traffic)

# %% [markdown]
# Here is the picture of section 2 as a matrix, for rows of Mixtral's width in bf16. Expert 2 is on rank 1. Over a whole step the matrix is symmetric, because each row travels both ways:

# %%
counts = torch.stack([part.flatten().bincount(minlength=8) for part in picture.chunk(4)])
plots.matrix(moe_traffic(counts, 2 * 4096))

# %% [markdown]
# #### `place_experts`
# > difficulty 5/5 · importance 3/5 · 35 minutes · about 30 lines · open: no recipe
#
# Loads are never quite even. But you are free to choose where to put each expert, and an expert may even have several copies, which then share its tokens. DeepSeek's balancer (EPLB) does that for serving, from the loads alone. You have a trace, so you also see which experts are chosen together. Find a plan. There is no recipe, and no best plan.
#
# The check counts two things. The fullest rank must have at most 1.1 times the mean load (if there are free slots). And the number of other nodes that a token must reach must be at most 0.95 times what it would be if experts were dealt out by load. A token crosses to a node once, and is passed on by NVLink there, as in DeepEP. Tokens are dealt to the ranks in turn. If an expert has copies, the one on the token's own node is taken. All slots are filled, and `per_node` divides the ranks. `chosen_together(chosen, n_experts)` gives (E, E): how many tokens chose both.

# %%
def place_experts(chosen, n_experts, ranks, slots, per_node):
    """Place experts on ranks: return [[experts of rank 0], [experts of rank 1], ...].

    Each list has `slots` entries, and each expert is in at least one of them. If an expert has
    several slots, they share its load.
    The busiest rank has little more than the mean load, and tokens must reach few nodes besides
    their own.
    chosen: (N, k), a trace of routing.
    per_node: the number of ranks in a node, which share NVLink.
    Raises: ValueError if there are fewer slots than experts.
    """
    raise NotImplementedError("exercise place_experts: about 30 lines")


# %%
place_experts = check(place_experts)

# %% [markdown]
# #### `dispatch_once`
# > difficulty 4/5 · importance 4/5 · 25 minutes · about 10 lines
#
# Inside a node rows travel over NVLink. Between nodes they take a card that is several times slower. In `dispatch_tokens` a token with three experts on another node crosses three times. DeepEP sends it once, to the GPU of that node that has the same number there, and that GPU passes it on to the others over NVLink.
#
# **Predict.** 256 experts on 8 nodes, and each token's 8 experts are drawn evenly. Sent once for each expert, a token crosses to other nodes 7 times on average. How often does it cross if each of them gets it once?

# %%
check(moe_node_crossings=...)

# %% [markdown]
# You already have a tool that sends rows to experts over any group. What would the experts be, so that it sends rows to nodes? The rank in the middle must also learn which experts a row is for. The check counts the bytes that leave the node, and prints them next to the library's.

# %%
def dispatch_once(x, chosen, n_experts, inside, across):
    """Send the rows of x to their experts' ranks, over the slow link once to each node.

    There are M nodes of L ranks. A row for another node crosses to the rank there that has the same
    number in its node as this rank, together with its k choices. That rank sends it on inside the
    node, once for each of its experts there.
    Node m has experts m E/M to (m+1) E/M - 1, spread over its ranks as in dispatch_tokens.
    inside, across: the groups of node_groups (lab 02): this rank's node, its peers on all nodes.
    Returns: (rows, counts). The rows for this rank are sorted by expert, in any order within one
        expert. counts has the number of rows for each expert of this rank, a tensor or a list.
    The arguments are not modified. Gradients add up inside the node, and cross once.
    Shape: x (N, C); chosen (N, k), int64, -1 for none; rows (n, C), in the dtype of x.
    Cost: between nodes, for each row and each other node that has one of its experts, the row and
        8 k bytes, and 16 bytes to each other node; backward repeats the rows.
    Raises: ValueError if M L does not divide E.
    """
    M, L, k = dist.get_world_size(across), dist.get_world_size(inside), chosen.shape[1]
    raise NotImplementedError("exercise dispatch_once: about 10 lines")


# %%
dispatch_once = check(dispatch_once)

# %% [markdown]
# How much does that save? It depends on how many of a token's experts share a node. Here 8 of 256 experts are drawn evenly, for more and more nodes. The third line has DeepSeek-V3's limit, at most 4 nodes:

# %%
nodes = (2, 4, 8, 16, 32, 64)
per_node, per_expert = zip(*(ep.even_crossings(8, 256, M) for M in nodes))
plots.crossings(nodes, {"once for each expert": per_expert, "once to each node": per_node,
                        "at most 4 nodes": [min(4, crossings) for crossings in per_node]})

# %% [markdown]
# Compare the lines at 8 nodes: there, once to each node saves only a third of the crossings, and with the limit 43% are saved. On the way back the same is done in reverse: DeepEP adds up a token's outputs inside the node, and the sum crosses once. Your backward already does that with the gradients.

# %% [markdown]
# #### `mxfp8_all_to_all`
# > difficulty 3/5 · importance 4/5 · 18 minutes · about 9 lines
#
# Rows can also be made smaller. `torch.float8_e4m3fn` has a sign, 4 bits for the power of two, and 3 bits after the leading one. Its largest number is 448, so numbers must be scaled first. In MXFP8, the format of Blackwell GPUs, each 32 numbers share a scale of one byte, a power of two.
#
# OCP's specification rounds that scale down, so that the largest numbers of a block may exceed 448, and are cut off. NVIDIA saw training diverge with it. With the scale rounded up, an 8B model trained on 15T tokens (arXiv 2506.08027). torchao calls this rounding RCEIL (`to_mx`, version 0.18: the same bits as yours).

# %%
def mxfp8_all_to_all(x, to, came, group=None):
    """Exchange rows as AllToAll does, in the format MXFP8; return them in the dtype of x.

    Each 32 consecutive numbers of a row are a block. A block is divided by its scale and rounded to
    float8_e4m3fn, whose largest number is 448. The scale is the smallest power of two that leaves
    no magnitude of the divided block above 448 (a block of zeros may have any). It travels as one
    byte, its exponent + 127. The receiver multiplies again.
    There is no gradient.
    Shape: x (n, C), finite; the result (sum of came, C).
    Cost: 1 + 1/32 bytes a number; at most two all-to-alls.
    Raises: ValueError if 32 does not divide C.
    """
    # torch.frexp takes the power of two out of a number. torch.float8_e8m0fnu is the type of a
    # scale of one byte. Send .view(torch.uint8): not every backend takes the 8-bit types.
    raise NotImplementedError("exercise mxfp8_all_to_all: about 9 lines")


# %%
mxfp8_all_to_all = check(mxfp8_all_to_all)

# %% [markdown]
# What does a scale for each 32 numbers buy? In these rows every 512th number is an outlier, which we make larger and larger. We look at the error of all *other* numbers, with your function and with torch's casts:

# %%
def rounding_errors(size):
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).to(device())
    x[:, ::512] *= size
    row = x.abs().amax(1, keepdim=True)
    results = {"MXFP8": mxfp8_all_to_all(x, [64], [64]),
               "float8, a scale a row": (x * 448 / row).to(torch.float8_e4m3fn).float() * row / 448,
               "int8, a scale a row": (x * 127 / row).round() * row / 127,
               "bfloat16": x.bfloat16().float()}
    inliers = torch.arange(4096, device=x.device) % 512 > 0
    return {name: ((y - x)[:, inliers].norm() / x[:, inliers].norm()).item()
            for name, y in results.items()}


sizes = [10**power for power in range(7)]
plots.rounding(sizes, launch(lambda: [rounding_errors(size) for size in sizes], ranks=1)[0])

# %% [markdown]
# Follow each line from the left: it rises where the outliers push the other numbers below its smallest step. With steps of equal size (int8) that happens soon; with an exponent in each number, late; and with a scale for each 32 numbers, only one block in 16 suffers.
#
# A block takes 33 bytes instead of bf16's 64, but that is not half the time. On four B200s in one node, torchao's 8-bit rows travelled 1.7 times as fast as bf16, but rounding, and sending scales, took the gain back (pull request 3203). So torchtitan's draft (pull request 2250) does not convert back: the expert's product takes the 8-bit rows as they came. Between nodes the rows themselves take longer, so there is more to win.

# %% [markdown]
# #### Which ranks are an expert group?
#
# Experts use the same GPUs as attention, but not the same groups. In a pipeline stage tp x cp x dp (attention) must equal etp x ep x edp (experts), and that is all: Megatron calls it folding (arXiv 2504.14960). By default it numbers ranks along tp or etp first, then along cp, ep and dp. So etp decides how far apart the ranks of an expert group are.
#
# **Predict.** 64 GPUs in nodes of 8, with tp 4, cp 2, dp 8 and ep 8. `--expert-tensor-parallel-size` (etp) keeps its default, which is tp: each expert is cut into 4. Over how many nodes is the expert group of rank 0 spread?

# %%
check(moe_ep_nodes=...)

# %% [markdown]
# A `Mesh` (lab 12) computes places without running ranks. Its last axis varies fastest:

# %% tags=["nbval-check-output"]
from ranklab.mesh import Mesh

for etp in (4, 1):
    experts = Mesh({"copies": 64 // (8 * etp), "ep": 8, "etp": etp})
    group = experts.ranks_along("ep", 0)
    print(f"etp {etp}: experts over ranks {group}; nodes: {len({rank // 8 for rank in group})}")

# %% [markdown]
# With etp 1, experts are whole, and the all-to-alls of the same 8 ranks stay inside a node. All else is unchanged: attention still has its tp 4.

# %% [markdown]
# #### `chunked_scan`
# > difficulty 3/5 · importance 3/5 · 12 minutes · about 7 lines
#
# Experts replace the MLP. State-space models replace attention, by h[t] = a[t] h[t-1] + b[t], elementwise, with nothing before the first token. (a and b follow from the tokens, and may have any sign.) Which parallelism fits here? The weights are matrices like all others. What is new is the sequence: all that a token knows of the past is *one state*. `ep.scan(a, b)` is the plain loop.

# %%
from ranklab.expert_parallel import scan


def chunked_scan(a, b, group=None):
    """Return `scan` over the tokens of all ranks; this rank has a part of them, in rank order.

    Each rank scans its own part, and multiplies up its a, before it waits for the previous rank's
    state. That state adds one term to each h[t]: itself times a[0] ... a[t]. After it has come, at
    most 20 tensor operations follow, views included.
    Shape: a, b and the result (B, T/R, C), all of one type.
    Cost: one message of (B, C) from each rank but the last.
    """
    raise NotImplementedError("exercise chunked_scan: about 7 lines")


# %%
chunked_scan = check(chunked_scan)

# %% [markdown]
# In lab 10's ring, eight ranks each send 7 blocks of keys, and each block is as long as a part of the sequence. Here a rank sends one state, whatever the length. But the ranks wait in a row, so it matters how much each does before it waits.

# %% [markdown]
# ## 5. The real thing
#
# Here is DeepSpeed's MoE layer with the same router and experts, on four ranks. No token is dropped:

# %%
from ranklab.peers.experts import deepspeed_moe


def side_by_side():
    torch.manual_seed(0)
    layer = ep.MoE(ep.MoEConfig(n_embd=16, n_expert=8, balance="none")).to(device())
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    peer = deepspeed_moe(layer, 2)
    vars(layer).update(parts)
    ep.spread_experts(layer, dist.group.WORLD)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 8, 16).to(device())
    for module in (layer, lambda x: peer(x)[0]):
        y = x.clone().requires_grad_()
        with Traffic() as traffic:
            out = module(y)
            out.square().sum().backward()
        yield (f"out {out.detach().double().norm():.3f}, dx {y.grad.double().norm():.2f}, "
               f"{traffic.sent_bytes:,} bytes: {dict(traffic.calls)}")


# %% tags=["nbval-check-output"]
lines = launch(lambda: [*side_by_side()], ranks=4)[0]
for name, line in zip(("yours", "DeepSpeed"), lines):
    print(f"{name:10}", line)

# %% [markdown]
# DeepSpeed gets the same values, but sends almost twice the bytes, because its all-to-all has equal parts. Each rank pads the rows for each expert to the largest number that any rank has for any expert (one all-reduce finds it). Yours sends only real rows, but needs to know the sizes. On GPUs that means a wait for the device in each layer.
#
# The Mixtral of transformers has its own router and experts. We replace its experts with this rank's, wrapped in your functions. Below is the norm of one rank's logits, and of the whole model's in one process:

# %% tags=["nbval-check-output"]
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    from ranklab.peers.experts import spread_transformers

    shape = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                          num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)
    torch.manual_seed(0)
    model, ids = MixtralForCausalLM(shape).to(device()), torch.randint(64, (4, 12)).to(device())
    whole = model(ids, use_cache=False).logits.detach()
    spread_transformers(model, dispatch=dispatch_tokens, combine=combine_tokens)
    batch = ids[dist.get_rank() :: 4]
    logits = model(batch, use_cache=False).logits.detach()
    return (f"one process {whole[dist.get_rank() :: 4].norm():.4f}, "
            f"a rank with 2 of 8 experts {logits.norm():.4f}")


if importlib.util.find_spec("transformers"):
    heavy = ["transformers.modeling_utils"]  # imported once, and not on each rank
    print(launch(mixtral, ranks=4, preload=heavy)[1])

# %% [markdown]
# In Megatron-LM you write `--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8`, with `--moe-router-load-balancing-type aux_loss` (`seq_aux_loss` counts in each sequence, as here), `--moe-router-pre-softmax` for Switch's weights, and `--moe-expert-capacity-factor`, counted over a rank's tokens. If you combine expert and tensor parallelism, it demands sequence parallelism (`MoELayer` raises without it).

# %% [markdown]
# ## 6. Project
#
# **Experts against a dense model of equal FLOPs.** Two GPTs learn the same text, with your functions. One has an MLP of width 4 C in each block. The other has 16 experts of width 2 C, and a token goes to two of them, so a token costs the same in both, except for the router. Experts are spread over all four ranks, and 100 steps take a quarter of a minute. Which model reads held-out text better?

# %%
from ranklab.projects import expert_parallel as project

functions = parts | {"balance_loss": load_balance_loss, "average": expert_gradients}
outcome = project.run(**functions)
print(project.report(outcome))

# %% [markdown]
# Now without balancing, and without the dense model:

# %%
baseline = project.run(**functions, balance="none", compare=False)
print(project.report(baseline))

# %%
plots.loads({"with the loss": outcome.loads, "without": baseline.loads})

# %% [markdown]
# A load of 8 is the most that is possible: then the expert is among the two of *every* token. You might expect balance to help, but this small model reads a little better without it, because even loads are bought for speed, and cost something. If each expert were alone on a rank, all ranks would wait for one with eight times the mean to compute. With four experts on a rank it is two to four times. Both runs *begin* like that. The MoE guide of Megatron Core 0.9 to 0.15 warns that a dropless model may run out of memory in its first 100 to 300 steps.
#
# **Your turn.** Change one thing, and first write down which numbers will change. Ideas: `balance="bias"` (it moves slowly, so give it 200 steps); `factor=1.25`; `top_k=1` (then an expert is 4 C wide, and the weights are Switch's: why?); `ep=2`, so that each expert is on two ranks; `shared_width=128`, a shared expert for all tokens.

# %%
for change in ({}, {"ep": 2}):
    print(project.report(project.run(**(functions | {"steps": 10, "compare": False} | change))))
    print()

# %% [markdown]
# ## 7. Measure
#
# How many bytes of rows does each rank send for a layer, forward and backward, if one expert is popular? `moe_traffic` predicts it from the counts:

# %%
def counted(bonus, N=64, C=16, E=8):
    torch.manual_seed(dist.get_rank())
    x = torch.randn(N, C).to(device()).requires_grad_()
    scores = torch.randn(N, E).to(device())
    scores[:, 2] += bonus
    chosen, weights = top_k_route(scores, 2)
    with Traffic() as traffic:
        rows, sent = dispatch_tokens(x, chosen, E)
        combine_tokens(rows, sent, weights).sum().backward()
    rows = [op.sent_bytes for op in traffic.ops if op.name == "all_to_all"]
    return chosen.flatten().bincount(minlength=E).cpu(), sum(rows) - min(rows)  # without the counts


# %% tags=["nbval-check-output"]
for bonus in (0.0, 3.0):
    results = launch(counted, bonus, ranks=4)
    predictions = moe_traffic(torch.stack([counts for counts, _ in results]), 4 * 16).sum(1)
    print(f"liked by {bonus:.0f}: said {predictions.tolist()}, "
          f"counted {[nbytes for _, nbytes in results]}")

# %% [markdown]
# The rank with the popular expert also sends the most, because all rows that came must go back.
#
# And what does a hot expert cost in time? Take 64 ranks, and send a growing part of all rows to one of them. All ranks wait for it, for its computing and for its messages. We count here, and use no clock. Without a limit, if that rank has x times the mean load, the layer takes x times as long as with even loads. With a capacity of 1.25 it takes at most 1.25 times as long, and the rest is dropped.

# %%
shares = [1 / 64 * 1.15**n for n in range(21)]
plots.hot(shares, {"dropless": [64 * share for share in shares],
                   "capacity 1.25": [min(64 * share, 1.25) for share in shares]})

# %% [markdown]
# On a laptop the clock says little here, because ranks share cores: while one waits, another computes.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 11` in a terminal asks these and more, with other numbers each time.

# %%
questions("11_expert_parallel")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# python -m ranklab.projects.expert_parallel --balance bias
# torchrun --nproc-per-node 8 -m ranklab.projects.expert_parallel --size gpt2 --ep 8
# sbatch labs/jobs/expert_parallel.sbatch
# python -m ranklab.projects.hybrid --size mixtral --dry-run
# ```
#
# The last command has Mixtral's size, and still runs on your laptop. One process poses as the first of 64 A100s (tensor 2 x pipeline 4 x expert 8 ranks, lab 12). It counts what that GPU holds, 58.8 GB, and what it sends along the expert axis in a step of 1,024 sequences, 243 GB if loads are even. All but 1% of that are rows, and the rest are gradients of the weights that all ranks share. Without `--dry-run`, and under torchrun on 64 GPUs, it trains.
#
# What changes there:
#
# - **One product for all experts.** A loop over experts starts many small kernels. `torch.nn.functional.grouped_mm` (bfloat16) multiplies all rows in one kernel, and `ep.MoE` uses it where it can.
# - **The network.** Tensor parallelism stays inside a node, but experts often can't. DeepSeek-V3 spread its 256 experts over 64 GPUs in 8 nodes, and lets a token go to 4 nodes at most (arXiv 2412.19437, section 3.2). Its library DeepEP sends a token to a node once, and passes it on over NVLink there. Its authors measured, on H800s, 43 GB/s a GPU with 2 nodes, 58 with 4 and 51 with 8 (DeepEP's first version). We took that for the speed of the card, until we asked how 58 fit through a card of 50. The count includes the rows for the GPU's own node, which no card carries. With even loads they are 1/2, 1/4 and 1/8 of all. So 22, 44 and 45 GB/s went through each card of 50.
# - **Hiding it.** The expert needs its rows now, so there is little to hide behind. A *shared expert*, which all tokens use, can compute meanwhile. DeepSeek-V3 runs two micro-batches at once, so that one computes while the other sends (DualPipe, lab 09). Megatron has `--overlap-moe-expert-parallel-comm`.
# - **The other axes.** Ranks with different experts take different rows, so they are a part of the data-parallel ranks. In lab 12's layouts `ep=2` multiplies the ranks: `1x1x1,ep=2` is two ranks, each with its own rows. `ranklab compare --experts 4 --layouts 1x1x1,ep=2 2x1x1,ep=2 1x2x1,ep=2` trains each of them, and the losses agree.
# - **Which dispatcher?** In Megatron-LM `--moe-token-dispatcher-type` is `allgather` by default: each rank gets all tokens of the group, which suits few ranks, or a large k. `alltoall` is what you have built. `flex` calls a library, which `--moe-flex-dispatcher-backend` names: `deepep`, `hybridep` (NVIDIA's; fewer SMs), or `ncclep`. For NVLink across hosts Megatron's documentation names HybridEP alone. Both DeepEP and HybridEP must be installed, and want `--moe-router-dtype fp32`. Megatron-Bridge's guide starts with `alltoall`, and then compares.
# - **In one rack.** EP 64 fits into the 72 GPUs of an NVL72. 4,096 tokens of DeepSeek-V3 are 940 MB of rows there and back, in bf16. Over NVLink (900 GB/s) they take 1.0 ms, over a card of 50 GB/s 18.5. Megatron-Bridge's benchmark of DeepSeek-V3 on 256 GB200s has EP 64, 4 pipeline stages and tp 1.
# - **Folding** (see Further). In Megatron ep need not divide the data-parallel ranks. In this course it must.
# - **A benchmark may hide the loads.** `--moe-router-force-load-balancing` replaces the router's logits by random numbers. Then, with 4,096 tokens on each of 64 ranks and 8 of 256 experts for each, the fullest rank has 1.6% more rows than the mean (simulated), and its time and memory show nothing of your router. Megatron-Bridge says in a footnote that all its MoE benchmarks are run this way. `--moe-router-force-biased 1.0` makes loads uneven on purpose. Run both, and believe neither: then measure your own router, after its first thousand steps.
# - **Number formats.** This lab's router and sums are float32. Megatron's router has the type of x unless you pass `--moe-router-dtype fp32`, as its guide advises, and with `alltoall` results travel and add up in bf16. Rows may travel in 8 bits: DeepSeek-V3 dispatches in FP8 and combines in BF16.
#
# What to expect (published, not measured by us): 468 TFLOP/s a GPU for Mixtral 8x7B in bf16, 47% of an H100's peak (Megatron Core 0.9, by its MoE guide up to 0.15; nodes of 8 H100s). This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 10. Take with you
#
# 1. You pay FLOPs for the parameters a token uses and memory for all of them: in DeepSeek-V3, for 37 billion and for 671 billion.
# 2. Tokens travel, k rows each, four times in a layer and step. The width of an expert decides whether bytes or FLOPs take longer.
# 3. Everybody waits for the fullest rank. A loss or a bias evens the loads; a capacity of 1.25 times the mean bounds them, and drops tokens.
#
# **What we left out**
#
# - **Expert choice**: the experts choose tokens (arXiv 2202.09368). Loads are even by construction, but a token's experts depend on later tokens.
# - **Sending a token once to a rank** that has several of its experts. Ours sends it once for each expert, also inside a node (`dispatch_once`).
# - **Changing the plan while training**: `place_experts` says where experts should stand, but we do not move their weights and optimizer states.
# - **Backward of `chunked_scan`**: the same scan from the last rank to the first.
#
# Next: [12_hybrid](12_hybrid.ipynb).
