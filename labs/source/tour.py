# %% [markdown]
# # The tour
#
# > 10 minutes to read, less than one to run · no exercise · **laptop**: everything, with real processes · **GPUs**: the same cells
#
# Training a large language model takes more memory, and more time, than one GPU has. So the weights, the data and the state
# of the training are cut up and spread over many GPUs, which then have to act as one. In this course you write every way
# of cutting, and check each by numbers: the split run must give the same loss as one process.
#
# Here is a first look, in four parts. The outputs are already there. Run the cells if you like (Shift+Enter), or change
# them: nothing can break.

# %% [markdown]
# ## Four ranks from one cell
#
# A **rank** is a process, and all ranks run the same program. `launch` starts four of them, runs a function in each, and
# brings the four results back. `all_reduce` is a **collective**: every rank calls it with a number of its own, and every
# rank leaves with the sum. On a machine with a GPU for each rank, `device()` is that GPU; elsewhere it is the CPU.

# %%
import os

import torch
import torch.distributed as dist

from ranklab import device, launch


def add_up():
    ...


launch(add_up, ranks=4)

# %% [markdown]
# Those were four processes of your operating system, as their numbers show. They share no variables, only the messages
# that they send one another.

# %% [markdown]
# ## A GPT on one rank and on four
#
# Now the same with a model: a small GPT, which learns from the source code of Python's own library. Each of four ranks
# takes a quarter of the batch, computes the gradients of its quarter, and averages them with the other ranks. This is
# **data parallelism**, and `average_gradients(model)` is all that it adds to an ordinary training loop. (Ignore `forgetful`
# for a moment.)

# %%
from ranklab.data import batch_at, python_text
from ranklab.data_parallel import average_gradients
from ranklab.models import GPT, GPTConfig
from ranklab.projects import tour


def train(tokens, steps, forgetful=None):
    ...


tokens = python_text().train
alone = launch(train, tokens, 5, ranks=1)
together = launch(train, tokens, 5, ranks=4)
print(tour.loss_table(alone, together))

# %% [markdown]
# The two columns agree, because the mean of four quarters' gradients is the gradient of the whole batch. Somewhere beyond
# the last printed digit they differ: rounding depends on the order in which numbers are added.

# %% tags=["nbval-check-output"]
pairs = zip(tour.mean_losses(alone), tour.mean_losses(together))
print("The losses agree within 0.0001:", max(abs(one - four) for one, four in pairs) < 1e-4)

# %% [markdown]
# ## One line left out
#
# What if rank 2 never calls `average_gradients`, because an `if` skips it? The other ranks wait for a message that never
# comes. Nothing crashes and nothing is printed, and on GPUs the whole job would sit there for ten minutes by default.
# Here `launch` gives up after three seconds, and says where every rank is.

# %%
from ranklab.engine import HangError

try:
    launch(lambda: train(tokens, 5, forgetful=2), ranks=4, timeout=3)
except HangError as report:
    print(report)

# %% [markdown]
# Ranks 0, 1 and 3 wait in the line that rank 2 left out. The rank to look at is the one that does *not* wait there: it has
# finished, and believes that all went well. Lab 00 teaches you to read such reports, and `check` shows you one whenever
# your own code hangs.

# %% [markdown]
# ## Five layouts, different bytes, one loss
#
# Data parallelism keeps the whole model on every rank. There are other ways to cut: **tensor parallelism** splits each
# matrix over the ranks, and **pipeline parallelism** gives each rank some of the layers. The largest models are trained with
# all three at once. Here is one GPT in five layouts, written as data x tensor x pipeline ranks; the last one has eight ranks, two
# along each axis.

# %%
from ranklab.hybrid import parse_layout
from ranklab.plots import hybrid as plots
from ranklab.projects.hybrid import compare

layouts = [parse_layout(words) for words in ("4x1x1", "1x4x1", "1x1x4", "2x2x2")]
rows = compare.compare(layouts, progress=False)  # one process comes first
plots.compared(rows)

# %% [markdown]
# Look at the left half first: each of four data ranks holds as much as the one process, while every other layout divides
# the memory. Then look at the right half, which shows what that costs in messages, and along which axis they travel.

# %%
print(tour.layout_table(rows))

# %% tags=["nbval-check-output"]
losses = [row["loss"] for row in rows]
print("The losses agree within 0.0001:", max(losses) - min(losses) < 1e-4)

# %% [markdown]
# The whole course rests on this test: **however you cut the training, the loss stays the same.** Bytes, messages and idle
# time change, and to choose a layout you count them. In labs 03 to 12 you write the pieces of this table yourself, and
# compare each with the production tool that does the same.
#
# ## Where to go
#
# Now open [00_ranks](00_ranks.ipynb), the first lab. In an hour you send your first messages between ranks, and find the
# rank that makes a program hang. **Spine**, in the box of a lab, marks the parts of the nine-hour way through the course.
