# %% [markdown]
# # 00 Ranks: many processes, one program
#
# > 50 minutes, 35 more with Further · difficulty 1/5 · **spine**: 4.1 to 4.4 · **laptop**: everything, with real processes · **GPUs**: the same cells, one rank on each GPU

# %% [markdown]
# ## 1. Story
#
# Ten minutes. That is how long a training job on GPUs waits, by default, for a message that never comes.
# With 1024 GPUs at two dollars an hour each, one skipped line of Python on *one* of them
# makes all of them wait. How many dollars does that cost before anybody even looks?

# %%
from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status


begin("00_ranks")
check(hang_dollars=...)

# %% [markdown]
# (Replace `...` with your number and run the cell again. `hint("hang_dollars")` helps. You may skip any exercise in this
# course without running its cells: later cells then use the library's answer instead of yours. After a restart of the
# kernel, run the first code cell and then, in a new cell, `catch_up()`: it brings back the answers that passed, and says
# where to go on. `status()` shows what you passed and what comes next.)
#
# When a program waits forever, we say that it **hangs**. This lab teaches you to find the rank that caused it, and that
# saves the ten minutes. But first you need the two things that everything in this course is made of: **ranks**, which
# are processes that all run the same program, and **messages** between them. A machine in a cluster is called a
# **node**. It usually has eight GPUs and runs eight ranks.
#
# You need nothing but Python and a little PyTorch.

# %% [markdown]
# ## 2. Picture
#
# Here are eight ranks on two nodes. Every process knows three numbers about itself. `RANK` is its number in the whole
# job. `LOCAL_RANK` is its number on its node, and says which GPU it takes. `GROUP_RANK` is the number of the node.

# %%
from ranklab.plots import ranks as plots

plots.world(ranks=8, nodes=2)

# %% [markdown]
# Look at ranks 4 to 7: `LOCAL_RANK` begins at 0 again, because a process takes a GPU of its own node.

# %% [markdown]
# ## 3. Smallest working code
#
# `launch` starts four fresh processes, runs the function in each of them, and brings the values back. Here the ranks add
# up their own numbers. `dist.all_reduce` is a **collective**: a call that all ranks make together. Each rank passes a
# tensor, and afterwards every tensor holds the sum.

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
# Four processes ran one program, and no rank was in charge. This is called **SPMD**: single program, multiple data. The
# ranks differ only in what they read from `RANK`. `launch` puts a rank's number in front of what that rank prints. (With
# `nodes=2` it only *numbers* the ranks as if they were on two machines.)
#
# Your functions and variables travel to the ranks by themselves, but only what a rank returns comes back: if a rank
# changes a variable, your notebook doesn't see it.
#
# A **backend** carries the messages. If each rank has a GPU of its own, the backend is NCCL, NVIDIA's library for its
# GPUs. Otherwise it is gloo, which works on the CPU. `device()` gives a rank its own device. No cell in this course names
# a backend, so your code runs on both. (If you have a single GPU, section 9 says how all ranks can share it.)

# %% [markdown]
# ## 4. Build it
#
# Put your code in place of `raise NotImplementedError`, and run the cell and the check below it.
# Stuck? `hint("shard_range")` gives three hints, one more each time; `answer("shard_range")` shows a worked answer.

# %% [markdown]
# ### 4.1 Which part is mine?
# > difficulty 1/5 · importance 5/5 · 10 minutes · about 3 lines
#
# *After this you can say which part of any work belongs to which rank, without asking anyone.*
#
# The first thing a rank needs is its part of the work, its **shard**. Asking another rank would cost messages, so each
# rank works out its shard **alone**. All ranks compute the same split from `n`, their `rank` and the number of ranks,
# `size` (the *world size*).
#
# **Predict.** 8 ranks share 1 000 003 documents. How many documents are in the largest part?

# %%
check(longest_shard=...)

# %%
def shard_range(n, rank, size):
    """Return the part of range(n) that belongs to `rank` of `size`: contiguous, in rank order.

    Together the parts make up range(n), and no two share an item. Their lengths differ by at most
    one; the longer parts come first. A part is a range, a list, or another sequence of numbers.
    """
    raise NotImplementedError("exercise 4.1: about 3 lines")


# %%
shard_range = check(shard_range)

# %% [markdown]
# Your function splits 50 items like this. Not one byte was sent for it, and yet no item is lost and none is taken twice. With 8 ranks, two of them have one item more than the others, and all the others wait for those two: **the slowest rank sets the pace of the job**.

# %%
plots.shards(shard_range, n=50)

# %% [markdown]
# ### 4.2 Ring shift: fix the deadlock
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 6 lines
#
# *After this you can order sends and receives so that a ring of any size never hangs.*
#
# Now a message. `dist.send(x, group_dst=r)` gives `x` to rank `r`, and may wait until `r` takes it.
# `dist.recv(x, group_src=r)` waits for what rank `r` sends, and writes it into `x`. Both take a `group`: the ranks that take
# part, or `None` for all of them. A group numbers its own ranks from 0, and `group_dst` and `group_src` are numbers in the
# group. (`dst` and `src` would be numbers in the whole job.) Pass `group=group` on, because the check tries a smaller group
# too.
#
# The ranks form a ring. Each rank hands its `x` to the next rank and returns what it got from the rank before it; the
# last rank hands its `x` to rank 0. The obvious code is below. **First run it as it is**, and read what the check reports.
# Then read on: below the next picture you find what you need to fix it.

# %%
def ring_shift(x, group=None):
    """Return the `x` of the previous rank; all ranks shift at the same time.

    Returns: a new tensor with x's shape and dtype; `x` itself is unchanged, and all messages have
        arrived.
    Cost: each rank sends x once, in one message; a single rank sends nothing and gets a copy.
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
# A circle of arrows is a **deadlock**. There are two cures. You can **break the circle**: one rank receives first. Or
# **don't wait yet**: start the send and the receive, and then wait for both. The second cure is faster, because all links
# are busy at the same time. In PyTorch:
#
# ```python
# handles = dist.batch_isend_irecv([
#     dist.P2POp(dist.isend, what_i_send, group=group, group_peer=to_whom),
#     dist.P2POp(dist.irecv, where_it_goes, group=group, group_peer=from_whom),
# ])             # returns at once: handle.wait() for each of them, before you use or leave the tensors
# ```
#
# Now go back and fix the cell above. (Don't trust the obvious code where it works. Some libraries, such as MPI, put small
# messages into a buffer, so `send` returns at once. Then the program hangs on the day your tensor outgrows the buffer.)

# %% [markdown]
# ### 4.3 Read a hang
# > difficulty 2/5 · importance 5/5 · 7 minutes · no lines, two numbers
#
# *After this you can read a hang's report and name the rank that is to blame.*
#
# You find training loops like this one in real projects. Four ranks share twenty documents, five for each rank. One
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
# Run it. It can't finish, so `launch` ends it after three seconds and shows a report. (Without `timeout=3` it would sit
# there until gloo's own limit, thirty minutes.)

# %%
from ranklab.engine import HangError

try:
    launch(train, documents, ranks=4, timeout=3)
except HangError as report:
    print(report)

# %% [markdown]
# Three ranks wait, all on the same line. You would now debug that line, and find nothing, because **the guilty rank is the
# one that does *not* wait there**. The others wait for *it*. Which rank is it, and how many `all_reduce` calls did it make?
#
# (A rank that "waits to be released" has returned from its function. It stays alive so that others can still talk to it.) We were wrong about hangs ourselves: `launch` once looked at each rank a single time, and took a rank whose message had just arrived for stuck. Now it looks twice, because one look can't tell late from stuck.

# %%
check(guilty_rank=...)
check(calls_it_made=...)

# %% [markdown]
# **On GPUs the stack can point at the wrong line.** With gloo, `all_reduce` returns when it is done, so each rank's stack
# shows the call that it waits in. With NCCL, `all_reduce` only puts work into the GPU's queue and returns. Python goes on
# until it needs an answer from the GPU, at a `.item()` or a `synchronize()`, perhaps some steps later, and the stack
# shows that line. So on GPUs you compare what each rank was *doing on its GPU*. torch's NCCL backend has a watchdog, a
# thread that looks for calls that take too long, and after ten minutes it prints what it found. This is from a real job
# (issue 1409 of NVIDIA/nccl, shortened):
#
# ```text
# [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST,
#          NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.
# [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=ALLREDUCE,
#          NumelIn=2106881, NumelOut=2106881, Timeout(ms)=600000) ran for 600013 milliseconds ...
# ```
#
# `SeqNum` counts the collectives of a group. Call number 80078 is a broadcast on rank 7 and an all-reduce on rank 3, so
# one of them took a different branch. Look for the rank with a different `OpType`, a different size, or a lower
# `SeqNum`.

# %% [markdown]
# ### 4.4 Decide together
# > difficulty 2/5 · importance 5/5 · 7 minutes · about 3 lines
#
# *After this you can make all ranks take the same branch, with one small message.*
#
# Before the hang, something worse happened. Rank 2 skipped its second document and went on with its third. So when the
# others summed their second documents, rank 2 put its third into the sum. Three sums were wrong, and nobody noticed.
#
# The rule is: **all ranks must make the same calls, in the same order.** A branch that depends on a rank's own data
# breaks it. So first turn the data into a decision that all ranks share, and branch on that. (You will need this again in
# labs 06 and 07, where each rank holds a part of the gradients, and one rank sees an overflow that the others don't.)
#
# `dist.all_reduce(x, op, group=group)` sums by default; `dist.ReduceOp` has others: MIN, MAX, PRODUCT.

# %%
def all_ranks_finite(loss, group=None):
    """Return True on every rank if `loss` is finite on all ranks; otherwise False on every rank.

    So all ranks take the same branch. `loss` and its autograd graph, if any, are unchanged.
    Cost: one collective.
    """
    # reduce a flag, not the loss: which ReduceOp?
    raise NotImplementedError("exercise 4.4: about 3 lines")


# %%
all_ranks_finite = check(all_ranks_finite)

# %% [markdown]
# Here is the loop, fixed with your function; it also counts its steps. One bad document now makes all ranks skip one
# step in five.

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
# > **Spine**: this lab's part ends here. On it goes in [02_collectives](02_collectives.ipynb); the rest of this lab is extra.

# %% [markdown]
# ### Further
#
# This part is not in the 50 minutes: a loop that hangs again, and two more exercises with a check. The lab runs without
# them.
#
# Give `train_together` 18 documents, and it hangs. `shard_range` gives two ranks five documents and two ranks four, so now
# the *number* of calls differs. What should the ranks agree on, and when? In lab 03 you build three answers.

# %%
try:
    launch(train_together, documents[:18], ranks=4, timeout=3)
except HangError as report:
    print(report)

# %% [markdown]
# #### `pass_the_token`
# > difficulty 2/5 · importance 4/5 · 8 minutes · about 6 lines
#
# A token travels around the ring: 0, 1, 2, ..., back to 0. Each rank that gets it adds 1. You need only `send` and `recv`
# from 4.2.
#
# **Predict.** 1024 GPUs form a ring, and a hop takes 20 microseconds. After how many milliseconds is the token back?

# %%
check(token_round_ms=...)

# %%
def pass_the_token(group=None):
    """Pass a token once around the ring; return its value on arrival at this rank.

    The token is a counter, which rank 0 starts at 0. Each rank adds 1 and sends it to the next
    rank; the last sends it to rank 0. So rank r returns the int r, and rank 0 the number of ranks.
    Cost: each rank sends one message of 8 bytes.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    token = torch.zeros(1, dtype=torch.int64, device=device())
    if size == 1:
        return 1
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
    # dist.send(token + 1, ...) and dist.recv(token, ...): which rank sends first?
    raise NotImplementedError("exercise pass_the_token: about 6 lines")


# %%
pass_the_token = check(pass_the_token)

# %% [markdown]
# Now we make each send 20 ms slower, as over a bad link. A rank's bar ends when your function returns on that rank.

# %%
import time


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
plots.time_held([end - first for _, end in spans], "Only one rank works at a time")

# %% [markdown]
# You see a staircase. Each rank waits until the token has visited all ranks before it, and rank 0 waits until the token is
# back. Only one rank works at any moment. A ring with *one* message in flight is the slowest thing you can build from eight
# ranks. In lab 02 every rank sends at every step, and the same ring becomes the fastest.

# %% [markdown]
# #### `roll_call`: who is missing?
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 10 lines · open: no recipe
#
# All ranks must be there to decide something together. But on a new cluster a rank may be missing, and `dist` won't tell
# you which one: a collective would just hang. Below the collectives lies a **store**, a small dictionary that one process
# keeps and that all ranks read and write. The ranks found each other through it in the first place.
#
# | given | |
# |---|---|
# | `store.set(key, text)` | writes `text` under the key |
# | `store.get(key)` | waits until the key is there; returns bytes |
# | `store.check([key, ...])` | True if all these keys are there; does not wait |
# | `store.add(key, n)` | adds n to a counter and returns its new value; no two ranks get the same |
# | `store.wait([key, ...], timedelta(seconds=s))` | waits for the keys; raises RuntimeError when the time is up |
# | `store.compare_set(key, "", text)` | writes only if the key is not there yet; returns what is under the key now, as bytes |
#
# There is no recipe. Think of two ranks whose time is up, and of a third rank that calls at that very moment.
#
# **Predict.** One of 1024 ranks is missing. The others see each other at once, and then each of them asks the store every
# 10 ms for the missing one. How many questions does the store get in ten seconds?

# %%
check(questions_to_the_store=...)

# %%
import json
import time
from datetime import timedelta


def roll_call(store, rank, ranks, seconds):
    """Return the sorted list of the ranks that have not called in time, the same on every rank.

    When all ranks have called, all get [] at once. Otherwise time runs out `seconds` after the
    first call, and each rank gets the list soon after. A rank that calls later gets the same list
    at once, and is on it. Any rank may be missing, including rank 0.
    store: an empty torch.distributed Store, used for one roll call only.
    rank: this rank's number, out of `ranks` that should call; there may be thousands.
    Cost: each rank makes at most ranks + 8 calls to the store, however long it waits; no
        collective.
    """
    raise NotImplementedError("exercise roll_call: about 10 lines")


# %%
roll_call = check(roll_call)

# %% [markdown]
# Now your roll call with five ranks. Rank 0 never calls, and rank 3 calls after the time is up. Each rank prints its
# list.

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
# Rank 3 is alive, and yet it is on its own list of missing ranks. Rightly so: the others have gone on without it, and if
# rank 3 believed that it took part, it would wait for them forever. A launcher that lets ranks come and go must do the
# same: first all agree on which ranks take part (lab 14).

# %% [markdown]
# ## 5. The real thing
#
# On a cluster nobody calls `launch`. There, **torchrun** starts the processes on each node and sets `RANK`, `LOCAL_RANK`
# and the others. By default it starts *one* process; `--nproc-per-node 8` (or `gpu`) starts one for each GPU. Your program
# calls `dist.init_process_group()`, which finds the other ranks through `MASTER_ADDR`. Here is such a program, without this
# course's library:

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
# `launch` gives two ranks the same sum. (torchrun does not sort what the ranks print, and their lines may even run together.)

# %%
assert output.count("the sum is 1") == 2
assert launch(hello, ranks=2) == [1, 1]

# %% [markdown]
# If torchrun (or Slurm's `srun`) has already started the ranks, `launch` starts none and just runs the function. So the
# same script works with `python`, `torchrun` and `sbatch`. Every project of this course is such a script.

# %% [markdown]
# ## 6. Project
#
# **You get a new cluster. What do you run first?** A program that tells you which ranks are there, whether their sums are
# right, and which ranks are slow. Here it is, with your `roll_call` and `ring_shift`, on four ranks numbered as two nodes.
# `compute` is the time that the rank takes for a fixed matrix product, and `link in` is how long 2 MB take to arrive from
# the rank before it. If a rank computes 1.5 times as long as the median rank, the program names it.

# %%
from ranklab.projects import ranks as project

functions = {"roll_call": roll_call, "ring_shift": ring_shift}
results = project.run(ranks=4, nodes=2, **functions)
print(results["table"])
print("\n".join(results["problems"]) or "all ranks are here, right, and alike")

# %% [markdown]
# One slow GPU slows down all 1024, because every step waits for it. The project can simulate such faults: `slow=2`
# makes rank 2 sleep in each product, and `missing=3` keeps rank 3 alive but silent:

# %% tags=["nbval-check-output"]
from ranklab.engine import RankError

try:
    project.run(ranks=4, nodes=2, missing=3, limit_s=2, **functions)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# **Your turn.** Change one thing below. First write down what you expect: which column changes, by which factor, and does
# the program name a rank? Some ideas: `"n_bytes": 20_000_000` makes the message of `link in` ten times as long; `"ranks": 8`
# runs more ranks than you have cores; `"slow": 0` slows down another rank.

# %%
change = {"slow": 2}
results = project.run(**({"ranks": 4, "nodes": 2} | functions | change))
print(results["table"])
print("\n".join(results["problems"]))

# %% [markdown]
# With `slow`, only one number in the `compute` column moves, by the 50 ms of sleep. So the program can name that rank.

# %% [markdown]
# ## 7. Measure
#
# One last prediction. You call `ring_shift` with 1000 numbers of 4 bytes, on 4 ranks. How many bytes do all ranks send
# together?

# %%
check(shift_bytes=...)

# %% [markdown]
# Now count. `Traffic` sees every message that a rank sends, whether your code sends it or torch's.

# %% tags=["nbval-check-output"]
from ranklab.meter import Traffic


def count(fn):
    x = torch.zeros(1000, device=device())  # 4000 bytes
    with Traffic() as traffic:
        fn(x)
    return traffic.sent_messages, traffic.sent_bytes


def total(fn):
    return [sum(column) for column in zip(*launch(count, fn, ranks=4))]


rows = {
    "pass_the_token": ([4, 4 * 8], total(lambda x: pass_the_token())),
    "ring_shift": ([4, 4 * 4000], total(ring_shift)),
}
print("on 4 ranks, all together: [messages, bytes]")
for name, (predicted, counted) in rows.items():
    print(f"{name:18} predicted {predicted}   counted {counted}")
    assert predicted == counted

# %% [markdown]
# Now the clock. Two ranks swap tensors with your `ring_shift`, from 8 bytes to 32 MB. We measure all sizes in turn, round
# after round, so that a busy moment of your laptop doesn't fall on one size only.

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
# On the left the curve is nearly flat, because a small message costs the same whatever its size. This cost is the
# **latency**. On the right the time grows with the bytes: there the **bandwidth** decides. Much of lab 02 is about the knee
# between the two.
#
# Don't compare these times with a GPU's. Here the ranks share your few cores, and gloo copies through the operating
# system. Counts are exact on any machine; times are not. So this course asserts counts and only prints times.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 00` in a terminal asks these and more, with other numbers each time.

# %% tags=["nbval-check-output"]
questions("00_ranks")

# %% [markdown]
# ## 9. On real GPUs
#
# These lines run the same project on one node with 8 GPUs, and on four nodes:
#
# ```bash
# labs/jobs/torchrun.sh ranks
# sbatch labs/jobs/ranks.sbatch
# ```
#
# Now the backend is NCCL, and each rank owns a GPU. `send` and `recv` go into the GPU's queue and return before they are
# done. A call that hangs is ended after ten minutes by default, not thirty. In a program of your own, tell torch which GPU
# is yours before you do anything else:
#
# ```python
# device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
# torch.cuda.set_device(device)            # or every rank uses GPU 0
# dist.init_process_group(device_id=device)   # NCCL connects now, so a bad link fails here and not later
# ```
#
# Prepare for the day when it hangs. Keep each rank's output in a file of its own, and let torch record every collective
# with its stack:
#
# ```bash
# export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1      # the flight recorder; torchfrtrace reads it
# torchrun --nproc-per-node 8 --tee 3 --log-dir logs train.py        # 3: stdout and stderr, to files and the terminal
# ```
#
# Expect 20 to 40 microseconds for a small all-reduce inside a node, and a few times that across nodes. These are usual
# values that we have not measured: this lab has not been run on several GPUs yet.
#
# **With a single GPU** the ranks can share it, and then NCCL's rules are real: tensors on the GPU only, calls that return
# before they are done, a communicator for each group. The speed is not. Before the first launch:
#
# ```python
# os.environ["RANKLAB_SHARE_GPU"] = "1"   # or launch(..., share_gpu=True); `ranklab doctor` says whether this NCCL can
# ```
#
# Sharing needs NCCL 2.30.3, where it is experimental: if the GPU is too small for all ranks, NCCL hangs. Each rank gets
# an equal part of the memory. (We have not run it yet: no GPU was at hand.)

# %% [markdown]
# ## 10. Take with you
#
# 1. Every rank runs one program and differs in `RANK` alone. All must make the same calls in the same order, or the run hangs.
# 2. In a hang, look for the rank that is different: 7 of 8 wait on the same line, and the eighth is on another one, or in no call at all.
# 3. 8 ranks that share 9 equal jobs are 4.5 times as fast as one, not 8: everybody waits for the rank with two.
#
# **What we left out**
#
# - **How the ranks find each other** (rendezvous, stores, elastic restarts): labs 14 and 15.
# - **Groups and meshes of ranks**: you only passed `group=` on. Lab 02 uses two groups, lab 12 many.
# - **Why an all-reduce is right and fast**: in lab 02 you build one from the `send` and `recv` that you used here.
#
# Next is [01_baseline](01_baseline.ipynb), about one device: you can't judge eight GPUs before you know what one can do.
# On the spine it is [02_collectives](02_collectives.ipynb).
