# %% [markdown]
# # 11 Expert parallelism: a model of which a token meets a part
#
# > 180 minutes · difficulty 4/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# In the labs before, each token went through each weight. A model with twice the weights cost twice the FLOPs. A **mixture of experts** breaks that link. Each block has several MLPs, the *experts*, and a small matrix, the *router*, sends each token to the best k of them. Mixtral has 8 experts in each of 32 layers, and a token meets two. DeepSeek-V3 has 671 billion parameters, and a token meets 37 billion of them (arXiv 2412.19437).
#
# So FLOPs are cheap, and memory is not: all experts must be somewhere. **Expert parallelism** puts them on different ranks, and *tokens travel*: to the ranks that have their experts, and back. Who gets how many is decided by the router, anew in each step: how large a message is, no rank knows before the router has spoken.
#
# The lab builds the router, the two all-to-alls, and what keeps the loads even. It needs labs 00 to 03.

# %%
import importlib.util

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab import answer, check, device, hint, launch, questions
from ranklab import expert_parallel as ep
from ranklab.meter import Traffic

# %% [markdown]
# ## 2. Picture
#
# Four ranks with four tokens each; eight experts, two on each rank; each token goes to two. The colour of a line is the rank of its token. Right: how many rows each rank gets. The even number would be 8.

# %%
from ranklab.plots import expert_parallel as plots

wanted = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
wanted[:, 2] += 1.5  # one expert is liked more than the others
picture = wanted.topk(2).indices
plots.layer(picture.tolist(), ranks=4, n_experts=8)

# %% [markdown]
# **Predict.** Mixtral 8x7B: width 4,096, 32 layers, 8 experts in each. Embedding and head are two matrices of 32,000 x 4,096. Attention has q and the output, 4,096 x 4,096 each, and k and v, 4,096 x 1,024 each. An expert has three matrices of 4,096 x 14,336. How many billion parameters? (Norms and routers don't matter.)

# %%
check(moe_total_billions=...)

# %% [markdown]
# ## 3. Smallest working code
#
# Two ranks, one expert on each. Rank 0 has three tokens, rank 1 has one. An expert here multiplies by 10 or by 100. `all_to_all_single(out, x, came, to)`: where rows arrive, what is sent, how many come from each rank, how many go to each.

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
# That is the whole idea. What is left: who goes where, in which order rows must lie, how a rank knows what will come, and what keeps one expert from getting everything.

# %% [markdown]
# ## 4. Build it
#
# Letters: B sequences of T tokens, N = B T tokens of a rank, C width, E experts, k experts of a token, R ranks. Rank r has experts r E/R to (r+1) E/R - 1. What is given:

# %%
from ranklab.expert_parallel.dispatch import AllToAll, Sent
from ranklab.expert_parallel.place import chosen_together
from ranklab.expert_parallel.route import expert_slots

# %% [markdown]
# ### 4.1 The router
# > difficulty 2/5 · importance 5/5 · 12 minutes · about 6 lines
#
# The router gives each token a number for each expert: `logits`. The k best are *chosen*, and their outputs are added up with *weights*. Two conventions are in use. Mixtral's weights add up to 1. Switch's are the probabilities among all experts, so an expert that is chosen without conviction adds less. The choice itself has no gradient: from the tokens' loss, the router learns through the weights alone. So with k = 1 take Switch's: weights that add up to 1 would all *be* 1, and teach it nothing.
#
# A `bias` can push tokens to experts that have too few. It changes who is chosen, never the weights: see 4.5.

# %%
def top_k_route(logits, k, renormalize=True, bias=None):
    """(chosen, weights): the k experts of each token, the best first, and how much each counts.

    Best by the logits; with a bias, by probability + bias. Of equals the first counts as better.
    shape        logits (..., E); chosen (..., k), int64; weights (..., k), float32
    renormalize  the weights of a token add up to 1: the softmax goes over its k experts (Mixtral).
                 False: it goes over all E, and the k weights stay what they are (Switch)
    bias         (E,), added to the probabilities of all E where experts are chosen, and nowhere
                 else (DeepSeek-V3 adds it to sigmoids)
    error        ValueError where k is not between 1 and E
    """
    raise NotImplementedError("exercise 4.1: about 6 lines")


# %%
top_k_route = check(top_k_route)

# %% [markdown]
# ### 4.2 Capacity
# > difficulty 3/5 · importance 4/5 · 20 minutes · about 6 lines
#
# The first large models gave each expert a fixed number of places, `factor` times the mean, so that all tensors have a known size. A token that finds no place is *dropped*: the residual connection carries it past the layer. GShard counts in groups of tokens (arXiv 2006.16668). Here a group is a sequence, and then what is dropped does not depend on which rank has it.
#
# **Predict.** A sequence of 4,096 tokens, 8 experts, 2 choices of each token, factor 1.25. How many places has an expert?

# %%
check(moe_slots=...)

# %% [markdown]
# `expert_slots(T, n_experts, k, factor)` is that number, rounded up. `chosen` has no -1 yet.

# %%
def capacity(chosen, n_experts, factor):
    """`chosen` with -1 wherever an expert has no room: a copy.

    In each sequence an expert takes expert_slots(T, n_experts, k, factor) tokens. All first choices
    come before all second ones; among each, early tokens come first.
    shape  chosen (..., T, k)
    """
    T, k = chosen.shape[-2:]
    raise NotImplementedError("exercise 4.2: about 6 lines")


# %%
capacity = check(capacity)

# %% [markdown]
# How many choices a skewed router loses, by your function. One expert is liked more and more:

# %% tags=["nbval-check-output"]
logits = torch.randn(8, 256, 8, generator=torch.Generator().manual_seed(0))
for liked in (0.0, 1.0, 2.0):
    chosen, _ = top_k_route(logits + liked * F.one_hot(torch.tensor(0), 8), 2)
    lost = [(capacity(chosen, 8, factor) < 0).float().mean() for factor in (1.0, 1.25, 2.0)]
    print(f"logit + {liked:.0f}: expert 0 gets {(chosen == 0).float().mean():.0%} of all choices; "
          "dropped at factor 1, 1.25, 2: " + ", ".join(f"{part:.0%}" for part in lost))

# %% [markdown]
# Today many models are *dropless*: an expert takes what comes, and sizes are asked for. The next exercise does both, because a dropped choice is just -1.

# %% [markdown]
# ### 4.3 There
# > difficulty 5/5 · importance 5/5 · 35 minutes · about 11 lines
#
# **Predict.** Each of 8 ranks has 4,096 tokens of width 4,096 in bf16 and one of 8 experts; k = 2, and loads are even. How many MB does a rank send to others when it dispatches?

# %%
check(moe_dispatch_mb=...)

# %% [markdown]
# Given is `AllToAll.apply(x, to, came, group)`: of the rows of x, `to[0]` go to rank 0, the next `to[1]` to rank 1, and so on; `came[r]` come from rank r, and lie in rank order. Its gradient goes the other way. `to` and `came` are lists of numbers.
#
# `Sent` is what the way back needs. Its fields:
#
# - `order`: which places of `chosen.flatten()` were sent, in the order in which they were: sorted by expert. Place i belongs to token i // k.
# - `to`, `came`: how many rows went to each rank, and came from each; two lists of R numbers.
# - `by_expert`: the order that sorts the rows that came by expert. (They come sorted by rank.)
# - `counts`: how many rows each expert of this rank has, (E/R,); a list will do.
#
# How does a rank know what will come? An all-to-all without sizes sends equal parts: of E counts, each rank gets those of *its* E/R experts, from each rank in turn. So it knows how many rows come, and the expert of each: label them, and sort the labels. All sorts are stable.

# %%
def dispatch_tokens(x, chosen, n_experts, group=None):
    """(rows, Sent): of all ranks' x, the rows that chose an expert of this rank.

    Rank r has experts r E/R to (r+1) E/R - 1. The rows are sorted by expert, then by the rank that
    they come from, then as they stand there. A row that chose several experts here comes several
    times. `came` is known by asking: a rank tells each other one how many rows each expert gets.
    shape  x (N, C); chosen (N, k), -1 for none; rows (n, C)
    cost   an all-to-all of E counts, and one of k N rows or fewer; backward the rows again
    error  ValueError where R does not divide E
    """
    R, k, flat = dist.get_world_size(group), chosen.shape[1], chosen.flatten()
    raise NotImplementedError("exercise 4.3: about 11 lines")


# %%
dispatch_tokens = check(dispatch_tokens)

# %% [markdown]
# ### 4.4 And back
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 5 lines
#
# The experts have made something of each row. Now everything is undone, the last step first. A rank may have no token at all: N = 0.

# %%
def combine_tokens(rows, sent, weights, group=None):
    """Each token's sum of weight times what its experts have made of it, (N, C) in float32.

    A token without an expert gets zeros.
    shape  rows (n, C), in the order of dispatch_tokens; weights (N, k)
    cost   an all-to-all of the rows; backward again
    """
    raise NotImplementedError("exercise 4.4: about 5 lines")


# %%
combine_tokens = check(combine_tokens)

# %% [markdown]
# The layer, by your functions, on 1, 2 and 4 ranks: the same eight tokens, and the same result. `ep.MoE` has router and experts; `vars(layer).update` puts your functions in, and `ep.spread_experts` leaves a rank its own experts. Four ranks have half the tokens that two have. Does each send half?

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
    return f"{total.item():.6f}; a rank has {numbers} numbers and sends {traffic.sent_bytes} bytes"


for ranks in (1, 2, 4):
    print(f"{ranks} ranks: sum of squares", launch(same_tokens, ranks=ranks)[0])

# %% [markdown]
# The fewer experts a rank has, the more of its rows leave it: 1/2 on two ranks, 3/4 on four, nearly all on many.

# %% [markdown]
# ### 4.5 Even loads
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 4 lines
#
# An expert that gets more tokens learns more, becomes better, and gets more still. Left alone, a router often ends with a few experts that do everything. And the rank with the fullest expert is the one for which all wait.
#
# Switch adds a loss (arXiv 2101.03961). f_e is the part of all choices that fell on expert e. It is a count, and has no gradient. P_e is the mean probability that the router gave to e: it can be moved. E times the sum of f_e P_e is 1 for even loads, and more if large f meet large P. Its gradient lowers the probability of the experts that have too much.
#
# The other way has no loss: after each step a bias goes up a little for experts with too few tokens, and down for the others (arXiv 2408.15664). DeepSeek-V3 does that, with a very small loss in each sequence beside it (arXiv 2412.19437). `ep.balance_bias` is one line, `bias += rate * (loads.float().mean() - loads).sign()`. The loss is added with a weight of 0.01 here, for each token as much.

# %%
def load_balance_loss(logits, chosen):
    """What uneven loads cost: E times the sum of f_e P_e, in each sequence.

    f_e is the part of all choices that fell on expert e (a count: it has no gradient), P_e the mean
    probability that the router gave it. Even loads have 1.
    shape  logits (..., T, E), chosen (..., T, k), before any is dropped; the result (...)
    """
    E = logits.shape[-1]
    raise NotImplementedError("exercise 4.5: about 4 lines")


# %%
load_balance_loss = check(load_balance_loss)

# %% [markdown]
# "In each sequence" is a choice. Over a micro-batch, over a rank's rows, over the whole batch: each is another loss, because a product of two means is no mean of products. Counted in each sequence, the loss is the same for any number of ranks. The price is that each single sequence must be even; a text about one subject may want few experts.

# %% [markdown]
# ### 4.6 Whose gradient
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 5 lines
#
# Ranks with other experts have other rows. For the router, the norms and attention they are data-parallel ranks: *these* gradients are averaged over all ranks. An expert is on a few ranks only. Take 8 ranks that dispatch in two halves of 4: in each half there are all experts, a quarter on each rank. `own` joins the 2 ranks, one of each half, that have the same quarter; `group` is all 8.
#
# In backward an expert has met the tokens of its whole half: their gradients came by the all-to-all. Added up over `own`, they are those of all 8 ranks.
#
# **Predict.** 8 ranks, each expert on 2 of them. Each rank's loss is the mean over its own tokens, and all have as many. Someone averages an expert's gradient over its 2 ranks. How many times too large is it?

# %%
check(moe_too_large=...)

# %%
def expert_gradients(shared, experts, own, group=None):
    """Each parameter has the gradient of the mean loss over all ranks' tokens.

    Backward has left the gradients of each rank's mean loss over its own tokens, and all ranks have
    as many. That of an expert is complete for all tokens that came to this rank: what is missing
    is on the other ranks of `own`, and it is divided by the number of *all* ranks.
    shared, experts  lists of parameters; one without a gradient counts as zeros
    own    the group of the ranks that hold the same experts; perhaps this rank alone
    cost   an all-reduce of each gradient: of an expert's over `own`, of the others over `group`
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
# Who sends how much to whom. Think of the four all-to-alls of a layer, and which way each of them goes.

# %%
def moe_traffic(counts, row_bytes):
    """(R, R): the bytes that rank r sends rank s in a layer, forward and backward.

    A row goes there and comes back; in backward the gradient of each takes the way back. What stays
    on its rank is no traffic. (The counts that ranks tell each other are not in it.)
    counts     (R, E): how many rows of rank r chose expert e; each rank has E/R experts in a row
    row_bytes  of one row: C numbers
    error      ValueError where R does not divide E
    """
    R, E = counts.shape
    raise NotImplementedError("exercise moe_traffic: about 5 lines")


# %%
moe_traffic = check(moe_traffic)

# %% [markdown]
# The picture of section 2 as a matrix, for rows of Mixtral's width in bf16. Expert 2 is on rank 1. Over a whole step the matrix is symmetric, because each row takes both ways:

# %%
counts = torch.stack([part.flatten().bincount(minlength=8) for part in picture.chunk(4)])
plots.matrix(moe_traffic(counts, 2 * 4096))

# %% [markdown]
# #### `place_experts` - open
# > difficulty 5/5 · importance 3/5 · 35 minutes · about 30 lines
#
# Loads are never quite even. But who stands where is free, and an expert may stand in several places: its tokens are then shared. DeepSeek's balancer (EPLB) does that for serving, from the loads. You have a trace, and so you see who is chosen together, too. Find a plan. There is no recipe, and no best plan.
#
# The check counts the load of the fullest rank beside the mean (at most 1.1, where there are free slots), and how many nodes beside its own a token must reach: at most 0.95 times as many as if experts were dealt out by load. A token crosses to a node once, and is passed on by NVLink there, as DeepEP does it. Tokens are on the ranks in turn; where an expert has copies, the one on the own node is taken. All slots are filled, and `per_node` divides the ranks. `chosen_together(chosen, n_experts)` gives (E, E): how many tokens chose both.

# %%
def place_experts(chosen, n_experts, ranks, slots, per_node):
    """[[experts of rank 0], [of rank 1], ...]: `slots` on each rank, and each expert at least once.

    An expert in several slots has its load shared by them. The fullest rank has little more than
    the mean load, and tokens must reach few nodes beside their own.
    chosen    (N, k): a trace
    per_node  ranks of a node, which share NVLink
    error     ValueError where the slots are fewer than the experts
    """
    raise NotImplementedError("exercise place_experts: about 30 lines")


# %%
place_experts = check(place_experts)

# %% [markdown]
# #### `chunked_scan`
# > difficulty 3/5 · importance 3/5 · 12 minutes · about 7 lines
#
# Experts replace the MLP. State-space models replace attention: h[t] = a[t] h[t-1] + b[t], elementwise, with nothing before the first token (a and b follow from the tokens; they may have any sign). Which parallelism fits? Its weights are matrices like all others. The sequence is the new thing: all that a token knows of the past is *one state*. `ep.scan(a, b)` is the plain loop.

# %%
from ranklab.expert_parallel import scan


def chunked_scan(a, b, group=None):
    """`scan` over the tokens of all ranks, of which this rank has a part, in rank order.

    Each rank scans its own part before it waits for the state of the rank before it. That state
    adds one term to each h[t]: itself times a[0] ... a[t].
    shape  a, b and the result (B, T/R, C)
    cost   one message of (B, C) from each rank but the last
    """
    raise NotImplementedError("exercise chunked_scan: about 7 lines")


# %%
chunked_scan = check(chunked_scan)

# %% [markdown]
# Lab 10 makes attention whole by a ring: eight ranks send 7 blocks of keys, each as long as a part of the sequence. Here it is one state, whatever the length. But the ranks wait in a row, so what each does before it waits matters.

# %% [markdown]
# ## 5. The real thing
#
# DeepSpeed's MoE layer with the same router and experts, over four ranks. No token is dropped:

# %%
from ranklab.expert_parallel.peers import deepspeed_moe


def side_by_side():
    torch.manual_seed(0)
    layer = ep.MoE(ep.MoEConfig(n_embd=16, n_expert=8, balance="none")).to(device())
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    theirs = deepspeed_moe(layer, 2)
    vars(layer).update(parts)
    ep.spread_experts(layer, dist.group.WORLD)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 8, 16, device=device())
    for module in (layer, lambda x: theirs(x)[0]):
        y = x.clone().requires_grad_()
        with Traffic() as traffic:
            out = module(y)
            out.square().sum().backward()
        yield (f"out {out.detach().double().norm():.5f}, dx {y.grad.double().norm():.5f}, "
               f"{traffic.sent_bytes:,} bytes: {dict(traffic.calls)}")


# %% tags=["nbval-check-output"]
found = launch(lambda: [*side_by_side()], ranks=4)[0]
for name, line in zip(("yours", "DeepSpeed"), found):
    print(f"{name:10}", line)

# %% [markdown]
# DeepSpeed has the same values, and sends almost twice the bytes. Its all-to-all has equal parts: each rank pads the rows for each expert to the largest number that any rank has for any expert, and one all-reduce finds it. Yours sends what there is, and needs to know the sizes: on GPUs that is a wait for the device in each layer.
#
# transformers' Mixtral has router and experts of its own. Its experts are replaced by those of this rank, with your functions around them; the norm of one rank's logits, beside the whole model in one process:

# %% tags=["nbval-check-output"]
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    from ranklab.expert_parallel.peers import spread_transformers

    shape = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                          num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)
    torch.manual_seed(0)
    model, ids = MixtralForCausalLM(shape).to(device()), torch.randint(64, (4, 12)).to(device())
    whole = model(ids, use_cache=False).logits.detach()
    spread_transformers(model, dispatch=dispatch_tokens, combine=combine_tokens)
    mine = ids[dist.get_rank() :: 4]
    logits = model(mine, use_cache=False).logits.detach()
    return (f"one process {whole[dist.get_rank() :: 4].norm():.4f}, "
            f"a rank with 2 of 8 experts {logits.norm():.4f}")


if importlib.util.find_spec("transformers"):
    print(launch(mixtral, ranks=4)[1])

# %% [markdown]
# In Megatron-LM: `--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8`, with `--moe-router-load-balancing-type aux_loss` (`seq_aux_loss` counts in each sequence, as here), `--moe-router-pre-softmax` for Switch's weights, and `--moe-expert-capacity-factor`, counted over a rank's tokens. With tensor parallelism beside expert parallelism it demands sequence parallelism (Megatron Core's MoE guide).

# %% [markdown]
# ## 6. Project
#
# **Experts beside a dense model of equal FLOPs.** Two GPTs, by your functions, on the same text: one has an MLP of width 4 C in each block, the other 16 experts of width 2 C, of which a token meets two. So a token costs as much in both, but for the router. Four ranks, experts over all of them, 200 steps: half a minute. Which one reads held-out text better?

# %%
from ranklab.projects import expert_parallel as project

mine = parts | {"balance_loss": load_balance_loss, "average": expert_gradients}
found = project.run(**mine)
print(project.report(found))

# %% [markdown]
# The same without balancing, and without the dense model:

# %%
alone = project.run(**mine, balance="none", compare=False)
print(project.report(alone))

# %%
plots.loads({"with the loss": found.loads, "without": alone.loads})

# %% [markdown]
# A load of 8 is the most that is possible: the expert is among the two of *every* token. This small model even reads a little better without: even loads are bought for speed, and cost something. Were each expert alone on a rank, all would wait for one with eight times the mean to compute; with four on a rank it is two to four times. Both runs *begin* like that. Megatron Core's MoE guide warns that a dropless model may run out of memory in its first 100 to 300 steps.
#
# **Your turn.** Change one thing, and first write down which numbers change. Ideas: `balance="bias"` (it moves slowly: give it the 200 steps); `factor=1.25`; `top_k=1` (an expert is 4 C wide then, and the weights are Switch's: why?); `ep=2`, so that each expert is on two ranks; `shared_width=128`, an expert for all tokens.

# %%
for change in ({}, {"ep": 2}):
    print(project.report(project.run(**(mine | {"steps": 10, "compare": False} | change))))
    print()

# %% [markdown]
# ## 7. Measure
#
# Predicted beside counted: what each rank sends in the rows of a layer, forward and backward, where one expert is liked by all. `moe_traffic` says it from the counts.

# %%
def counted(liked, N=64, C=16, E=8):
    torch.manual_seed(dist.get_rank())
    x = torch.randn(N, C, device=device(), requires_grad=True)
    scores = torch.randn(N, E, device=device())
    scores[:, 2] += liked
    chosen, weights = top_k_route(scores, 2)
    with Traffic() as traffic:
        rows, sent = dispatch_tokens(x, chosen, E)
        combine_tokens(rows, sent, weights).sum().backward()
    rows = [op.sent_bytes for op in traffic.ops if op.name == "all_to_all"]
    return chosen.flatten().bincount(minlength=E).cpu(), sum(rows) - min(rows)  # without the counts


# %% tags=["nbval-check-output"]
for liked in (0.0, 3.0):
    seen = launch(counted, liked, ranks=4)
    said = moe_traffic(torch.stack([counts for counts, _ in seen]), 4 * 16).sum(1).tolist()
    print(f"liked by {liked:.0f}: said {said}, counted {[nbytes for _, nbytes in seen]}")

# %% [markdown]
# The rank with the liked expert sends most, too: what came must go back.
#
# What a hot expert costs: 64 ranks, and a part of all rows goes to one of them. All wait for it, both for its computing and for its messages. By counting, not by a clock: without a limit the layer takes as many times the even time as that rank has times the mean. With a capacity of 1.25 it takes 1.25 times at most, and the rest is dropped.

# %%
shares = [1 / 64 * 1.15**n for n in range(21)]
plots.hot(shares, {"dropless": [64 * share for share in shares],
                   "capacity 1.25": [min(64 * share, 1.25) for share in shares]})

# %% [markdown]
# On a laptop the clock says little here: ranks share cores, and the waiting of one is the computing of another.

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
# The last one is Mixtral's size, and runs on your laptop: one process poses as the first of 64 A100s (tensor 2 x pipeline 4 x expert 8 ranks, lab 12) and counts what that one holds, 58.8 GB, and what it sends along the expert axis in a step of 1,024 sequences, 243 GB if loads are even. All but 1% of it are rows; the rest are gradients of what all share. Without `--dry-run`, and under torchrun on 64 GPUs, it trains.
#
# What changes there:
#
# - **One product for all experts.** A loop over experts starts many small kernels. `torch.nn.functional.grouped_mm` (bfloat16) multiplies all rows in one: `ep.MoE` takes it where it can.
# - **The network.** Tensor parallelism stays inside a node; experts often can't. DeepSeek-V3 spread its 256 experts over 64 GPUs in 8 nodes, and lets a token go to 4 nodes at most (arXiv 2412.19437, section 3.2). Its library DeepEP sends a token once to a node, and passes it on over NVLink there: 153 GB/s inside a node of H800s, and between nodes about the 50 GB/s of each GPU's card, as its authors measured (DeepEP's first version).
# - **Hiding it.** The expert needs its rows now, so there is little to hide behind. An expert for all tokens can compute meanwhile; DeepSeek-V3 runs two micro-batches at once, one computes while the other sends (DualPipe, lab 09). Megatron: `--overlap-moe-expert-parallel-comm`.
# - **The other axes.** Ranks with other experts take other rows: they are a part of the data-parallel ranks. In lab 12's layouts `ep=2` multiplies the ranks: `1x1x1,ep=2` is two, with other rows on each. `ranklab compare --experts 4 --layouts 1x1x1,ep=2 2x1x1,ep=2 1x2x1,ep=2` trains each of them, and the losses agree.
# - **Numbers.** Router and combine in float32; rows may travel in 8 bits: DeepSeek-V3 dispatches in FP8 and combines in BF16.
#
# What to expect, published and not measured by us: 468 TFLOP/s a GPU for Mixtral 8x7B in bf16 (Megatron Core's MoE guide, which does not name the GPU there). This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 10. What we left out
#
# - **Expert choice**: experts choose tokens (arXiv 2202.09368). Loads are even by construction, but a token's experts depend on later tokens.
# - **Sending a token once** to a rank or node that has several of its experts: ours sends it once for each.
# - **Changing the plan while training**: `place_experts` says where experts should stand; moving weights and optimizer states is not built here.
# - **Backward of `chunked_scan`**: the same scan from the last rank to the first.
#
# Next: **12_hybrid**.
