# %% [markdown]
# # 02 Collectives: the nine verbs
#
# > 125 minutes, 85 more with Further · difficulty 3/5 · **spine**: 4.1 to 4.4 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# Eight GPUs have each computed a gradient of 100 MB, and every one of them needs the sum. The first idea is simple: all GPUs
# send their gradients to one machine, the **parameter server**, which adds them up and sends the sum back. You don't buy an
# extra machine for this. One of the eight plays the server, on top of its own work.
#
# How many megabytes does the server have to send in every step?
#
# (This is the naive form. The systems that made the idea known, DistBelief and the parameter server of Li et al., cut the
# parameters into slices, with one server for each.)

# %%
import math

import numpy as np
import torch
import torch.distributed as dist

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status


begin("02_collectives")
check(server_megabytes=...)

# %% [markdown]
# With 1024 GPUs, 102 GB have to go through one cable in every step. In this lab you build the algorithm that replaced the
# server. With it, each GPU sends 175 MB if there are eight, and 200 MB if there are a million. You build it from `send` and
# `recv` alone, count every byte, and predict its time before you run it.
#
# From lab 00 you need ranks, messages, and why a ring deadlocks if everybody sends first.

# %% [markdown]
# ## 2. Picture
#
# Two ranks talk by `send` and `recv` (lab 00). For all ranks of a group together there are nine verbs, and each can be
# built from those two. The pictures show three ranks before and after. A row is what one rank holds, cut into three columns.
# `+` is the sum of its column over all ranks:

# %%
from ranklab.plots import collectives as plots

plots.nine_verbs()

# %% [markdown]
# Look at **all-reduce**. Then look at **reduce-scatter**: it ends on the diagonal, where **all-gather** begins. One after
# the other, the two do what all-reduce does. This is the most useful observation in this lab. You will build all-reduce in
# this way (4.4), and ZeRO in lab 06 does the two halves at different times, so that each rank holds only a part of the
# gradients and of the optimizer's state, without sending a byte more.

# %% [markdown]
# ## 3. Smallest working code
#
# Here is the idea of the story in a few lines. All ranks send to rank 0, and rank 0 sends the sum back.

# %%
def sum_on_rank_0(x):
    rank, R = dist.get_rank(), dist.get_world_size()
    total, buffer = x.clone(), x.clone()
    for peer in range(1, R):
        if rank == 0:
            dist.recv(buffer, peer)
            total += buffer
        elif rank == peer:
            dist.send(x, 0)
    for peer in range(1, R):
        if rank == 0:
            dist.send(total, peer)
        elif rank == peer:
            dist.recv(total, 0)
    return total


# %% [markdown]
# Run it on four ranks, and count. `Traffic` counts every message that a rank sends inside its `with`; `bytes_to` says how much went to which rank.

# %%
from ranklab.meter import Traffic


def count(all_reduce, n=1_000_000):
    with Traffic() as traffic:
        total = all_reduce(torch.ones(n, device=device()))
    return dict(traffic.bytes_to), total[0].item()


naive = launch(count, sum_on_rank_0, ranks=4)
plots.traffic_matrix([sent for sent, _ in naive], "all-reduce of 4 MB through rank 0")

# %% [markdown]
# Everything goes from or to rank 0, in its row and its column. The other six links are idle. And the sum is right (`4.0` on
# every rank):

# %% tags=["nbval-check-output"]
[total for _, total in naive]

# %% [markdown]
# `ranklab.collectives.verbs` has all nine verbs in this plain form, each in about ten lines. How many MB does each of four
# ranks send for a tensor of 4 MB?

# %% tags=["nbval-check-output"]
from ranklab.collectives import verbs

NINE = ("broadcast", "reduce", "scatter", "gather", "all_gather", "reduce_scatter", "all_reduce",
        "all_to_all", "barrier")


def sent_by(names):
    x = torch.ones(4, 250_000, device=device())  # a row for each rank
    arguments = {"gather": (x[0],), "all_gather": (x[0],), "scatter": (x, x[0]), "barrier": ()}
    sent = []
    for name in names:
        with Traffic() as traffic:
            getattr(verbs, name)(*arguments.get(name, (x,)))
        sent.append(traffic.sent_bytes / 1e6)
    return sent


for name, sent in zip(NINE, zip(*launch(sent_by, NINE, ranks=4))):
    print(f"{name:15}", *(f"{megabytes:6.1f}" for megabytes in sent))

# %% [markdown]
# The first four verbs need one rank in the middle. All-gather, reduce-scatter and all-to-all are fair: each rank sends three
# of the four megabytes. All-reduce is not fair, but it can be. You fix it in 4.2 to 4.4.

# %% [markdown]
# ## 4. Build it
#
# You get one tool. `sendrecv(piece, to, into, source, group)` sends `piece` to rank `to`, and **at the same time** fills
# `into` with what rank `source` sends. It is your `ring_shift` from lab 00 for any two partners, and it returns `into`. If
# `piece` is empty, nothing is sent; if `into` is empty, nothing is awaited. `to` and `source` are numbers *inside* `group`,
# like `dist.get_rank(group)`. So pass `group` on, and your functions work on any part of the ranks.
#
# Below, each rank swaps with `rank ^ 1`. `^` is xor: it flips the bits of `rank` that are set in the other number. `^ 1`
# flips the last bit, so 0 and 1 are partners, and so are 2 and 3. `^ 2` pairs 0 with 2 and 1 with 3.

# %% tags=["nbval-check-output"]
from ranklab.collectives import sendrecv


def swap_with_my_neighbour():
    rank = dist.get_rank()
    x = torch.tensor([100 + rank], device=device())
    return sendrecv(x, rank ^ 1, torch.empty_like(x), rank ^ 1).item()


launch(swap_with_my_neighbour, ranks=4)

# %% [markdown]
# ### 4.1 Broadcast in log2 R rounds
# > difficulty 2/5 · importance 4/5 · 12 minutes · about 8 lines
#
# *After this you can send a value to R ranks in log2 R rounds.*
#
# Rank `src` has the model, and all ranks need it. If `src` sends it to one rank after the other, that takes R-1 rounds. But
# each rank that has the value can pass it on, so the number of ranks that have it **doubles** in each round. As in lab 00,
# `dist.send(x, group=group, group_dst=...)` and `dist.recv(x, group=group, group_src=...)` take numbers inside the group.
#
# **Predict.** How many rounds do 100 ranks need?

# %%
check(tree_rounds=...)

# %%
def tree_broadcast(x, src=0, group=None):
    """Copy rank src's `x` to every rank, in a new tensor; `x` itself is unchanged.

    Cost: each rank except src receives one message, in ceil(log2 R) rounds; nothing is sent when x
        is empty.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = x.clone(memory_format=torch.contiguous_format)
    place = (rank - src) % R  # counted from src: place 0 has the value at the start
    have = 1  # places 0 .. have-1 hold the value
    # dist.send(out, group=group, group_dst=...) and dist.recv(out, group=group, group_src=...) take
    # ranks of the group, not places
    raise NotImplementedError("exercise 4.1: about 8 lines")


# %%
tree_broadcast = check(tree_broadcast)

# %% [markdown]
# Who sent to whom? The picture shows the tree. Rank 0 sends three times, rank 1 twice, ranks 2 and 3 once. A message goes
# one rank further in round 1, two ranks in round 2, and four in round 3.

# %%
tree = launch(count, tree_broadcast, ranks=8)
plots.tree([sent for sent, _ in tree])

# %% [markdown]
# Look at each row: every rank that has the data sends it on, so their number doubles in each round.

# %% [markdown]
# ### 4.2 Ring reduce-scatter
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 8 lines
#
# *After this you can sum a tensor over R ranks so that every link carries the same load.*
#
# Now the sum. Cut `x` into R chunks, and let every rank **own** one: rank r ends with the sum of chunk r. For each chunk, a
# partial sum travels round the ring to the right. Every rank adds its own share and passes the sum on. All R chunks travel
# at the same time, so every link is busy in every step.
#
# Here is the path of chunk 0 alone, in column 0: its sum starts at rank 1 (circled), and has grown to 4 when it reaches rank
# 0. (`Watch` notes what each rank sends. `marked` makes numbers that show which ranks are in a sum.)

# %%
from ranklab import collectives
from ranklab.collectives import Watch, marked


def watch(collective):
    with Watch() as log:
        collective(marked(dist.get_world_size(), device()))
    return log.messages


logs = launch(watch, collectives.ring_reduce_scatter, ranks=4)
plots.steps([[m for m in messages if m.chunk == 0] for messages in logs], ranks=4,
            title="Chunk 0 grows on its way to rank 0")

# %% [markdown]
# The other three chunks make the same journey, each from a start of its own.
#
# **Predict.** Four ranks reduce-scatter 100 MB. How many megabytes does each rank send?

# %%
check(reduce_scatter_megabytes=...)

# %%
def ring_reduce_scatter(x, group=None, out=None):
    """Sum `x` over ranks, and leave chunk r of the sum on rank r, in x's dtype; `x` is unchanged.

    If `out` is given, it is as large as `x`. Partial sums are received into it, and the result is
    chunk r of `out`. Without `out` the result is a new tensor. The same holds on a single rank.
    Cost: a rank sends R-1 messages of one chunk each, all to one neighbour.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    chunks = x.flatten().tensor_split(R)  # chunk i is my share of what rank i will own
    sums = out.view(-1).tensor_split(R) if out is not None else None
    # The partial sum of chunk r must END at rank r, after R-1 steps to the right. So where does it
    # start, and which chunk do I send first?
    # Receive into sums[i] if `out` is given, else into a new tensor as large as chunks[i]
    raise NotImplementedError("exercise 4.2: about 8 lines")


# %%
ring_reduce_scatter = check(ring_reduce_scatter)

# %% [markdown]
# Here you see what your function did, with all chunks. In each step every rank sends one chunk and gets another.

# %%
plots.steps(launch(watch, ring_reduce_scatter, ranks=4), ranks=4,
            title="Each partial sum grows on its way round, and ends with its owner")

# %% [markdown]
# ### 4.3 Ring all-gather
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 5 lines
#
# *After this you can give every rank the shards of all others in R - 1 steps.*
#
# Now the other half of all-reduce. Every rank has one finished chunk, and every rank needs all of them. So in each step,
# pass on what arrived last.
#
# **Predict.** Each of four ranks has a shard of 25 MB. How many megabytes does each rank send?

# %%
check(all_gather_megabytes=...)

# %%
def ring_all_gather(shard, group=None, out=None):
    """Gather the shards of all ranks on every rank, in rank order; `shard` is unchanged.

    If `out` is given, the result is written to it, and `shard` may already be its own chunk of
    `out`. If shards differ in length, `out` must be given, because its size tells how long each of
    them is. Without `out` the result is a new tensor, also on a single rank.
    Cost: a rank sends R-1 messages of one shard each, all to one neighbour.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if out is None:
        out = shard.new_empty(R * shard.numel())
    chunks = out.view(-1).tensor_split(R)  # views: what is written here is in out
    raise NotImplementedError("exercise 4.3: about 5 lines")


# %%
ring_all_gather = check(ring_all_gather)

# %% [markdown]
# ### 4.4 Ring all-reduce
# > difficulty 2/5 · importance 5/5 · 8 minutes · about 4 lines
#
# *After this you can say what a ring all-reduce sends: 2 (R-1)/R of the tensor on each rank.*
#
# Reduce-scatter leaves each rank with one finished chunk, and all-gather hands every chunk to everyone. Together they are
# the algorithm that made data parallelism scale. NCCL still uses it for your gradients, among a few others.
#
# **Predict.** Four ranks all-reduce a gradient of 100 MB. How many megabytes does each rank send?

# %%
check(megabytes_sent=...)

# %%
def ring_all_reduce(x, group=None, out=None):
    """Return the sum over ranks of `x`, in x's shape, on every rank; `x` itself is unchanged.

    If `out` is given, it has x's shape (and is never `x`), and the result is written to it. Without
    `out` the result is a new tensor. All ranks get the same bits.
    Cost: a rank sends 2(R-1) messages of one chunk each, all to one neighbour, without padding.
    """
    # Pass `out` to both halves: the first leaves its chunk where the second wants it
    raise NotImplementedError("exercise 4.4: about 4 lines")


# %%
ring_all_reduce = check(ring_all_reduce)

# %% [markdown]
# Steps 1 to 3 reduce, steps 4 to 6 gather. All ranks do the same, so no rank is special. In each half a rank sends R-1
# chunks of 1/R. In all, it sends
#
# **2 (R-1)/R of the tensor**: 1.5 times the tensor on 4 ranks, 1.75 times on 8, and never 2.

# %%
plots.steps(launch(watch, ring_all_reduce, ranks=4), ranks=4,
            title="The first half of the steps adds up, the second half shares")

# %% [markdown]
# Compare the ring with section 3. (Both pictures use the same shades.) The total is the same 24 MB, to the byte. The ring does not send *less*. It spreads the load: the busiest rank sends 6 MB instead of 12, and with eight ranks 7 MB instead of 28.

# %%
ring = launch(count, ring_all_reduce, ranks=4)
runs = {"through rank 0": naive, "ring": ring}
plots.traffic_matrices({name: [sent for sent, _ in ranks] for name, ranks in runs.items()})

# %% [markdown]
# > **Spine**: this lab's part ends here. On it goes in [03_data_parallel](03_data_parallel.ipynb); the rest of this lab is extra.

# %% [markdown]
# ### 4.5 Know the time before you run it
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 10 lines
#
# *After this you can predict the time of a collective from latency and bandwidth, before you run it.*
#
# A message of n bytes takes **alpha + n beta** seconds. Alpha is the latency, which every message pays, however small it
# is. Beta is one over the bandwidth. The steps of an algorithm come one after the other, so add up their times:
#
# | algorithm | steps | bytes in each |
# |---|---|---|
# | `"ring"` all-reduce | 2(R-1) | n/R |
# | `"parameter_server"` | 2(R-1): the server serves one rank after the other | n |
# | `"tree_broadcast"` | log2 R, rounded up | n |
# | `"recursive_doubling"` all-reduce (see Further) | like the tree, and one more if R is no power of two | n |
#
# **Predict.** Eight ranks all-reduce 10 MB by a ring. Alpha is 10 us, and a link has 100 GB/s. How many microseconds does it
# take?

# %%
check(ring_microseconds=...)

# %%
def alpha_beta_time(algorithm, nbytes, ranks, alpha, beta):
    """Return the seconds of `algorithm` for `nbytes` per rank: steps * (alpha + bytes * beta).

    Raises: ValueError for an algorithm that is not in the table.
    """
    raise NotImplementedError("exercise 4.5: about 10 lines")


# %%
alpha_beta_time = check(alpha_beta_time)

# %% [markdown]
# Draw your model for eight GPUs, a latency of 10 us and links of 100 GB/s. On the left the number of steps decides, on the
# right the number of bytes:

# %%
sizes = np.geomspace(1e3, 1e9, 25)
plots.time_against_size(
    {name: (sizes, [alpha_beta_time(name, n, 8, 10e-6, 1 / 100e9) for n in sizes])
     for name in ("ring", "recursive_doubling", "parameter_server")},
    title="8 ranks, by the model: few steps win on the left, few bytes on the right")

# %% [markdown]
# ### 4.6 Any length to any rank
# > difficulty 4/5 · importance 4/5 · 25 minutes · about 12 lines · open: no recipe
#
# *After this you can exchange pieces whose lengths only the sender knows.*
#
# In the all-to-all of section 3, all pieces have the same length. Often they don't. Lab 11 sends each token to the rank of
# its expert, and some experts are popular. MPI calls this verb **Alltoallv**. What makes it hard is that no rank knows how
# much the others will send.

# %%
def all_to_all_v(pieces, group=None):
    """Send pieces[j] to rank j of the group; return the pieces from all ranks, in rank order.

    pieces: one 1-D tensor for each rank, all of one dtype and device, possibly strided views. Each
        has any length, including 0, which no other rank knows. They stay unchanged.
    Returns: a list of new tensors, one from each rank, this one included: 1-D, with its sender's
        length and dtype.
    Bytes: each piece is sent once, straight to its rank; lengths may take 1000 bytes more.
    Messages: one for each non-empty piece to another rank; at most R - 1 more for lengths.
    Score: the alpha-beta time of the busiest rank.
    Use only sendrecv, dist.send, recv, isend, irecv, and what is built from them.
    """
    raise NotImplementedError("exercise 4.6: about 12 lines")


# %%
all_to_all_v = check(all_to_all_v)

# %% [markdown]
# Try your function with three tables of lengths. The pictures show how many MB each rank sends to each other rank. (A cell
# of 8 B is a message that carries a length.)

# %%
LENGTHS = {"even": [[1, 1, 1, 1]] * 4, "skewed": [[3, 0, 0, 0]] * 4,
           "sparse": [[0, 3, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3], [0, 0, 0, 0]]}


def send_all(tables):
    sent = []
    for megabytes in tables:
        with Traffic() as traffic:
            all_to_all_v([torch.ones(250_000 * n, device=device())
                          for n in megabytes[dist.get_rank()]])
        sent.append((dict(traffic.bytes_to), traffic.sent_messages))
    return sent


results = dict(zip(LENGTHS, zip(*launch(send_all, list(LENGTHS.values()), ranks=4))))
plots.traffic_matrices({name: [sent for sent, _ in ranks] for name, ranks in results.items()})

# %% [markdown]
# How long does this take by the model, with the links from 4.5 and R - 1 messages for the lengths? The bound next to it
# counts only the bytes into or out of the busiest rank.

# %% tags=["nbval-check-output"]
from ranklab.collectives import all_to_all_v_time

for name, table in LENGTHS.items():
    nbytes = [[1e6 * n for n in row] for row in table]
    model, bound = (1e6 * all_to_all_v_time(nbytes, a, 1 / 100e9) for a in (10e-6, 0))
    print(f"{name:7} messages of each rank {[sent for _, sent in results[name]]}, "
          f"{model:4.0f} us; bound {bound:3.0f} us")

# %% [markdown]
# In `skewed`, rank 0 receives 9 MB, and no algorithm can help with that. Lab 11 will keep the load of the experts even
# instead. Exchanging the lengths takes 30 us. If you can do it in fewer messages, your score beats the library's.

# %% [markdown]
# ### Further
#
# Here are six more exercises with checks: an all-reduce for two kinds of links, the parameter server, an all-reduce for
# small messages, an all-reduce with the same bits on any number of ranks, and two tools that turn measurements into a
# decision. They are not in the 125 minutes, and the rest of the lab runs without them.

# %% [markdown]
# #### `hierarchical_all_reduce`: two kinds of links
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 3 lines
#
# A ring is as fast as its slowest link. Inside a node GPUs talk over NVLink, between nodes over a network. (A "node" here
# is what NVLink joins. Usually that is one machine with eight GPUs; in a GB200 NVL72 rack it is 18 machines with 72 GPUs.)
# This is how fast the links are, in one direction and for each GPU:
#
# | link | GB/s | |
# |---|---|---|
# | NVLink 4 with NVSwitch (H100) | 450 | every GPU to every GPU of the node at full speed |
# | NVLink 3 with NVSwitch (A100) | 300 | the same, one generation earlier |
# | PCIe 5.0 x16 | 64 | shared with whatever hangs on the same switch |
# | InfiniBand NDR, or RoCE (the same over Ethernet) at 400 Gbit/s | 50 | one adapter for each GPU, in good clusters |
# | Ethernet, 100 Gbit/s | 12.5 | often one for the whole node |
#
# So do as much as possible inside the node. Say there are M nodes with L ranks each. First **reduce-scatter inside**: each
# rank gets one L-th of its node's sum. Then **all-reduce across**, among the ranks that have the same part on the other
# nodes. Then **all-gather inside**.
#
# A flat ring sends 2(R-1)/R of the tensor through *every* one of its links, and one of those links leaves the node. With 100
# MB on two nodes of four ranks, that is 175 MB over the slow link. One rank of the node sends all of it, and the others wait
# for that rank in every step.
#
# **Predict.** Two nodes of four ranks all-reduce 100 MB hierarchically. How many megabytes leave each node, from all its
# ranks together?

# %%
check(slow_link_megabytes=...)

# %%
def hierarchical_all_reduce(x, inside=None, across=None):
    """Sum `x` over all nodes; return the sum in a new tensor on every rank; `x` is unchanged.

    inside: the group of this rank's node.
    across: the group of its peers on all nodes.
    Cost: with L ranks on each of M nodes, a rank sends 2(L-1)/L of x inside the node, and only
        2(M-1)/M of its own part of x across nodes.
    """
    # three lines, with what you have built. If shards differ in length, how can all-gather know?
    raise NotImplementedError("exercise hierarchical_all_reduce: about 3 lines")


# %%
hierarchical_all_reduce = check(hierarchical_all_reduce)

# %% [markdown]
# Watch four ranks on two nodes. Only the chunks in dashed frames crossed the slow link. Each rank sent half of the tensor
# across, so each node sent one tensor. With a flat ring of four ranks it would be 1.5.

# %%
from ranklab.collectives import node_groups


def watch_nodes(per_node):
    inside, across = node_groups(per_node)
    return watch(lambda x: hierarchical_all_reduce(x, inside, across))


plots.steps(launch(watch_nodes, 2, ranks=4, nodes=2), ranks=4, nodes=2,
            title="Only the chunks in dashed frames cross the slow link")

# %% [markdown]
# #### `parameter_server`
# > difficulty 2/5 · importance 3/5 · 10 minutes · about 12 lines

# %%
def parameter_server(x, server=0, group=None):
    """Sum `x` over ranks on rank `server`, and return the sum on every rank; `x` is unchanged.

    The result is a new tensor. Nothing is sent when x is empty.
    Cost: each worker sends x once, to the server, which sends the sum to each worker in one
        message.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    total = x.clone(memory_format=torch.contiguous_format)
    raise NotImplementedError("exercise parameter_server: about 12 lines")


# %%
parameter_server = check(parameter_server)

# %% [markdown]
# #### `recursive_doubling`
# > difficulty 4/5 · importance 3/5 · 15 minutes · about 13 lines
#
# Swap *all* you have with the rank whose number differs from yours in bit 0, then in bit 1, then in bit 2, and add. After
# log2 R swaps every rank has the sum. This takes few steps but many bytes, so it is good for small messages.

# %%
def recursive_doubling(x, group=None):
    """Sum `x` over ranks by doubling, in a new tensor on every rank; `x` itself is unchanged.

    In round k each rank swaps its partial sum with the rank 2^k away, so both end with the same
    bits. If R is not a power of two, take the largest power of two below it: the ranks from there
    on first send their x to a partner, and at the end receive the sum.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    power = 2 ** (R.bit_length() - 1)  # the largest power of two that R holds
    total = x.clone(memory_format=torch.contiguous_format)
    buffer = torch.empty_like(total)
    empty = total.new_empty(0)  # sendrecv does not send what is empty: a one-way message
    raise NotImplementedError("exercise recursive_doubling: about 13 lines")


# %%
recursive_doubling = check(recursive_doubling)

# %% [markdown]
# Now you have three ways to the same sum. Look at the bytes of the busiest rank, because you wait for that rank.

# %%
ways = (parameter_server, recursive_doubling, ring_all_reduce)
plots.busiest_rank({all_reduce.__name__: [sum(sent.values()) for sent, _ in
                                          launch(count, all_reduce, ranks=4)]
                    for all_reduce in ways})

# %% [markdown]
# #### `invariant_all_reduce`: one order of additions
# > difficulty 4/5 · importance 4/5 · 25 minutes · about 18 lines, with a helper
#
# The same model and the same batch, on 8 GPUs and then on 4: the losses differ in the last digits from the first step on. Is
# that a bug? In float32, (1e8 - 1e8) + 1 is 1, but 1e8 + (-1e8 + 1) is 0. So the last bits depend on the **order of
# additions**, and it changes with the algorithm and with R. A ring even has a different order in each chunk, because the sum
# of chunk c begins on rank c + 1.
#
# **Predict.** Four ranks hold 1e8, -1e8, 1 and 1, each in a float32 tensor of four equal numbers. The sum is 2. In how many of
# the four chunks does a ring get 2?

# %%
check(ring_right_chunks=...)

# %% tags=["nbval-check-output"]
def order_shows():
    x = torch.full((4,), (1e8, -1e8, 1.0, 1.0)[dist.get_rank()], device=device())
    return ring_all_reduce(x).tolist(), recursive_doubling(x).tolist()


results = launch(order_shows, ranks=4)
print("ring:", results[0][0], " doubling:", results[0][1])
print("the same on all ranks:", all(sums == results[0] for sums in results))

# %% [markdown]
# In each run all ranks have the same bits. They differ between algorithms, and between numbers of ranks. To get the same
# bits on 1, 2 and 4 ranks, fix a **tree over the contributions**, for example over the gradients of eight micro-batches, and
# cut that same tree at a lower or a higher level:
#
# ((c0 + c1) + (c2 + c3)) + ((c4 + c5) + (c6 + c7))
#
# On 4 ranks, each has one of the innermost brackets; on 2 ranks, half of the tree. Recursive doubling then adds in the right
# order, but it sends log2 R times the tensor. A ring sends 2(R-1)/R times.
#
# **Your target:** the bits of one process, and no more bytes than a ring. You may write helpers of your own where the dots are.

# %%
### BEGIN SOLUTION
from ranklab.collectives import tree_sum


### END SOLUTION
def invariant_all_reduce(contributions, group=None):
    """Sum the contributions of all ranks in one tree, so that the bits do not depend on R.

    contributions: this rank's part (m, ...) of n = m R tensors; rank r holds numbers r m to
        (r + 1) m - 1. m >= 1 is the same on all ranks, and need not be a power of two.
    Tree: the sum of n tensors is the sum of the first n // 2 plus the sum of the others. Each sum
        is rounded to the contributions' dtype.
    Shape: (m, ...) -> (...), a new tensor; the contributions are unchanged.
    Raises: ValueError if R is not a power of two, before anything is sent: the tree would have to
        be cut inside a rank's part.
    Cost: sends 2(R-1)/R of one contribution's bytes, in 2(R-1) messages or fewer.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    # swap halves with one partner, then quarters with the next one: each adds what it keeps
    raise NotImplementedError("exercise invariant_all_reduce: about 18 lines, with a helper")


# %%
invariant_all_reduce = check(invariant_all_reduce)

# %% [markdown]
# Eight contributions of random numbers, on 1, 2, 4 and 8 ranks. In how many of the sums does each way have other bits than
# the same way on one rank?

# %%
def add_up(rows):
    total = rows[0].clone()
    for row in rows[1:]:
        total += row  # as gradients accumulate
    return total


def by_torch(rows):
    total = add_up(rows)
    dist.all_reduce(total)
    return total


ways = {"+=, then a ring": lambda rows: ring_all_reduce(add_up(rows)),
        "+=, then doubling": lambda rows: recursive_doubling(add_up(rows)),
        "+=, then dist.all_reduce": by_torch,
        "invariant_all_reduce": invariant_all_reduce}


def sums_of(ways, n=100_000):
    rows = torch.randn(8, n, generator=torch.Generator().manual_seed(0))
    part = rows.chunk(dist.get_world_size())[dist.get_rank()].to(device())
    return [way(part).cpu() for way in ways]


sums = {R: launch(sums_of, list(ways.values()), ranks=R)[0] for R in (1, 2, 4, 8)}
shares = {way: {R: (sums[R][i] != sums[1][i]).double().mean().item() for R in sums}
          for i, way in enumerate(ways)}
plots.differing_bits(shares)

# %% [markdown]
# Look at the last group: nothing differs. In each of the others about half of the sums differ, in the last bits. And the bytes?

# %% tags=["nbval-check-output"]
def sent_in_the_tree(n=1_000_000):
    with Traffic() as traffic:
        invariant_all_reduce(torch.ones(1, n, device=device()))
    return traffic.sent_bytes, traffic.sent_messages


for R in (2, 4, 8):
    predicted = 2 * (R - 1) * 4_000_000 // R, 2 * (R.bit_length() - 1)
    counted = launch(sent_in_the_tree, ranks=R)[0]
    print(f"{R} ranks: predicted {predicted[0]:,} bytes in {predicted[1]} messages, counted "
          f"{counted[0]:,} in {counted[1]}; a ring takes {2 * (R - 1)} messages")
    assert counted == predicted

# %% [markdown]
# So the fixed tree costs no bytes. Its price is elsewhere. R must be a power of two, and partners are not always neighbours.
# Gradient accumulation by `+=` has another order, so a rank must hold up to log2 m + 1 partial sums instead of one. And the
# contributions themselves must have the same bits wherever they are computed, which matrix products of another shape don't
# have.
#
# NCCL gives all ranks the same result (NVIDIA/nccl#855), but it chooses the algorithm by size, and the algorithm decides on
# the order. torchtitan's batch-invariant mode forced `NCCL_ALGO=Ring` with one channel, until #2994 replaced the ring, as not
# deterministic, by `allreduce:tree`; vLLM and SGLang set the same. Your prediction shows one reason: in a ring the order
# depends on an element's place, and a batch of another size moves it. That holds for one R. For several sizes of tensor
# parallelism, arXiv 2511.17826 puts the matrix products into the same tree. And a sum in the switch (NVLS) has no order that
# you can choose: in 2024 it differed from call to call on one machine (nccl#1497), while on a GB200 with NCCL 2.29.7 it got
# exactly 2 from 1e8, 1, -1e8, 1 in each of six orders (nccl#2360).

# %% [markdown]
# #### `fit_alpha_beta`
# > difficulty 3/5 · importance 4/5 · 10 minutes · about 5 lines
#
# You have measured times at several sizes. Which alpha and beta explain them best, **in proportion**? (Why not plain least
# squares? Try it, and look at alpha.)

# %%
def fit_alpha_beta(sizes, seconds):
    """Fit (alpha, beta) so that alpha + size * beta is nearest to the measured `seconds`.

    Nearest in relative terms: an error of 10% counts the same at 1 KB and at 64 MB.
    The same size may occur several times.
    Raises: ValueError for fewer than two different sizes.
    """
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    # np.linalg.lstsq(rows, values, rcond=None)[0] solves many equations at once
    raise NotImplementedError("exercise fit_alpha_beta: about 5 lines")


# %%
fit_alpha_beta = check(fit_alpha_beta)

# %% [markdown]
# #### `crossover_bytes`
# > difficulty 3/5 · importance 4/5 · 10 minutes · about 5 lines
#
# **Predict.** There are eight ranks, alpha is 10 us, and a link has 100 GB/s. Above how many megabytes is the ring faster
# than doubling?

# %%
check(crossover_megabytes=...)

# %%
def crossover_bytes(ranks, alpha, beta):
    """Return the number of bytes at which ring and doubling all-reduce take equally long.

    Above this size the ring wins.
    Returns: infinity for 1 or 2 ranks, where doubling sends no more bytes than the ring.
    """
    # how many more steps does the ring take? how many more bytes doubling, per byte of the tensor?
    raise NotImplementedError("exercise crossover_bytes: about 5 lines")


# %%
crossover_bytes = check(crossover_bytes)

# %% [markdown]
# ## 5. The real thing
#
# In production you write one line: `dist.all_reduce(x)`. Does it give the same numbers as your ring and your hierarchical
# all-reduce? Try random floats on four ranks:

# %%
def three_ways():
    x = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    reference = x.clone()
    dist.all_reduce(reference)
    inside, across = node_groups(2)
    sums = ring_all_reduce(x), hierarchical_all_reduce(x, inside, across)
    largest = max((reference - total).abs().max().item() for total in sums)
    return largest, [total.cpu() for total in sums]


results = launch(three_ways, ranks=4, nodes=2)
print("largest difference to torch, on each rank:", [f"{largest:.1e}" for largest, _ in results])
alike = all(torch.equal(a, b) for _, sums in results for a, b in zip(sums, results[0][1]))
print("all ranks agree to the last bit, for the ring and for the hierarchical one:", alike)

# %% [markdown]
# The numbers are the same up to the last bits, which depend on the *order* of additions. Two algorithms add in different
# orders, so their results differ. But in one run all ranks agree exactly, because each chunk is summed once and then
# copied. If each rank added everything up in *its own* order, the ranks' copies of a model would drift apart. (In doubling
# each rank adds for itself, but all add in the same order, because a + b and b + a have the same bits.)
#
# MPI had these verbs in 1994, and we still use its names. Here is mpi4py, in the columns of nccl-tests, NVIDIA's benchmark.
# (The project below explains the columns.) The inputs are the same, and `#wrong` counts elements that are not what they
# should be.

# %%
from ranklab.peers.mpi import mpirun

print(mpirun(2, "-m", "ranklab.projects.collectives", "--mpi", "--sizes", "1K,1M"))

# %% [markdown]
# MPI's processes on one machine share memory, while gloo goes through the kernel's network stack even to reach a
# neighbour. Compare the rows of 1 KB here (2 ranks) with gloo's rows in the next table (4 ranks). (MPI's ranks wait in a
# loop that uses a whole core. If other programs want the same cores, a row can be far too slow.) On GPUs NCCL writes
# straight into the other GPU's memory, if the machine allows it.

# %% [markdown]
# ## 6. Project
#
# **A benchmark for any cluster**, with nccl-tests' own columns. `algbw` is size / time. `busbw` is `algbw` times the
# bytes that the busiest link carries for each byte of the tensor (2(R-1)/R for all-reduce). Compare `busbw` with the
# table of links under Further. The last line says whose functions ran.

# %%
from ranklab.projects import collectives as project

sizes = (2**10, 2**16, 2**20, 2**24)
functions = {function.__name__: function for function in (
    tree_broadcast, ring_reduce_scatter, ring_all_gather, ring_all_reduce, all_to_all_v,
    hierarchical_all_reduce, parameter_server, recursive_doubling)}
rows = project.run(ranks=4, verbs=("all_reduce",), sizes=sizes, **functions)
print(project.table(rows))
print(project.summary(rows))

# %%
project.figure(rows)

# %% [markdown]
# Does the server win for small tensors, on the left? The model gives it as many steps as the ring, 2(R-1). But the workers
# do not wait for each other. All send at the same moment, so their latencies overlap, and only two rounds remain: in, and
# out. The ring's six steps on four ranks can't overlap, because each needs the step before it. As R grows, the server loses
# this advantage. It still handles 2(R-1) messages, one by one, and with larger tensors its link carries all the bytes.
#
# **When does hierarchical all-reduce pay off?** On one machine all links are equal, so we emulate: the ranks and messages
# are real, but each sender *sleeps* as long as its link would take. There are two nodes of two ranks. All ranks of a node
# share its *one* link to the other node, and that link is slower by a factor.

# %%
from ranklab.projects.collectives import links as slow

emulation = slow.emulate((1, 2, 4, 8), repeats=2, ring=ring_all_reduce,
                         hierarchical=hierarchical_all_reduce)
ratios = np.geomspace(1, 8, 7)
plots.slow_link(ratios, slow.model(ratios), emulation,
                setting="all-reduce of 1 MB on 2 nodes of 2 ranks; 40 ms per MB inside a node")

# %% [markdown]
# By the model, the flat ring wins if all links are equal, because the hierarchical algorithm does the same work in two
# layers. The lines cross at a factor of 2, and beyond it the hierarchical algorithm wins. (Each point is the best of two. On
# a busy laptop the points lie above their line, and near the crossing they can change places.) That factor of 2 is **the
# number of nodes**. For more nodes the model says:

# %% tags=["nbval-check-output"]
for nodes in (2, 4, 8, 16, 32):
    times = slow.model((9,), nodes=nodes, per_node=8)  # 9 = 450 GB/s inside / 50 outside
    gain = times["flat ring"][0] / times["hierarchical"][0]
    print(f"{nodes:2} nodes of 8, outside 9 times slower: hierarchical {gain:.2f} times as fast")

# %% [markdown]
# You might expect a hierarchy to gain with each node. It is the other way round: with 16 nodes it loses. On two nodes, a
# flat ring sends 1.875 times the tensor out of each node, and the hierarchical algorithm 1.0 times. On 32 nodes both send
# nearly 2 times the tensor.
#
# A good cluster also has more than one link for each node. If each of eight GPUs has a network card of 50 GB/s, a node has
# 400 GB/s outside and 450 inside. That is a factor of only 1.1. NCCL then builds **several flat rings at once**, and each
# leaves the node through another card. So the hierarchical algorithm beats *one* ring through *one* card, but not eight
# rings. Against those it only has fewer steps, 2(L-1) + 2(M-1) instead of 2(R-1), which helps small tensors.

# %% [markdown]
# **Your turn.** Change one thing in the benchmark. First write down which algorithm wins at 1 KB and which at 1 MB, and by
# what factor. Ideas: `"ranks": 2`, `"verbs": ("broadcast",)`, `"kind": "bfloat16"`, `"nodes": 2`. For `all_to_all` the table
# has two algorithms besides gloo: `pairs` knows all lengths beforehand, and `any_lengths` is your `all_to_all_v`.

# %%
change = {"verbs": ("all_to_all",)}
settings = {"ranks": 4, "verbs": ("all_reduce",), "sizes": (2**10, 2**20), **functions, **change}
print(project.table(project.run(**settings)))

# %% [markdown]
# ## 7. Measure
#
# Compare prediction and count for a tensor of 4 MB. The table shows the messages and bytes of the busiest rank. Counts are
# exact, so we assert them.

# %% tags=["nbval-check-output"]
def busiest(n, all_reduces):
    counted = []
    for all_reduce in all_reduces:
        with Traffic() as traffic:
            all_reduce(torch.zeros(n, device=device()))
        counted.append((traffic.sent_messages, traffic.sent_bytes))
    return counted


print(f"{'':22} {'':>5} {'messages':^19} {'bytes':^26}\n{'':22} {'ranks':>5} {'predicted':>10} "
      f"{'counted':>8} {'predicted':>13} {'counted':>12}")
for R in (2, 4, 8):
    nbytes, swaps = 4 * 2**20, R.bit_length() - 1
    ring_cost = 2 * (R - 1), 2 * (R - 1) * nbytes // R
    predicted = {ring_all_reduce: ring_cost, recursive_doubling: (swaps, swaps * nbytes),
                 parameter_server: (R - 1, (R - 1) * nbytes)}
    results = launch(busiest, nbytes // 4, list(predicted), ranks=R)
    for (fn, (messages, sent)), counts in zip(predicted.items(), zip(*results)):
        counted = max(counts)
        print(f"{fn.__name__:22} {R:5} {messages:10} {counted[0]:8} {sent:13} {counted[1]:12}")
        assert counted == (messages, sent)

# %% [markdown]
# (`dist.all_reduce` is not in the table. The meter can't see inside it, and would only repeat the ring's formula.)
#
# Now the time. We take the best of ten calls, because other programs can only make a call slower. We measure a swap between
# **two** ranks, fit alpha and beta with your function, and predict the ring on two ranks, which is two swaps of half the
# tensor.

# %%
from ranklab.projects.clock import best_seconds


def times(call):
    rows = []
    for n in (2**8, 2**12, 2**16, 2**20, 2**22):
        x = torch.zeros(n, device=device())
        rows.append((x.nbytes, best_seconds(lambda: call(x))))
    return rows


def swap(x):
    sendrecv(x, 1 - dist.get_rank(), torch.empty_like(x), 1 - dist.get_rank())


alpha, beta = fit_alpha_beta(*zip(*launch(times, swap, ranks=2)[0]))
print(f"this machine: alpha {alpha * 1e6:.0f} us, {1e-9 / beta:.2f} GB/s")

# %%
for nbytes, seconds in launch(times, ring_all_reduce, ranks=2)[0]:
    predicted = alpha_beta_time("ring", nbytes, 2, alpha, beta)
    print(f"{nbytes:9} bytes: {predicted * 1e3:8.2f} ms predicted, {seconds * 1e3:8.2f} measured")

# %% [markdown]
# The model has the right shape: small tensors take nearly the same time, and for large ones the time grows with their size.
# The numbers are off by a factor of two or three on a laptop, and by ten on a *busy* one. There a rank that waits for a
# message may first wait for its turn on the processor, and the model does not know that. It does not know the cost of
# additions and fresh memory either.
#
# **What the clock can't show here**: with more ranks than cores nothing gets faster, so no algorithm can show its strength in
# seconds. That is why this course asserts counts and only prints times.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 02` in a terminal asks these and more, with other numbers
# each time.

# %% tags=["nbval-check-output"]
questions("02_collectives")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# labs/jobs/torchrun.sh collectives --max 1G
# sbatch labs/jobs/collectives.sbatch
# ```
#
# Now the backend is NCCL, and `sendrecv` becomes one kernel for both directions, because it batches the send and the
# receive. (Sent and received one by one, they would share one queue between two GPUs and deadlock.) NCCL itself chooses by
# size among ring, tree and sums in the switch, as your crossover does.
#
# `NCCL_DEBUG=INFO` prints what NCCL found. Lines such as `Channel 00/16 : 0 1 2 3 ...` are its rings, and lines with
# `NET/IB` are its network cards. If the node has several cards, look for all of them. These settings matter most:
#
# - `NCCL_IB_HCA` names the InfiniBand cards that NCCL may use. A value left over from another machine is a common reason why
#   it uses only one of eight.
# - `NCCL_SOCKET_IFNAME` names the interface for the first contact, and for all traffic if there is no InfiniBand.
# - `NCCL_ALGO=Ring` forces rings.
#
# Clusters often connect card 0 of all nodes by one switch, card 1 by another, and so on. These are called **rails**, and
# each ring stays on its own rail.
#
# What can you expect of NCCL's own all-reduce at large sizes? About 460 to 480 GB/s of busbw on 8 H100 with NVSwitch, and 230 to 250 on 8 A100; we have not measured them. (NVSwitch adds up inside the switch, and so beats the 450 GB/s of the link. We once believed that of any number of GPUs in a node, and our planner gave four of them about 470. Four H200s reached 363 (stas00/ml-engineering): NCCL ran a ring, and used the switch's sums only from five on.) Across nodes it should come near the sum of the network cards. If you get a tenth of that, something is wrong: a cable, a driver, or traffic that goes through the host's memory. nccl-tests defines the columns in doc/PERFORMANCE.md. This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 10. Take with you
#
# 1. An all-reduce is a reduce-scatter and an all-gather. Each rank sends 2(R-1)/R of the bytes: 1.5 times on four ranks, never more than 2.
# 2. A message takes alpha + n beta. A ring has 2(R-1) steps and a tree log2 R, so small tensors want few steps and large ones few bytes.
# 3. The slowest link decides: of 1 GB on two nodes of eight, a flat ring sends 1.875 GB out of each node, and a hierarchical one 1 GB.
#
# **What we left out**
#
# - **NCCL's double binary trees** take few steps *and* few bytes, because slices of a message follow each other down the tree.
# - **Sums in the network**: NVLink SHARP and InfiniBand SHARP let the switch add, so that each GPU sends its tensor once,
#   not 2(R-1)/R times.
# - **Protocols**: NCCL's LL and LL128 trade bandwidth for latency; slices and channels keep several rings busy at once.
# - **Compression** (lab 04) and **overlap with computation** (lab 03), which hides what you can't make smaller.
#
# Now you have an all-reduce and a model. In [03_data_parallel](03_data_parallel.ipynb) you put them together.
#
# On the spine it is [03_data_parallel](03_data_parallel.ipynb).
