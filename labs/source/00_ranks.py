# %% [markdown]
# # 00 Ranks: many processes, one program
#
# > 75 minutes · difficulty 1/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, one rank on each GPU
#
# In Colab, or where the first cell says `No module named 'ranklab'`, run the cell first that README.md has for Colab, under Start: it installs ranklab from the repository.

# %% [markdown]
# ## 1. Story
#
# Ten minutes. That is how long a training job on GPUs waits, by default, for a message that never comes.
# With 1024 GPUs at two dollars an hour each, one skipped line of Python on *one* of them
# makes all of them wait. How many dollars does that cost before anybody even looks?

# %%
from ranklab import answer, check, device, hint, launch, questions

check(hang_dollars=...)

# %% [markdown]
# (Replace `...` by your number and run the cell again. `hint("hang_dollars")` helps. Nothing here blocks: the library
# takes over an exercise that you skip.)
#
# Everything in this course is made of two things: **ranks**, which are processes that all run the same program, and
# **messages** between them. A machine in a cluster is called a **node**; it usually has eight GPUs and runs eight ranks.
# This lab gives you both, and the skill that saves the ten minutes: reading a hang.
#
# It builds on nothing but Python and a little PyTorch.

# %% [markdown]
# ## 2. Picture
#
# Eight ranks on two nodes. Every process knows three numbers about itself: its number in the whole job (`RANK`), its
# number on its machine (`LOCAL_RANK`, and so which GPU it takes), and the number of that machine (`GROUP_RANK`).

# %%
from ranklab.plots import ranks as plots

plots.world(ranks=8, nodes=2)

# %% [markdown]
# ## 3. Smallest working code
#
# `launch` starts four fresh processes, runs the function in each of them, and brings the values back. Here every rank
# adds its own number to a sum. `dist.all_reduce` is a **collective**: a call that all ranks make together, and that leaves
# the same result on each, written into the tensor they passed.

# %%
import os

import torch
import torch.distributed as dist


def hello():
    x = torch.tensor([dist.get_rank()], device=device())
    dist.all_reduce(x)  # in place: x is now the sum over all ranks
    local = os.environ["LOCAL_RANK"]
    print(f"I am LOCAL_RANK {local}, process {os.getpid()}; the sum is {x.item()}")
    return x.item()


launch(hello, ranks=4, nodes=2)

# %% [markdown]
# One program, four processes, no rank in charge: that is **SPMD**, single program, multiple data. They differ only in
# what they read from `RANK`. What a rank prints comes back
# with its number in front. (With `nodes=2`, `launch` only *numbers* the ranks as if they were on two machines.)
#
# Functions and variables of your cells travel to the ranks by themselves. Only what a rank returns comes back; what it
# changes does not.
#
# The messages are carried by a **backend**. Where each rank has a GPU of its own it is NCCL, NVIDIA's library for its GPUs. Otherwise it is gloo, on the CPU. `device()` is the rank's own device. No cell of this course names a backend, so your code
# runs on both.

# %% [markdown]
# ## 4. Build it
#
# Put your code in place of `raise NotImplementedError`, and run the cell and the check below it.
# Stuck? `hint("shard_range")` gives three hints, one more each time; `answer("shard_range")` shows a worked answer.

# %% [markdown]
# ### 4.1 Which part is mine?
# > difficulty 1/5 · importance 5/5 · 10 minutes · about 3 lines
#
# The first thing a rank needs is its part of the work, its **shard**. It must find it **alone**, because asking costs messages.
# Every rank computes the same split from `n`, its `rank` and the number of ranks, `size` (the *world size*).
#
# **Predict.** 1 000 003 documents, 8 ranks. How many documents are in the largest part?

# %%
check(longest_shard=...)

# %%
def shard_range(n, rank, size):
    """The part of range(n) that belongs to `rank` of `size`: contiguous, in rank order.

    Together the parts are range(n), nothing twice. Their lengths differ by at most one; the longer
    ones come first.
    """
    # how many does every rank get, and how many are left over?
    raise NotImplementedError("exercise 4.1: about 3 lines")


# %%
shard_range = check(shard_range)

# %% [markdown]
# This is what your function does with 50 items. Look at 8 ranks: two of them have one item more than the rest, and
# **every step of the job takes as long as theirs**.

# %%
plots.shards(shard_range, n=50)

# %% [markdown]
# ### 4.2 Ring shift: mend the deadlock
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 6 lines
#
# Now a message. `dist.send(x, group_dst=r)` gives `x` to rank `r`, and may wait until `r` takes it.
# `dist.recv(x, group_src=r)` waits for what rank `r` sends, and writes it into `x`. `group` names the ranks that take
# part; `None` means all. Inside a group, ranks are counted from 0 again: hence `group_dst` and not `dst`. Pass
# `group=group` on; the check tries a smaller group as well.
#
# Each rank hands its `x` to the next rank, the last one to rank 0, and returns what came from the one before: the ranks
# form a ring. The obvious code is below. **First run it as it is**, and read what the check reports. The text below the
# next picture says what you need to mend it; then come back to this cell.

# %%
def ring_shift(x, group=None):
    """Returns the `x` of the rank before this one; all ranks shift at the same time.

    A new tensor in x's shape and type; `x` itself is unchanged. Each rank sends x once, in one
    message, and nothing is under way any more; a single rank sends nothing and gets a copy of x.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return x.clone()
    from_before = torch.empty_like(x)
    dist.send(x, group=group, group_dst=(rank + 1) % size)
    dist.recv(from_before, group=group, group_src=(rank - 1) % size)
    return from_before


# %%
ring_shift = check(ring_shift)

# %% [markdown]
# With the obvious code, every rank waits in `send` until the next rank receives. The next rank never does: it waits in
# `send` too. With four ranks:

# %%
plots.who_waits({rank: (rank + 1) % 4 for rank in range(4)}, ranks=4)

# %% [markdown]
# A circle of arrows is a deadlock. Two cures: **break the circle** (one rank
# receives first), or **do not wait yet**: start the send and the receive, then wait for both. The second
# keeps all links busy. In PyTorch:
#
# ```python
# handles = dist.batch_isend_irecv([
#     dist.P2POp(dist.isend, what_i_send, group=group, group_peer=to_whom),
#     dist.P2POp(dist.irecv, where_it_goes, group=group, group_peer=from_whom),
# ])                          # returns at once; wait for each handle before you use or leave the tensors
# ```
#
# Now mend the cell above. (A trap: some libraries buffer small messages, as MPI does, and there the obvious code works. It
# hangs on the day the tensor grows.)

# %% [markdown]
# ### 4.3 Read a hang
# > difficulty 2/5 · importance 5/5 · 7 minutes · no lines, two numbers
#
# Here is a training loop as you find it in real projects. Twenty documents, four ranks, five documents for each. One
# document is empty, so its mean is NaN. The author was careful: the loop skips a bad batch.

# %%
documents = [f"document number {i}" for i in range(20)]
documents[11] = ""


def loss_of(document):
    return torch.tensor([float(ord(c)) for c in document], device=device()).mean()


def train(documents):
    for i in shard_range(len(documents), dist.get_rank(), dist.get_world_size()):
        loss = loss_of(documents[i])
        if not loss.isfinite():
            continue  # "just skip the bad batch"
        dist.all_reduce(loss)


# %% [markdown]
# Run it. It can't finish, and `launch` ends it after three seconds with a report. (Without a limit it would sit there for
# gloo's thirty minutes.)

# %%
from ranklab.engine import HangError

try:
    launch(train, documents, ranks=4, timeout=3)
except HangError as report:
    print(report)

# %% [markdown]
# (A rank that finished "waits to be released": it has returned, and it is kept alive so that others can still talk to it.)
#
# Three ranks wait, all on the same line. But **the guilty rank is the one that does
# not wait there**: the others wait for *it*. Which rank is it, and how many `all_reduce` calls did it make?

# %%
check(guilty_rank=...)
check(calls_it_made=...)

# %% [markdown]
# **On GPUs the stack can point at the wrong line.** With gloo, `all_reduce` waits until it is done, so each rank's stack
# shows the call it is in. With NCCL, `all_reduce` only puts work into the GPU's queue and returns. Python goes on until
# something needs the GPU's answer, a `.item()` or a `synchronize()`, perhaps some steps later, and that is where the
# stack stops. There you compare what the ranks were *doing on the GPU*. After ten minutes NCCL's watchdog prints it on
# each rank. This is from a real job (issue 1409 of NVIDIA/nccl, shortened):
#
# ```text
# [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST,
#          NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.
# [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=ALLREDUCE,
#          NumelIn=2106881, NumelOut=2106881, Timeout(ms)=600000) ran for 600013 milliseconds ...
# ```
#
# `SeqNum` counts the collectives of a group. Call number 80078 is a broadcast on rank 7 and an all-reduce on rank 3: one
# of them took another branch. Look for the rank with another `OpType`, another size, or a lower `SeqNum`.

# %% [markdown]
# ### 4.4 Decide together
# > difficulty 2/5 · importance 5/5 · 7 minutes · about 3 lines
#
# What came before the hang is worse. Rank 2 skipped its second document, so its *second* call met the others' second
# call, but with its *third* document: wrong sums for three steps, and nobody noticed.
#
# The rule behind it: **all ranks must make the same calls, in the same order.** A branch that depends on
# a rank's own data breaks it. So turn the data into a common decision first, and branch on that. (Mixed-precision
# training needs this when each rank holds only a part of the gradients, as in labs 06 and 07: one rank sees an overflow that the others don't.)
#
# `dist.all_reduce(x, op, group=group)` sums by default; `dist.ReduceOp` has others: MIN, MAX, PRODUCT.

# %%
def all_ranks_finite(loss, group=None):
    """Returns True on every rank when `loss` is finite on every rank, else False on every rank.

    So all ranks take the same branch. One collective on each rank; `loss`, with the graph that it
    may have, is unchanged.
    """
    # reduce a flag, not the loss: which ReduceOp?
    raise NotImplementedError("exercise 4.4: about 3 lines")


# %%
all_ranks_finite = check(all_ranks_finite)

# %% [markdown]
# And the loop, mended with your function. It counts its steps: one bad document now costs one of five, on all ranks alike.

# %% tags=["nbval-check-output"]
def train_together(documents):
    steps = 0
    for i in shard_range(len(documents), dist.get_rank(), dist.get_world_size()):
        loss = loss_of(documents[i])
        if all_ranks_finite(loss):
            dist.all_reduce(loss)
            steps += 1
    return steps


launch(train_together, documents, ranks=4)

# %% [markdown]
# ### 4.5 Who is missing?
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 10 lines · open: no recipe
#
# Deciding together needs all ranks. But on a new cluster some rank may not be there at all, and `dist` will not say
# which: a collective could only hang. Below the collectives lies a **store**: a small dictionary that all ranks read and
# write, kept by one process. `init_process_group` itself meets through it.
#
# | given | |
# |---|---|
# | `store.set(key, text)` | writes |
# | `store.get(key)` | waits until the key is there; returns bytes |
# | `store.check([key, ...])` | True when all these keys are there; does not wait |
# | `store.add(key, n)` | adds n to a counter and returns its new value; no two ranks get the same |
# | `store.wait([key, ...], timedelta(seconds=s))` | waits for the keys; raises RuntimeError when the time is up |
# | `store.compare_set(key, "", text)` | writes only where nothing stands; returns what stands then, as bytes |
#
# Here is no recipe. Think of two ranks whose time is up, and of a third one that calls at that very moment.
#
# **Predict.** 1024 ranks, and one is missing. Each rank asks the store every 10 ms for each rank that it has not seen.
# How many questions does the store get in ten seconds, when all others are seen at once?

# %%
check(questions_to_the_store=...)

# %%
import json
import time
from datetime import timedelta


def roll_call(store, rank, ranks, seconds):
    """Returns the sorted list of the ranks that have not called in time, the same on every rank.

    store   a torch.distributed Store in which nothing stands yet; it serves one roll call
    rank    this rank's number, of `ranks` that should call; they may be thousands
    time    all are here: [] at once. Else the time is up `seconds` after the first call, and
            each rank has the list soon after. A rank that calls later gets that list, too, at
            once, and is on it. Any rank may be missing, also rank 0
    cost    at most ranks + 8 calls to the store of each rank, however long it waits; no collective
    """
    raise NotImplementedError("exercise 4.5: about 10 lines")


# %%
roll_call = check(roll_call)

# %% [markdown]
# Your roll call with five ranks: rank 0 does not come, and rank 3 comes after the time is up. Each rank prints its list.

# %% tags=["nbval-check-output"]
def come(absent, late, seconds=1):
    rank = dist.get_rank()
    dist.barrier()
    if rank == absent:
        return
    time.sleep(2.5 * seconds if rank == late else 0)
    store = dist.PrefixStore("roll", dist.distributed_c10d._get_default_store())
    print("missing:", roll_call(store, rank, dist.get_world_size(), seconds))


_ = launch(come, 0, 3, ranks=5)

# %% [markdown]
# Rank 3 was alive, and yet it is on its own list. That is right: the others have gone on without it, and a rank that
# believes otherwise would wait for them for ever. Every elastic launcher first agrees on which ranks take part
# (lab 14, planned).

# %% [markdown]
# ### Further
#
# Not in the 75 minutes: a loop to read, and one more exercise, which is checked too. The lab runs without them.
#
# `train_together` with 18 documents hangs again: `shard_range` gives two ranks five documents and two ranks four, so now
# the *number* of calls differs. What should the ranks agree on, and when? You build three answers in lab 03: pad, cut,
# join.

# %%
try:
    launch(train_together, documents[:18], ranks=4, timeout=3)
except HangError as report:
    print(report)

# %% [markdown]
# #### `pass_the_token`
# > difficulty 2/5 · importance 4/5 · 8 minutes · about 6 lines
#
# A token travels around the ring 0, 1, 2, ..., back to 0; each rank that holds it adds 1. `send` and `recv` are those of 4.2.
#
# **Predict.** 1024 GPUs in a ring, 20 microseconds for a hop. How many milliseconds until the token is back?

# %%
check(token_round_ms=...)

# %%
def pass_the_token(group=None):
    """The token has gone once around the ring; returns its value as it reached this rank.

    The token is a counter. Rank 0 starts it at 0; each rank adds 1 and sends it on to the next
    one, the last back to rank 0. So rank r returns r, and rank 0 returns the number of ranks.
    Each rank sends one message of 8 bytes.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    token = torch.zeros(1, dtype=torch.int64, device=device())
    if size == 1:
        return 1
    after, before = (rank + 1) % size, (rank - 1) % size
    # dist.send(token + 1, ...) and dist.recv(token, ...): which rank sends first?
    raise NotImplementedError("exercise pass_the_token: about 6 lines")


# %%
pass_the_token = check(pass_the_token)

# %% [markdown]
# Each send is now slowed down by 20 ms, as over a bad link. The bar of a rank ends when your function returns there.

# %%
def watched(fn):
    send = dist.send

    def slow_send(*args, **kwargs):
        time.sleep(0.02)
        return send(*args, **kwargs)

    dist.send = slow_send  # in this rank only, and only for this launch: ranks are fresh each time
    dist.barrier()  # every rank waits here for all the others
    start = time.monotonic()
    fn()
    return start, time.monotonic()


spans = launch(watched, pass_the_token, ranks=8)
first = min(start for start, _ in spans)
plots.time_held([end - first for _, end in spans])

# %% [markdown]
# A staircase: each rank waits until the token has visited all ranks before it, and rank 0 waits until it comes home.
# Only one rank works at any moment. A ring with *one* message in flight is the slowest thing you can build from eight
# ranks. In lab 02 every rank sends at every step, and the same ring becomes the fastest.

# %% [markdown]
# ## 5. The real thing
#
# On a cluster nobody calls `launch`. There, **torchrun** starts the processes on each node and sets the variables of the
# picture. By default it starts *one* process; `--nproc-per-node 8` (or `gpu`) starts one for each GPU. Your program calls
# `dist.init_process_group()` and finds the others through `MASTER_ADDR`. Here is that program, without this course's
# library:

# %%
from pathlib import Path
from tempfile import mkdtemp

from ranklab.engine import torchrun

script = Path(mkdtemp()) / "hello.py"
script.write_text("""
import torch, torch.distributed as dist
dist.init_process_group()
x = torch.tensor([dist.get_rank()])
if torch.cuda.is_available(): x = x.cuda(dist.get_node_local_rank())
dist.all_reduce(x)
print(f"the sum is {x.item()}", flush=True)
dist.destroy_process_group()
""")
output = torchrun(script, ranks=2)
print(output)

# %% [markdown]
# The same sum as `launch` gives to two ranks. (torchrun does not sort what ranks
# print; lines may even run together.)

# %%
assert output.count("the sum is 1") == 2
assert launch(hello, ranks=2) == [1, 1]

# %% [markdown]
# Where torchrun (or Slurm's `srun`) has started the ranks, `launch` runs the function in place.
# So one script works with `python`, `torchrun` and `sbatch`; every project of this course is such a script.

# %% [markdown]
# ## 6. Project
#
# **You are given a new cluster. What do you run first?** A program that says which ranks are there, whether sums are right, and which ranks are slow. This is that program, with your `roll_call` and `ring_shift`, on four ranks numbered as two nodes. `compute` is the rank's own time for a fixed matrix product, `link in` is the time of 2 MB from
# the rank before it. A rank that computes 1.5 times as long as the median is named.

# %%
from ranklab.projects import ranks as project

mine = {"roll_call": roll_call, "ring_shift": ring_shift}
found = project.run(ranks=4, nodes=2, **mine)
print(found["table"])
print("\n".join(found["problems"]) or "all ranks are here, right, and alike")

# %% [markdown]
# One slow GPU of 1024 slows down 1024, because every step waits for it. The project can
# play such faults: `slow=2` makes rank 2 sleep in each product. And here is a rank that is alive but does not answer:

# %% tags=["nbval-check-output"]
from ranklab.engine import RankError

try:
    project.run(ranks=4, nodes=2, missing=3, limit_s=2, **mine)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# **Your turn.** Change one thing below. First write down what you expect: which column changes, by which factor, and is
# a rank named? Ideas: `"n_bytes": 20_000_000`, ten times the message of `link in`; `"ranks": 8`, more ranks than cores;
# `"slow": 0` in place of 2.

# %%
change = {"slow": 2}
found = project.run(**({"ranks": 4, "nodes": 2} | mine | change))
print(found["table"])
print("\n".join(found["problems"]))

# %% [markdown]
# Only one number of the column moves, by the 50 ms of sleep, and so that rank is named.

# %% [markdown]
# ## 7. Measure
#
# A last prediction: `ring_shift` with 1000 numbers of 4 bytes, on 4 ranks. How many bytes are sent, by all ranks
# together?

# %%
check(shift_bytes=...)

# %% [markdown]
# And now count. `Traffic` sees every message that a rank sends, from your code or from torch's.

# %% tags=["nbval-check-output"]
from ranklab.meter import Traffic


def count(what):
    x = torch.zeros(1000, device=device())  # 4000 bytes
    with Traffic() as traffic:
        what(x)
    return traffic.sent_messages, traffic.sent_bytes


def total(what):
    return [sum(column) for column in zip(*launch(count, what, ranks=4))]


rows = {
    "pass_the_token": ([4, 4 * 8], total(lambda x: pass_the_token())),
    "ring_shift": ([4, 4 * 4000], total(ring_shift)),
}
print("on 4 ranks, all together: [messages, bytes]")
for name, (predicted, counted) in rows.items():
    print(f"{name:18} predicted {predicted}   counted {counted}")
    assert predicted == counted

# %% [markdown]
# Now the clock. Two ranks swap tensors with your `ring_shift`, from 8 bytes to 32 MB. Sizes take turns, so a busy moment of your laptop hits all of them a little.

# %%
from statistics import median


def swap_times(rounds=9):
    sizes = (2, 20, 200, 2_000, 20_000, 200_000, 2_000_000, 8_000_000)
    tensors = [torch.zeros(n, device=device()) for n in sizes]
    times = {x.nbytes: [] for x in tensors}
    for _ in range(rounds):
        for x in tensors:
            repeats = 10 if x.nbytes < 1e6 else 1
            seconds = project.timed(lambda: ring_shift(x), repeats, pick=min)
            times[x.nbytes].append(seconds)
    return [(nbytes, median(seconds)) for nbytes, seconds in times.items()]


plots.times_by_size(launch(swap_times, ranks=2)[0], "a swap between two ranks, median of 9 rounds")

# %% [markdown]
# On the left the curve is nearly flat: a small message costs the same whatever its size. That is **latency**. On the right
# it climbs in proportion to the bytes: that is **bandwidth**. The knee between them decides most of lab 02.
#
# Do not compare these times with a GPU's: the ranks share your few cores here, and gloo copies through the operating
# system. Counts are exact on any machine; times are not. So this course asserts counts and prints times.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 00` in a terminal asks these and more, with other numbers each time.

# %% tags=["nbval-check-output"]
questions("00_ranks")

# %% [markdown]
# ## 9. On real GPUs
#
# The project, as it is, on one node with 8 GPUs and on four nodes:
#
# ```bash
# labs/jobs/torchrun.sh ranks
# sbatch labs/jobs/ranks.sbatch
# ```
#
# What changes: the backend is NCCL, each rank owns a GPU, `send` and `recv` are queued on the GPU (they return before
# they are done), and the default limit is ten minutes instead of thirty. In a program of your own, tell torch which GPU
# is yours before anything else:
#
# ```python
# device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
# torch.cuda.set_device(device)            # or every rank uses GPU 0
# dist.init_process_group(device_id=device)   # NCCL connects now, so a bad link fails here and not later
# ```
#
# For the day it hangs, keep each rank's output in a file of its own, and let torch record every collective with its stack:
#
# ```bash
# export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1      # the flight recorder; torchfrtrace reads it
# torchrun --nproc-per-node 8 --tee 3 --log-dir logs train.py        # 3: stdout and stderr, to files and the terminal
# ```
#
# Expect 20 to 40 microseconds for a small all-reduce inside a node, and a few times that across nodes. These are usual values, not ours: this lab has not been run on a GPU machine yet.

# %% [markdown]
# ## 10. What we left out
#
# - **How the ranks find each other** (rendezvous, stores, elastic restarts): labs 14 and 15 (planned).
# - **Groups and meshes of ranks**: you passed `group=` on. Lab 02 uses two groups, lab 12 many.
# - **Why an all-reduce is right and fast**: lab 02 builds it, from the `send` and `recv` you used here.
#
# Next: **01_baseline**: one device, understood. You can't judge eight GPUs before you know what one can do.
