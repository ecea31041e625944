# %% [markdown]
# # 14 Resilience: keep the run alive
#
# > 150 minutes, 180 more with Further, 40 with its bugs · difficulty 4/5 · **laptop**: everything, with real processes that are really killed · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# Llama 3's training on 16,384 GPUs was interrupted unexpectedly 419 times in 54 days. That is once every three hours, and more than half of these interruptions came from GPUs or their memory (arXiv 2407.21783, table 5). A synchronous run stops when any part of it fails. At this size something is always broken, and a run that isn't built for that never ends.
#
# So a large run is a loop of four things: save, notice a failure, find out which part failed, go on. In this lab you build all four. You compute how often to save, write files that are never torn, resume a run bit for bit, keep the same batch on fewer ranks, and find slow ranks, sick GPUs and silent errors. At the end a chaos monkey kills, stops and corrupts lab 12's training, and it still ends as if nothing had happened.
#
# The lab needs labs 00 to 03, and lab 12 for the project.

# %%
import copy
import hashlib
import math
import os
import random
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab import resilience
from ranklab.engine import RankError

begin("14_resilience")

# %% [markdown]
# ## 2. Picture
#
# What interrupted Llama 3, as Meta counted it:

# %%
from ranklab.plots import resilience as plots

plots.interruptions()

# %% [markdown]
# Look at the dark bars: most of the interruptions came from the GPUs and their memory.

# %% [markdown]
# **Predict.** 419 unexpected interruptions in 54 days, on 16,384 GPUs. Assume that failures are proportional to the number of GPUs. How many hours are there between two failures on 2,048 GPUs?

# %%
check(resilience_hours_between_failures=...)

# %% [markdown]
# How sure is that number? Meta also measured its research clusters, over 150 million A100 hours (arXiv 2410.21680, HPCA 2025). A job of 1,024 GPUs failed every **7.9 hours** there, where Llama 3's rate gives 49.5: 6.3 times as often. For larger jobs that paper projects 1.8 hours on 16,384 GPUs and 14 minutes on 131,072, which is 1.7 times as often as at Llama 3's rate (3.1 hours and 23 minutes). Until we read that paper, this lab computed goodput at Llama 3's rate alone, which promises 5 points more on 1,024 GPUs (section 7). A failure rate belongs to one cluster in one year, and to one definition of a failure. Whoever asks you for it should hear both numbers, and you should count your own from the first day.

# %% [markdown]
# ## 3. Smallest working code
#
# Two ranks count until rank 1 kills itself, with the signal that the kernel's out-of-memory killer sends. The launch fails and names the dead rank. A supervisor, here a plain loop, starts both ranks again from what rank 0 has saved. A "life" in the output is one start of the ranks.

# %% tags=["nbval-check-output"]
def count(path, until=6):
    step = torch.load(path) if path.exists() else 0
    while step < until:
        if step == 3 and dist.get_rank() == 1 and not path.with_suffix(".died").exists():
            path.with_suffix(".died").touch()
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(1, device=device()))
        step += 1
        if dist.get_rank() == 0:
            torch.save(step, path)
    return step


folder = Path(tempfile.mkdtemp())
for life in (1, 2):
    try:
        steps = launch(count, folder / "step.pt", ranks=2)[0]
        print(f"life {life}: both ranks have counted to {steps}")
        break
    except RankError as error:
        print(f"life {life}: rank {error.rank} is gone")

# %% [markdown]
# That is the whole idea, and each word of it hides a problem. *Saved*: what if a rank dies while it saves? *From what*: which state does a run have besides its step? *Both*: what if only one rank is left? *Fails*: what if it hangs instead?

# %% [markdown]
# ## 4. Build it

# %% [markdown]
# ### 4.1 How often to save
# > difficulty 2/5 · importance 5/5 · 15 minutes · about 5 lines
#
# *After this you can say how often a run should save, from two numbers.*
#
# The job works for T seconds, saves for C, and so on. A failure comes every M seconds on average. Short intervals cost checkpoints, C / T of the time. Long intervals cost work: a failure loses half an interval on average, which is T / 2M of the time. For Llama 3's run, with a minute for a checkpoint:

# %%
from ranklab.resilience import random_gaps, simulate

HOUR = 3600
mean = 54 * 24 / 419 * HOUR  # seconds between two failures of Llama 3's run
plots.two_costs(checkpoint=60, mean=mean)

# %% [markdown]
# At the lowest point the slope of C / T + T / 2M is zero: 1 / 2M = C / T². So T² = 2 C M.
#
# > **Take away.** T = sqrt(2 C M) (Young, 1974). Checkpoints and lost work then cost the same, sqrt(C / 2M) each: for C = 1 minute and M = 3.1 hours 5% each. Four times as many GPUs fail four times as often, and must save twice as often.
#
# **Predict.** For that run, a failure every 3.1 hours (54 days / 419) and a minute for a checkpoint: after how many minutes of work should the next checkpoint come?

# %%
check(resilience_interval_minutes=...)

# %% [markdown]
# Young's interval is too long when a checkpoint takes a good part of the time between failures, so Daly (2006) added more terms: with x = sqrt(C / 2M) the interval is sqrt(2 C M) (1 + x/3 + x²/9) - C. For planning, either will do. If C is 2 M or more, nothing helps, and the interval is M.

# %%
def optimal_interval(checkpoint_seconds, mean_seconds):
    """Return the seconds of work between two checkpoints that waste the least time.

    checkpoint_seconds: the time for which the job stops to save.
    mean_seconds: mean time between failures, which come at random, whatever the job does and
        however long ago the last one was.
    Both may be far below a second, so the result is not rounded.
    Raises: ValueError if one of them is not above 0.
    Paper: Daly, FGCS 22 (2006), the higher order: about 2 C / 3 less than Young's sqrt(2 C M), CACM
        17 (1974). At most 2% worse than the best if a checkpoint takes at most M, or at least 3 M.
    """
    raise NotImplementedError("exercise 4.1: about 5 lines")


# %%
optimal_interval = check(optimal_interval)

# %% [markdown]
# ### 4.2 Goodput
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 5 lines
#
# *After this you can compute which share of a run is useful work, with failures and restarts.*
#
# **Predict.** The same run saves for a minute after every 20 minutes of work. After a failure it takes 10 minutes until the job works again. What percentage of the whole time is useful work?

# %%
check(resilience_goodput=...)

# %% [markdown]
# This share is called *goodput*. There is an exact formula, because random failures have no memory. L seconds pass without a failure with probability e^(-L/M). If you can start again at once after each failure, it takes M (e^(L/M) - 1) seconds on average until L seconds in a row have gone well. Here you can't start at once: after each failure comes a restart, and it can fail as well.

# %%
def goodput(interval, checkpoint_seconds, mean_seconds, restart_seconds):
    """Return the expected fraction of the time that is useful work, in a long run.

    Failures come at random, even while the job saves or restarts. The work since the last complete
    checkpoint is lost, and each failure costs a restart.
    The result is exact. It is 0.0 if the fraction is too small for a float, because such a run
    never gets anything done.
    interval: seconds of work between two checkpoints.
    Raises: ValueError if interval or mean_seconds is not above 0.
    """
    raise NotImplementedError("exercise 4.2: about 5 lines")


# %%
goodput = check(goodput)

# %% [markdown]
# Here a simulation that jumps from failure to failure tests your functions. The run has 16,384 GPUs, and a checkpoint stops it for 20 seconds, for 2 minutes or for 10. The marks are your optimal intervals. The tops of the curves are flat, so twice the best interval costs little.

# %%
plots.intervals(goodput, optimal_interval, simulate, random_gaps(mean, 3000), mean,
                checkpoints=(20, 120, 600), restart=600)

# %% [markdown]
# > **Take away.** Goodput = (T / M) e^(-R/M) / (e^((T + C)/M) - 1): 85% for T = 20 minutes, C = 1, a restart of R = 10 and M = 3.1 hours. To first order the losses add up: C/T + T/2M + R/M = 16%.

# %% [markdown]
# ### 4.3 Atomic checkpoints
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 15 lines
#
# *After this you can write a checkpoint that is whole or absent, whenever the process dies.*
#
# If a process is killed while it writes, you have half a checkpoint, and the old one is gone. The power may also fail after the write but before the bytes are on the disk. Two tools help: a *rename* within one folder happens completely or not at all, and `os.fsync` waits until the bytes are on the disk.

# %%
def atomic_save(state, path):
    """Save `state` at `path` for torch.load; the file there is always the old one or the new one.

    This holds even if the process is killed during the save, or the power fails: the bytes are on
    the disk (os.fsync) before the name changes, and then the new name is on the disk as well
    (os.fsync of the folder).
    Write in the folder of `path`, because another folder may be on another disk.
    After a save no temporary file is left there, not even from an earlier save that was killed,
    and no file is open.
    One process at a time saves to a path. Others may save to other paths in the same folder.
    path: a str or a Path, perhaps only "name.pt".
    Raises: the error of a full disk, or of a state that can't be pickled; the folder is as before.
    """
    raise NotImplementedError("exercise 4.3: about 15 lines")


# %%
atomic_save = check(atomic_save)

# %% [markdown]
# A checkpoint of this course (`ranklab/checkpoint/`) has one file per rank, with checksums, and an index that is renamed into place last. A folder without an index is no checkpoint.

# %% [markdown]
# ### 4.4 Resume bit for bit
# > difficulty 3/5 · importance 5/5 · 25 minutes · about 18 lines
#
# *After this you can list the state that a run needs to go on with equal bits.*
#
# A run that goes on *nearly* as before can hide a bug: a batch seen twice, dropout masks that repeat, a learning rate schedule that starts again. If you insist on equal bits, every difference is a mistake that you can find.
#
# The given `Run` is a small classifier with all the state that a real run has. Read what changes in a step:

# %%
import inspect

from ranklab.baseline import random_state, set_random_state
from ranklab.resilience import Loader, Run

print(inspect.getsource(Loader.next))
print(inspect.getsource(Run.step))


# %%
def resume_exact(run, saved=None):
    """Return all that the Run needs to resume from this moment, or put it back to `saved`.

    Without `saved`: change nothing. The result can be pickled, and later steps do not change it.
    With `saved`, which an earlier call returned: put the run back to that moment. Its next steps
    are bit-equal to the steps that followed it, even in a fresh process. A run can be put back to
    it any number of times.
    Run and Loader are given: look there for everything that changes in a step.
    """
    raise NotImplementedError("exercise 4.4: about 18 lines")


# %%
resume_exact = check(resume_exact)

# %% [markdown]
# Lab 01's `random_state()` covers only torch's generators, and `set_random_state` puts them back. Below, your functions save a run on handwritten digits after 30 steps. Then the run goes on, and a second process goes on from the file:

# %% tags=["nbval-check-output"]
from sklearn.datasets import load_digits


def new_run():
    digits = load_digits()
    images = torch.from_numpy(digits.data).float()[:400] / 16
    return Run(images.to(device()), torch.from_numpy(digits.target)[:400].to(device()))


def train(path, first):
    run = new_run()
    if not first:
        resume_exact(run, torch.load(path, weights_only=False))
    else:
        [run.step() for _ in range(30)]
        atomic_save(resume_exact(run), path)
    return [run.step() for _ in range(10)]


losses = [launch(train, folder / "run.pt", first, ranks=1)[0] for first in (True, False)]
print("the same losses, bit for bit:", losses[0] == losses[1])

# %% [markdown]
# ### 4.5 Fewer ranks, the same batch
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 8 lines
#
# *After this you can go on with fewer ranks, and keep the batch and its mean.*
#
# A node is gone, and there is no spare. The run can go on with 7 of 8 ranks if a step stays what it was, with the same global batch and the same mean. Then the learning rate and the loss curve also stay the same. You are given lab 00's `shard_range(n, rank, ranks)`, a rank's part of n positions.

# %%
from ranklab.ranks import shard_range


def elastic_batch(batch, ranks, micro_batch):
    """Return the micro-batches of one step: [[(positions, weight), ...] of rank 0, of rank 1, ...].

    Each position 0 .. batch-1 of the global batch appears once. The gradients of the micro-batches'
    mean losses, each multiplied by its weight, add up over all ranks to the gradient of the mean
    loss over the whole batch.
    positions: a range of at most `micro_batch` positions.
    weight: a float.
    All ranks have the same number of micro-batches, because sharded models communicate in each one,
    and that number is as small as possible. The ranks' shares differ by at most one position. If
    nothing is left for a rank, its micro-batch is empty and has weight 0.
    Raises: ValueError if an argument is below 1.
    """
    raise NotImplementedError("exercise 4.5: about 8 lines")


# %%
elastic_batch = check(elastic_batch)

# %% tags=["nbval-check-output"]
for ranks in (8, 7):
    plan = elastic_batch(64, ranks, 4)
    print(f"{ranks} ranks: micro-batches of", [len(p) for p, _ in plan[0]], "on the first,",
          [len(p) for p, _ in plan[-1]], "on the last; weights add up to",
          sum(weight for batches in plan for _, weight in batches))

# %% [markdown]
# ### 4.6 Which rank is slow
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 6 lines
#
# *After this you can find the slow rank, though all steps take equally long.*
#
# One GPU runs hot and is 20% slower. Then the whole run is 20% slower, because all others wait for it, and the step times don't show which rank it is: they are equal on all ranks. What differs is the time until a rank *reaches* the collective.

# %%
def find_straggler(seconds, threshold=1.2, recent=32):
    """Return the ranks that are slow now, the slowest first; [] if there are none.

    A rank is slow if it takes more than `threshold` times as long as a typical rank in the same
    step, in more than half of the last `recent` steps. So there is no alarm for noise, for an
    occasional pause (garbage collection, a checkpoint), or for a step in which all ranks are
    slow. The slowest has the largest median of its time over the typical one's.
    At most half of the ranks are slow. Of two ranks, the slower one is compared with the other.
    seconds: (steps, ranks), each rank's time until it reached the step's collective; not modified.
    Raises: ValueError if `seconds` does not have two dimensions, or is empty.
    """
    raise NotImplementedError("exercise 4.6: about 6 lines")


# %%
find_straggler = check(find_straggler)

# %% [markdown]
# ### Further
#
# #### `PackedStream`
# > difficulty 4/5 · importance 5/5 · 30 minutes · about 25 lines
#
# The loader of 4.4 serves one process, and keeps the order of a whole epoch. A language model reads differently. Documents are shuffled, joined and cut into **windows** of T + 1 tokens, wherever that falls, so most windows begin in the middle of a document. Where does such a run go on when it has lost a node? In torchtitan a sample that waited for room in the next window was skipped at each resume, because it lived in no saved state (pytorch/torchtitan#3008). With another number of data ranks it refused to resume at all (#816).
#
# **Predict.** 64 ranks take 15 windows each in a step, 960 together. After 1,000 steps the run goes on with 48 ranks, which take 20 each. Each rank has saved how many windows it has taken, 15,000, and each of the 48 now skips that many. What percentage of the windows trained on so far comes a second time?

# %%
check(resilience_windows_again=...)

# %% [markdown]
# Nothing fails then, so nobody notices. **Your target:** a step has the same windows on any number of ranks, undisturbed or resumed, and the state has at most 100 bytes. The check counts the tokens over all ranks, and the documents that you read: a resume reads only documents that its next windows need.
#
# You are given `Documents` (`documents.lengths` costs nothing, `documents[i]` reads a document) and lab 00's `shard_range`. First think about the whole stream, which has no ranks in it: which tokens are in window number k? You may write methods of your own, and import what you need where the dots are.

# %%
from ranklab.ranks import shard_range
from ranklab.resilience import Documents


### BEGIN SOLUTION
from bisect import bisect_right
from itertools import accumulate


### END SOLUTION
class PackedStream:
    """Windows of one endless stream of documents, dealt out to any number of ranks.

    The stream is epoch 0, epoch 1, ... one after the other. An epoch is all documents, joined in
    the order torch.randperm(len(documents), generator=...), seeded with seed + epoch. Window k has
    the tokens k * window to (k + 1) * window of the stream: it may hold the end of one document,
    or of one epoch, and the beginning of the next. So each epoch has each token once.
    Step s has the windows s * batch to (s + 1) * batch, whatever the number of ranks. The ranks'
    shares differ by at most one window. There are at most `batch` ranks.
    documents: Documents; some may be empty, some longer than many windows.
    window: the number of tokens in a window, T + 1. batch: windows per step, over all ranks.
    Cost: nothing is sent. A rank reads a document at most once for each of its windows that needs
        it, and no other documents, even after a resume. The random states of torch, NumPy and
        Python are not changed.
    """

    def __init__(self, documents, window, batch, seed=0, rank=0, ranks=1):
        self.documents, self.window, self.batch, self.seed = documents, window, batch, seed
        self.rank, self.ranks, self.step = rank, ranks, 0

    def next(self):
        """Return this rank's windows of the next step: (number of windows, window), int64."""
        raise NotImplementedError("exercise PackedStream, first part: about 20 lines")

    def state_dict(self):
        """Return what load_state_dict needs; change nothing.

        As JSON it has at most 100 bytes. It is the same on all ranks, so it is written only once.
        """
        raise NotImplementedError("exercise PackedStream, second part: about 1 line")

    def load_state_dict(self, state):
        """Continue after the step at which `state` was taken, with any number of ranks.

        Documents, window, batch and seed are as they were. This stream may have advanced before.
        """
        raise NotImplementedError("exercise PackedStream, third part: about 1 line")


# %%
PackedStream = check(PackedStream)

# %% [markdown]
# Now real ranks read: four of them for eight steps, and then three go on from the state of rank 0. Each token is a different number here, so you can count what is lost and what comes twice. For comparison there is a second stream, whose state is a rank's own count, as in the prediction:

# %%
class OwnCount(resilience.PackedStream):
    """The library's stream, with a state that counts the windows of one rank."""

    def state_dict(self):
        return {"windows of this rank": self.step * self.batch // self.ranks}

    def load_state_dict(self, state):
        self.step = state["windows of this rank"] * self.ranks // self.batch


lengths = torch.randint(0, 90, (60,), generator=torch.Generator().manual_seed(1)).tolist()


def read(kind, steps, state=None):
    """[each step's windows as tuples], the state, how many documents were read; on this rank."""
    documents = Documents(torch.arange(sum(lengths)).split(lengths))
    stream = kind(documents, 16, 12, rank=dist.get_rank(), ranks=dist.get_world_size())
    if state:
        stream.load_state_dict(state)
    steps = [[tuple(row) for row in stream.next().tolist()] for _ in range(steps)]
    return steps, stream.state_dict(), len(documents.read)


# %% tags=["nbval-check-output"]
lives = {"undisturbed": [launch(read, PackedStream, 12, ranks=4)]}
for name, kind in {"yours": PackedStream, "own count": OwnCount}.items():
    first = launch(read, kind, 8, ranks=4)
    lives[name] = [first, launch(read, kind, 4, first[0][1], ranks=3)]
for name, runs in lives.items():
    tokens = Counter(token for ranks in runs for steps, *_ in ranks for windows in steps
                     for window in windows for token in window)
    print(f"{name:11} {len(tokens):,} tokens, {sum(n > 1 for n in tokens.values())} of them twice; "
          f"in its last life rank 0 read {runs[-1][0][2]} of {len(lengths)} documents")
print("the state of yours:", lives["yours"][0][0][1])

# %%
(steps, *_), = launch(read, resilience.PackedStream, 12, ranks=1)
plots.windows_taken({name: [[steps for steps, *_ in ranks] for ranks in runs]
                     for name, runs in lives.items()},
                    [window for windows in steps for window in windows], batch=12)

# %% [markdown]
# Look at the last row. The rank's own count begins 24 windows too early, which is 25% of those trained on, while yours goes on where it was: a window's number is the same on four and on three ranks.
#
# **The real thing.** transformers' `Trainer` resumes with Accelerate's `skip_first_batches`: each process skips one of its own batches for each step done (`trainer.py` of transformers 5.23). That is right on the same number of ranks, and on another one if you change the batch of each rank so that the global batch stays the same. If each rank's batch stays the same, samples come twice or never (huggingface/transformers#40245). Here Accelerate's own sampler and `skip_first_batches` deal out 72 samples, and go on after three steps:

# %% tags=["nbval-check-output"]
from ranklab.peers.hugging_face import NOT_HERE, samples_of_resumed_ranks

for before, after, size in ((4, 3, 4), (4, 3, 3), (3, 4, 3)):
    samples = samples_of_resumed_ranks(72, before, after, steps=3, batches=(3, size))
    if samples:
        print(f"{before} ranks of 3, then {after} ranks of {size}: {72 - len({*samples})} samples "
              f"are lost, {len(samples) - len({*samples})} come twice")
    else:
        print(NOT_HERE)

# %% [markdown]
# Loaders made for pretraining save a global place, as yours does. Megatron-LM counts the samples consumed over all ranks, and finds each of them by three indices: of documents, of samples, and of the shuffle (its `data_samplers.py` and `gpt_dataset.py`). The state of MosaicML's StreamingDataset is four numbers: the epoch, the sample in it, the seed, and the number of nodes that the order was made for. litData learned in 2026 to go on with another number of ranks or workers, and its pull request asks you to keep the global batch (Lightning-AI/litData#878). Between your stream and theirs lie workers that read ahead, shards too large to jump around in, and mixtures of sources. Each of them adds a number to the state.

# %% [markdown]
# #### `health_check`
# > difficulty 4/5 · importance 4/5 · 30 minutes · about 20 lines
#
# Before a run starts, and after each failure, you want to know: does a GPU compute wrong numbers, is a GPU slow, is a link slow? You are given a `Probe`, which measures one rank or one link. You decide which rank measures what, in which order, and what the results mean. In a ring a rank can use only one of its two links at a time, so measure the even links first, then the odd ones. If both links of a rank are slow, blame the rank, not the links.

# %%
from ranklab.resilience import Health, Probe


def health_check(probe, group=None, slow=3.0):
    """Measure all ranks and the links of their ring; return the same Health on every rank.

    A link is as slow as the slower of its two measurements. Two ranks have one link, one has none.
    probe: a Probe, or any object with its three methods: product() -> (right?, seconds), memory()
        -> right?, message(partner, group) -> seconds, which both ranks of a link call.
    slow: a product is slow if it takes more than this many times as long as on the fastest rank,
        and a message if it takes more than this many times as long as on the fastest link.
    Cost: one product() and one memory() on each rank, and one message() on each link. A rank talks
        to one other at a time, and at most 3 messages follow one another, however many ranks there
        are. Then one all-gather of 4 numbers.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    raise NotImplementedError("exercise health_check: about 20 lines")


# %%
health_check = check(health_check)

# %% [markdown]
# `help(Health)` says what to return. In the run below the messages are real, but the seconds are made up: they show a bad cable between ranks 1 and 2.

# %% tags=["nbval-check-output"]
class BadCable(Probe):
    def message(self, partner, group=None):
        super().message(partner, group)
        is_bad = {dist.get_rank(group), partner} == {1, 2}
        return 0.5 if is_bad else 0.01  # not those of this machine, which may be busy


print(launch(lambda: health_check(BadCable(times=1)).links, ranks=4)[0])

# %% [markdown]
# #### `silent_corruption`
# > difficulty 3/5 · importance 4/5 · 20 minutes · about 12 lines
#
# The worst failure is a GPU that computes wrong numbers and says nothing, like 6 of Llama 3's 419 interruptions. With data parallelism you have a test: the weights of all ranks must be equal bit for bit. You can compare them without sending them.

# %%
def silent_corruption(parameters, group=None):
    """Return {name: [rank, ...]} of the parameters whose bits are not equal on all ranks.

    The list has the ranks, numbered in the group, that differ from the majority. If at most half
    of the ranks are equal, as when two ranks differ, it is []: nobody knows which one is right.
    The result is the same on every rank, and {} if all bits are equal.
    parameters: {name: tensor}, the same names in the same order on all ranks. Tensors may have any
        dtype, contain NaN, and be strided or empty.
    Cost: one all-gather in total, of 8 bytes for each parameter; the tensors are not sent.
    """
    raise NotImplementedError("exercise silent_corruption: about 12 lines")


# %%
silent_corruption = check(silent_corruption)

# %% [markdown]
# Below, one bit of one weight is flipped on rank 2 of four. You can find a rank that *computes* wrong numbers even before its weights go wrong: let all ranks compute the gradients of one rank's batch, and compare those. The library's `recompute_step` does this.

# %% tags=["nbval-check-output"]
def turn_a_bit():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device=device())
    if dist.get_rank() == 2:
        model.weight.data.view(torch.int32)[5, 7] ^= 1
    return silent_corruption(dict(model.named_parameters()))


print(launch(turn_a_bit, ranks=4)[0])

# %% [markdown]
# #### `loss_spike`
# > difficulty 3/5 · importance 3/5 · 20 minutes · about 10 lines
#
# The loss jumps. Often it recovers by itself, and sometimes the run is lost. PaLM's loss spiked about 20 times. Its authors went back about 100 steps and skipped 200 to 500 batches; when they trained on the same batches from another checkpoint, there was no spike (arXiv 2204.02311, section 5.1).

# %%
def loss_spike(losses, window=64, limit=6.0, patience=3):
    """Return what to do with the step whose loss is losses[-1], before its update.

    "go on"      if the loss is finite, and not far above the losses of the `window` steps before
    "skip"       otherwise: leave this batch out
    "roll back"  if it is such a loss and the `patience` - 1 before it are, too, so skipping did not
                 help: go back to a checkpoint before them, and leave their batches out
    "Far above" means above their middle by more than `limit` times their usual spread, which
    equals the standard deviation if there are no spikes.
    Falling losses and low ones are not spikes.
    Earlier spikes, and losses that are not finite, do not hide a new spike.
    The `window` steps end before the last `patience` losses, so that a row of spikes is not
    judged by itself.
    A rise by 1% of abs(middle) is not a spike, however steady the losses were.
    Among the first 20 losses every finite one is good, because they fall steeply.
    losses: a list of floats, not modified.
    """
    raise NotImplementedError("exercise loss_spike: about 10 lines")


# %%
loss_spike = check(loss_spike)

# %% [markdown]
# #### `lemon_nodes`
# > difficulty 3/5 · importance 4/5 · 30 minutes · about 12 lines
#
# Meta counted **6.5 failures per 1,000 node-days** on a research cluster of 2,000 nodes with 8 A100s each, and 2.3 on another one (arXiv 2410.21680). A job fails when any of its nodes fails, so the paper's model for N nodes is a mean time to failure of 1 / (N · rate).
#
# **Predict.** By this model, how many hours are there between two failures of a job on 1,024 GPUs?

# %%
check(resilience_mttf_hours=...)

# %% [markdown]
# The same paper *measured* 7.9 hours for jobs of that size, 3.7 times as often. For 16,384 GPUs the model gives the 1.8 hours of section 2, which is a projection, not a measurement. So ask anyone who quotes a rate: failures of nodes or of jobs, and on how many nodes?
#
# **Predict.** On 16,384 GPUs a job fails every 6,490 s. It saves for a minute after every 14 minutes of work. If a restart takes 1 minute instead of 15, how many percentage points of goodput do you gain? Call your `goodput` of 4.2 twice: a restart can fail as well, so it is less than 14 minutes of each 6,490 s.

# %%
check(resilience_restart_points=...)

# %% [markdown]
# Three ways to restart, by your `goodput` (4.2) and by the paper's own (`expected_ettr`, the *effective training time ratio*, which is goodput to first order). The minutes are assumed: the paper has 5 to 20 for a new job. If a repair takes a day, 13 of the 2,048 nodes are in repair on average, and 22 spares are enough on 99% of the days. You pay for the spares all along:

# %% tags=["nbval-check-output"]
from ranklab.resilience import expected_ettr, spares_needed

nodes, rate = 2048, 6.5e-3
mean, spares = 24 * HOUR / (nodes * rate), spares_needed(nodes * rate)
for way, minutes, extra in (("a new job, after a repair", 15, 0),
                            ("new processes, hot spares", 5, spares),
                            ("the same processes, hot spares", 1, spares)):
    share, ettr = (f(14 * 60, 60, mean, 60 * minutes) for f in (goodput, expected_ettr))
    print(f"{way:31} {minutes:2} min: goodput {share:.1%} (ETTR {ettr:.1%}); for each node paid, "
          f"with {extra} spares, {share * nodes / (nodes + extra):.1%}")

# %% [markdown]
# So spares cost one point, and the fast restart that they allow is worth ten. Section 5 says how NVIDIA's tools do it.
#
# Fewer failures are worth even more. **Lemons** are nodes that fail again and again, and pass each check in between. Meta found 40 of them on both clusters by their history, and took them out. Then 4% of the jobs of 512 and more GPUs failed, instead of 14%. Users exclude nodes by hand after a failure, but which nodes they excluded told Meta little about which nodes fail.
#
# One failure says nothing about a node. You get the scheduler's log, and `poisson_tail(count, mean)`, the probability of at least `count` failures where `mean` are expected. Two traps: 2,000 nodes are 2,000 chances for a false alarm, and lemons raise the rate by which all are judged.
#
# **Your target:** of 100 logs without a lemon, at most 5 name a node, and you find every lemon that such a limit allows.

# %%
from ranklab.resilience import JobRecord, make_job_log, poisson_tail

print(inspect.getsource(JobRecord))


# %%
def lemon_nodes(log, false_alarms=0.05):
    """Return the sorted names of the nodes that fail more often than chance explains.

    Healthy nodes fail at random, all at one rate per node-day, whatever job they run. A node is
    named if a healthy node fails at least as often, in as many days, with a probability below
    `false_alarms` / the number of nodes in the log.
    The rate is that of the nodes that are not named, because lemons raise the rate of all nodes,
    and hide behind it: begin with all nodes, and repeat until the same nodes are named again.
    log: [JobRecord, ...] in any order, not modified; at least one.
    false_alarms: how many healthy nodes may be named on average, in a log without lemons.
    Raises: ValueError unless `false_alarms` is above 0 and below half the number of nodes.
    """
    raise NotImplementedError("exercise lemon_nodes: about 12 lines")


# %%
lemon_nodes = check(lemon_nodes)

# %% [markdown]
# Nobody publishes such a log with its lemons named, so these logs are **emulated**: the number of nodes, the rate and the share of lemons are Meta's, and the rest is assumed (`help(make_job_log)`). First 100 logs without a lemon, then 24 lemons among 2,000 nodes, in logs of 2 to 16 weeks:

# %% tags=["nbval-check-output"]
quiet = [lemon_nodes(make_job_log(nodes=200, lemons=0, seed=seed)[0]) for seed in range(100)]
print(f"of {len(quiet)} logs without a lemon, {sum(map(bool, quiet))} name a node")

# %%
counts = {"5% for each node": {}, "5% for all nodes": {}}
for days in (14, 28, 56, 112):
    log, lemons = make_job_log(days=days)
    for rule, number in zip(counts, (0.05 * 2000, 0.05)):
        names = {*lemon_nodes(log, number)}
        counts[rule][days] = len(names & {*lemons}), len(names - {*lemons})
plots.named_nodes(counts)

# %% [markdown]
# Look at the left bar of each pair: most of the nodes that it accuses are healthy. The right bar accuses none of them, and needs months. That is why Meta uses more signals than failures (XID errors, tickets, how often a node was taken out, failures of jobs on one node), over 28 days, and why a node that is named gets tests, not a verdict.

# %% [markdown]
# #### `recovery_policy`
# > difficulty 5/5 · importance 3/5 · 50 minutes · about 30 lines · open: no recipe
#
# A node fails. Do you wait for its repair, go on with fewer nodes, or take a spare that you have paid for all along? How often do you save when failures come in bursts, or more often than promised? There is no recipe, and no best policy.
#
# A job runs in a simulation, with failures drawn from published rates. Your policy is called at the start and at each event. The score is useful work per node-second that you pay for. An oracle knows all failures in advance, and the check wants a share of its score. It prints your score next to the oracle's, and to the score of a policy that uses Daly's interval and waits for every repair. `help(State)`, `help(Decision)` and `help(Job)` say what you see and what you can decide.

# %%
from ranklab.resilience import (
    REGIMES, Decision, Job, State, daly_policy, make_trace, oracle, run_policy,
)


### BEGIN SOLUTION


### END SOLUTION
def recovery_policy(state):
    """Decide what the job does after an event: State -> Decision.

    It is called at the start and at each event, and keeps nothing between calls.
    Its score, by run_policy, is the useful work per node-second that is paid for. In each of
    REGIMES it must be at least the share `reach` of an oracle's score, on traces different from
    those in the lab.
    """
    raise NotImplementedError("exercise recovery_policy: about 30 lines")


# %%
recovery_policy = check(recovery_policy)

# %%
scores = {}
for name, regime in REGIMES.items():
    trace, seconds = make_trace(regime), regime.days * 24 * HOUR
    scores[name] = {"waiting, Daly": run_policy(daly_policy, regime.job, trace, seconds),
                    "yours": run_policy(recovery_policy, regime.job, trace, seconds),
                    "oracle": oracle(regime.job, trace, seconds)[0]}
plots.policies(scores)

# %% [markdown]
# Look at the regimes in which waiting for all nodes gets nearly nothing, and at how close you come to the oracle.

# %% [markdown]
# ## 5. The real thing
#
# **Saving in the background.** torch's DCP (distributed checkpoint) saves the shards of an FSDP2 model and its AdamW on two ranks. `save` returns when everything is written, so training waits. `async_save` copies the state and returns, and a thread writes the copy. Here the thread is made to wait for three steps before it writes, so that the order of events is always the same:

# %% tags=["nbval-check-output"]
from ranklab.peers import torch_elastic

result = launch(torch_elastic.async_beside_sync, folder / "dcp", ranks=2)[0]
for way in ("sync", "async"):
    print(f"{way:5}", " -> ".join(result[way]))
print(f"{result['state']:,} bytes of state on each rank; async_save wrote the state at its call:",
      result["as at the call"])

# %% [markdown]
# Training waits only for the copy in memory, not for the disk. So is C of 4.1 just the copy? Almost. There is a price in memory, because there are two copies of the state. And while the thread writes, the steps are slower: the write takes bandwidth of the host's memory and cores of its CPU, and perhaps the network card that also carries the gradients. Measure the step time during a save, and add what is lost to C. We know of no 97% goodput that came from background saves alone.
#
# **A supervisor.** torchrun is torch elastic: when a rank dies, it ends the others and starts all of them again, while saving and loading is up to your program. Below, a training job that saves every 4 steps runs undisturbed under `launch`, and then under `torchrun --max-restarts=2`, where rank 1 kills itself after step 6:

# %% tags=["nbval-check-output"]
runs = {"launch, undisturbed": launch(torch_elastic.train, folder / "usual", ranks=2)[0],
        "torchrun, a rank dies": torch_elastic.elastic_losses(folder / "elastic")}
for name, run in runs.items():
    print(f"{name:22} restarts {run['restarts']}, began at step {run['began']}, last loss "
          f"{run['loss']:.3f}")
print("bit for bit:", len({run["loss"] for run in runs.values()}) == 1)

# %% [markdown]
# torch elastic notices only processes that end. Two packages notice more. They are an extra, for Linux on x86: `python -m pip install -c constraints.txt -e '.[resilience]'`, 20 MB.
#
# - **A hang.** `python labs/jobs/ft_step.py` runs the same training job under `ft_launcher` from NVIDIA's nvidia-resiliency-ext. Each rank sends *heartbeats*, which say that it is alive, and a monitor beside it waits at most 3 seconds for the next one. The script stops rank 1 with SIGSTOP, and 2.9 to 3.5 s later the monitor names it (five runs; on a busy machine the script waits longer). All ranks start again at step 4, and the last loss is the one above, bit for bit. The project's `Heartbeats` do the same with a shared file: they end a stopped rank after a second without a step.
# - **No restart.** `python labs/jobs/torchft_step.py` trains two replica groups, each with the whole model, with torchft. One group is killed after step 10, and the other goes on alone. The dead group is started again, takes weights and step from the living group, and joins it. In six runs the living group paused for 1.0 or 1.1 s, the timeout of torchft's lighthouse (the server that knows which groups are alive), and made 19 to 43 steps alone. At the end the sums of both groups' weights agree in all 12 digits, although no checkpoint was read and the living group lost no step. But while it is alone, its batch is half as large.

# %% [markdown]
# **How not to restart.** A restart that takes 12 minutes is made of many parts: the scheduler, containers, imports, CUDA, NCCL, reading the checkpoint. Each of the following ways saves some parts. Four ways are in nvidia-resiliency-ext 0.7.0 (its guide, tag v0.7.0-main). We ran only `ft_launcher` of 0.4.1, because later wheels need glibc 2.39, and 0.7.0 needs Python 3.12 or 3.14.
#
# - *In-process restart.* `inprocess.Wrapper` calls your training function again in the same processes, on the ranks that are still healthy. So there is no new job, no interpreter, no imports and no CUDA context. In return the function must allow a second call and should load a checkpoint each time, and the timeout of NCCL's watchdog must be longer than the wrapper's own. A rank that hangs with Python's lock held is killed anyway, and by default the loss of rank 0's node ends the job.
# - *Hot spares in the allocation.* `ft_launcher --nnodes=32:34` trains on 32 of 34 nodes, and the other two stand by. Your `recovery_policy` knows what they cost.
# - *Local checkpoints.* `LocalCheckpointManager` saves each rank's part on its node's SSD or RAM disk, with copies on other ranks (`CliqueReplicationStrategy`), as Gemini does below. The shared file system then needs a save only now and then.
# - *Straggler reports.* Its detector gives each rank a score from 0 to 1, against the fastest rank and against the rank's own best. Your `find_straggler` compares with the median.
# - *Preemption* is a failure with a deadline: a SIGTERM, and some seconds later a SIGKILL (lab 15). The signal reaches the ranks in different steps, so they must agree on the step after which they save. Otherwise one of them waits in a collective that the others have left. `ranklab/trainer/stop_signal.py` does that.
#
# **Which checkpoint is known to be good?** The last one is only the newest. It may hold a NaN, a flipped bit, or the weights after a spike, and nobody notices for hours. So keep the last few for crashes, and one from each day for everything else. Call a checkpoint good when it has been loaded again, its checksums fit, and the held-out loss computed from it is as expected. Delete an old one only when a newer one is good.
#
# **Without a disk.** Gemini (SOSP 2023) keeps a copy of each rank's shard in the memory of a neighbour. Below, rank 2 of four plays the new process that takes a dead one's place: it has nothing, and gets its state from rank 3:

# %% tags=["nbval-check-output"]
from ranklab.meter import Traffic
from ranklab.resilience import Neighbour


def keep_and_recover():
    rank, keeper = dist.get_rank(), Neighbour()
    shard = [torch.full((1000,), float(rank), device=device())]
    with Traffic() as traffic:
        keeper.keep(7, shard)
    if rank == 2:  # what a new process has
        keeper, shard = Neighbour(), [torch.zeros(1000, device=device())]
    step = keeper.recover(shard)
    mean, nbytes = shard[0].mean(), traffic.sent_bytes
    return f"step {step}, {mean:.0f} is there again; keep() sent {nbytes} bytes"


print(*launch(keep_and_recover, ranks=4), sep="\n")

# %% [markdown]
# **Predict.** 128 nodes form a ring, and each node keeps a copy of its predecessor's shard. Two random nodes die at the same time. With what probability, in percent, is a shard lost?

# %%
check(resilience_neighbour_lost=...)

# %% [markdown]
# ## 6. Project
#
# **A run that survives.** Lab 12's GPT trains on real text with four ranks (data 2 x pipeline 2, ZeRO-1), under a supervisor and a chaos monkey. The monkey kills ranks by SIGKILL, stops them by SIGSTOP, makes one skip a collective, changes bytes of a checkpoint, fills the disk in the middle of a save, or slows a rank down. The supervisor watches heartbeats. After a failure it starts the ranks that are left, in a layout that fits, from the last checkpoint that is whole:

# %%
from ranklab.projects import resilience as project

trial = project.trial(faults=3, seed=44, steps=30)
print(project.report([trial], find_straggler, goodput))

# %%
plots.lives(trial.found, trial.config.steps)

# %% [markdown]
# The held-out loss equals an undisturbed run's, to 0.00001. The bits differ, because another layout adds in another order. So compare with an undisturbed run that changes its layout at the same steps: weights and optimizer are equal bit for bit, and the faults have left no trace. Because some pipeline stages have more to do than others, your `find_straggler` gets each rank's seconds divided by those of the undisturbed run.
#
# **Your turn.** Change one thing: `seed`, more faults, `checkpoint_every=8`, or other layouts. First write down which numbers will change.

# %%
variant = project.trial(faults=2, seed=5, checkpoint_every=8)
print(project.report([variant], find_straggler, goodput))

# %% [markdown]
# ## 7. Measure
#
# The goodput of a run at three sizes, predicted by your formula and simulated, at the failure rates of Llama 3 and of Meta's research clusters. The interval is yours, a checkpoint takes one minute, and a restart takes ten.

# %% tags=["nbval-check-output"]
for gpus, research in ((1024, 7.9), (16384, 1.8), (131072, 14 / 60)):
    for rate, hours in (("Llama 3's", 54 * 24 / 419 * 16384 / gpus), ("research", research)):
        mean = hours * HOUR
        interval = optimal_interval(60, mean)
        predicted = goodput(interval, 60, mean, 600)
        simulated = simulate(interval, 60, random_gaps(mean, 20000), 600)
        print(f"{gpus:7,} GPUs, {rate:9} rate: a failure each {mean / 60:5.0f} min, a checkpoint "
              f"each {interval / 60:4.1f} min; useful {predicted:.1%}, simulated {simulated:.1%}")

# %% [markdown]
# Llama 3 reports more than 90% effective training time on 16,384 GPUs. On 1,024 GPUs the two rates differ by a factor of 6, and cost you 5 points of goodput. At eight times Llama 3's size, with the same parts, more than half of the time would be lost at either rate. So at that size a checkpoint must take seconds, and a failure must not restart every rank.

# %% [markdown]
# ## 8. Bug of the lab
#
# A bug of the lab is a program that breaks the idea of its lab and still runs. A colleague says what was seen, but not why. Look, write down why before you open the list of causes, and fix the program in its own cell: then it has the numbers of one process, also on other numbers of ranks and in a group of some of them ([16_clinic](16_clinic.ipynb) has bugs that belong to no single lab, and tools that find them).

# %%
import io

import torch.nn.functional as F
from torch import nn

from ranklab.data import digits

# %% [markdown]
# ### 8.1 Better after the restart
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 2 lines
#
# > The job was stopped after step 8 and went on from its checkpoint. Its first loss after that was 0.48, and we were pleased, because a run without a stop has 0.58 there. But from the next step on the run without a stop is ahead, 0.40 against our 0.49.

# %%
def resumed_digits(group=None, steps=12, stops=(8,), batch=120):
    """Train; return {"losses": of each step, "weights", "seen": images this rank has trained on}.

    The job is stopped at `stops`. Each time it resumes from what it has saved.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    images, losses, seen, file = digits(), [], [], io.BytesIO()
    x, y = images.train.flatten(1)[:700].to(device()), images.train_labels[:700].to(device())
    in_epoch = -(-len(x) // batch)  # steps; the last batch is smaller
    for last in (*stops, steps):
        torch.manual_seed(0)
        model, step = nn.Linear(64, 10).to(device()), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if file.tell():
            file.seek(0)
            state = torch.load(file, map_location=device())
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
        while step < last:
            shuffle = torch.Generator().manual_seed(step // in_epoch)
            order = torch.randperm(len(x), generator=shuffle)
            for at in order.split(batch):
                mine = at.tensor_split(ranks)[rank]
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[mine]), y[mine], reduction="sum") / len(at)
                loss.backward()
                for each in [total := loss.detach(), *(p.grad for p in model.parameters())]:
                    dist.all_reduce(each, group=group)
                optimizer.step()
                losses.append(total.item())
                seen += mine.tolist()
                if (step := step + 1) == last:
                    break
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "step": step}, file)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights, "seen": seen}


# %% [markdown]
# **Look.** The loss of each step without a stop, and with a stop after step 8:

# %%
for stops in ((), (8,)):
    results = launch(lambda: resumed_digits(stops=stops), ranks=4)
    print(stops, [round(loss, 2) for loss in results[0]["losses"]])

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. After the restart all ranks train on the same images.
# 2. An epoch that was stopped begins from its start, and images that it has trained on come again.
# 3. The checkpoint is older than the stop: some steps are done twice.
# 4. The optimizer goes on without its momentum.
# 5. The weights of one rank are not those that were saved.
#
# </details>

# %%
check(clinic_resumed_digits_cause=...)

# %%
resumed_digits = check(resumed_digits)

# %% [markdown]
# ### 8.2 Most restarts go well
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 6 lines
#
# > Our machines may be taken away at any moment. Last time, says rank 0, the job went on from step 8. But its loss there is 0.75, and in a run that was never stopped it is 0.50. Most restarts go well.
#
# The program divides the model, not the batch: each rank has some columns of the images and the rows of the weights that belong to them. Softmax and its gradient are written out. Each rank's `TemporaryDirectory` plays the disk of its machine: the files of a rank are read by no other rank, and they are still there after the stop. On four ranks `first=4` is nobody, so all machines go together.

# %%
def split_digits(group=None, steps=12, every=4, stop=8, first=1, batch=120):
    """Train; return {"losses": of each step, in the order done, "rows": this rank's weight rows}.

    The rows of the weights are split over ranks. After step `stop` all machines are taken away, and
    that of rank `first` a moment earlier, if there is such a rank. Then the job resumes, each rank
    from its own disk, which is a folder here.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    images, losses = digits(), []
    x, y = images.train.flatten(1).to(device()), images.train_labels.to(device())
    x = x.tensor_split(ranks, dim=1)[rank]  # (N, 64/R)
    with tempfile.TemporaryDirectory() as disk:
        for last in (stop, steps):
            state = {"step": 0, "rows": torch.zeros(x.shape[1], 10, device=device()),
                     "momentum": torch.zeros(x.shape[1], 10, device=device())}
            if Path(disk, "state").exists():
                state = torch.load(Path(disk, "state"), map_location=device())
            start = torch.tensor(state["step"], device=device())
            dist.broadcast(start, group=group, group_src=0)
            rows, momentum = state["rows"], state["momentum"]
            for done in range(int(start) + 1, last + 1):
                at = torch.arange((done - 1) * batch, done * batch) % len(x)
                logits = x[at] @ rows  # (B, 10)
                dist.all_reduce(logits, group=group)
                losses.append(F.cross_entropy(logits, y[at]).item())
                gradient = x[at].T @ (logits.softmax(1) - F.one_hot(y[at], 10)) / batch
                momentum = 0.9 * momentum + gradient
                rows = rows - 0.1 * momentum
                if done == stop == last and rank == first:
                    break
                if done % every == 0:
                    torch.save({"step": done, "rows": rows, "momentum": momentum},
                               Path(disk, "state"))
    return {"losses": losses, "rows": rows}


# %% [markdown]
# **Look.** The losses when rank 1's machine goes first, and when all go together:

# %%
for first in (1, 4):
    results = launch(lambda: split_digits(first=first), ranks=4)
    print(first, [round(loss, 2) for loss in results[0]["losses"]])

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Momentum is not saved: after a restart it begins from zero.
# 2. One rank's rows are those of an earlier step than the others'.
# 3. The data begin from their start again after a restart.
# 4. The ranks divide the columns of the images in another way after a restart.
# 5. What is saved is rounded: the file has fewer bits than the memory.
#
# </details>

# %%
check(clinic_split_digits_cause=...)

# %%
split_digits = check(split_digits)

# %% [markdown]
# ## 9. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 14` in a terminal asks these and more, with other numbers each time.

# %%
questions("14_resilience")

# %% [markdown]
# ## 10. On real GPUs
#
# ```bash
# python -m ranklab.projects.resilience --faults 5 --seed 1
# python -m ranklab.projects.resilience --soak 20
# sbatch labs/jobs/resilience.sbatch
# ```
#
# We ran seeds 1 to 100 with five faults each. All 100 runs ended as if undisturbed, and none of 754 checkpoints was torn (`make soak`, half an hour on two busy cores). On one H200 (torch 2.11) every cell of this lab ran, except for the last edits of section 5. The job file trains a 70B model on 256 GPUs: torchrun starts the ranks again when one dies, Slurm requeues the job when a node is gone, and the job goes on from the last whole checkpoint. We have not run it, for want of 256 GPUs.
#
# What changes there: NCCL's watchdog ends a collective that hangs (`TORCH_NCCL_ASYNC_ERROR_HANDLING`, and the timeout of the process group), and its flight recorder says which collective it was (`TORCH_FR_BUFFER_SIZE`; lab 15). Checkpoints go to host memory first, and from there to the disk while training goes on. `health_check` runs before the job, and again on the nodes that failed.

# %% [markdown]
# ## 11. Take with you
#
# 1. Save every sqrt(2CM): saves of 30 s and a failure every 12.4 hours make 27 minutes.
# 2. Notice, and name the rank: heartbeats, each rank's own seconds, checksums.
# 3. Go on bit for bit: weights, optimizer, random states, the loader's place.
#
# **What we left out**
#
# - **Background saves** in the simulation of policies, and failures of the storage itself.
# - **Healing without a restart**, built by hand. Section 5 shows what torchft does.
# - **Errors that all ranks make in the same way**, in attention or on the network. Checksums of weights don't see these.
#
# Next: [15_cluster](15_cluster.ipynb), where all of this meets a real scheduler.
