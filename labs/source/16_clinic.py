# %% [markdown]
# # 16 Clinic: broken runs
#
# > 150 minutes, 70 more with Further · difficulty 4/5 · **spine**: 4.1 · **laptop**: everything, with real ranks that really misbehave · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# In October 2024 Unsloth and Hugging Face found that many runs with gradient accumulation had a wrong loss: each micro-batch was averaged over its own tokens, and then the averages were averaged. Nothing failed. The losses looked like losses. Every library that had copied those few lines had been wrong for years.
#
# This is the usual kind of bug in distributed training. A run hangs, and the log of the rank that waits blames the wrong rank. Or it doesn't hang, trains to the end, and is worse than it should be. You find such bugs by evidence: count, compare the ranks, compare with one process. The labs before this one have built the tools for that.
#
# Seven labs end with a bug to find. Each of those bugs breaks the idea of its lab, so you knew where to look. Here are eight more, and no lab tells you where to look: some hang, some train to the end and are wrong, some go well at first. At the end `ranklab diagnose` examines a program of your own with a set of detectors, four of which you write.
#
# You need labs 00 to 04. If something needs another lab, its box says so.

# %%
import argparse
import hashlib
import inspect
import math
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab.engine import HangError

begin("16_clinic")

# %%
from ranklab.clinic.shards import stored_shards
from ranklab.data import digits
from ranklab.data_parallel import pack, replicas_agree
from ranklab.meter import MemoryCurve, Traffic
from ranklab.models import GPT, GPTConfig

# %% [markdown]
# ## 2. Picture
#
# Three questions, in this order, find most bugs. Does it hang? Do the ranks still agree? Is the result equal to one process? The figure shows what each of the clinic's 21 diseases does to a healthy run. Eight of them are in this lab, and thirteen are bugs of the labs before it:

# %%
from ranklab.plots import clinic as plots

plots.symptoms()

# %% [markdown]
# Look at the column "differs from one process". A single comparison that knows nothing of any bug sees 15 of the 21, and for 7 of these, the diamonds, it is the only sign. They neither hang nor fail, and the ranks agree.

# %% [markdown]
# ## 3. Smallest working code
#
# Here is the smallest case. The colleague says:
#
# > Since I log the best loss, it hangs at the end.

# %%
def train(steps=3, best=1.9):
    for step in range(steps):
        loss = torch.tensor(2.0 / (step + 1), device=device())
        dist.all_reduce(loss)
        if dist.get_rank() == 0 and loss.item() < best:
            best = loss.item()
            dist.all_reduce(loss)  # "the mean, for the log"


try:
    launch(train, ranks=2, stall=1)
except HangError as error:
    print(error)

# %% [markdown]
# Rank 0 waits in a call that rank 1 never makes: one call too many, on one rank. The report says what each of the two did. The log of a real job says only that rank 0 timed out, so people look at rank 0's node. But the cause is the `if`, a branch that only one rank takes. Had rank 0 taken it a step earlier, its extra call would have been paired with the next step's all-reduce on rank 1, and the sums would have been wrong before anything hung.

# %% [markdown]
# ## 4. Build it
#
# Your colleagues bring their programs and say what they see. None of them knows why. Each case takes the three steps of a bug of the lab:
#
# - **Look.** A cell runs the program. What else you print, count or compare is up to you: `print` on each rank, `Traffic`, `MemoryCurve`, `replicas_agree`, lab 04's timeline, one rank next to four, a smaller case. On each rank `with Traffic() as traffic:` counts what it sends, and `traffic.table()` shows it; `with MemoryCurve(model) as curve:` has `curve.peak_bytes`.
# - **Why?** First your own words, or a measurement that would decide it. Then open the list and enter the number of the cause. A wrong one is answered with the measurement that speaks against it.
# - **Fix the program** in its own cell, run that cell, then the check. Fixed means that the program has the numbers of one process, on any number of ranks that shares its data evenly, and in a group of some of them; and that it does what torch's documentation asks for, also where gloo forgives. The check tries other settings than the lab does. Some cases ask for more, and say what.
#
# `look` runs a program and prints what each rank returns, or the report of a hang:

# %%
from ranklab.clinic.look import look

# %% [markdown]
# ### 4.1 It hangs in the first step
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 3 lines
#
# *After this you can find where a program hangs, from the list of each rank's calls.*
#
# > With one rank it runs. With more it hangs in the first step, each time. I raised the timeout to an hour, and now it hangs for an hour. My colleague once got it through. Then the ranks did not agree on how many of each digit are read right.

# %%
def train_with_owners(steps=10, images=1437, width=32, seed=0, group=None):
    """Train a classifier on the first `images` digits, each rank on every R-th of them.

    A rank updates the parameters that it owns, alone keeps their momentum, and sends them to all.
    A step's gradient is the mean over the ranks' batches of 16. Returns the weights, and for each
    digit how many of all ranks' images are read right; the same on every rank.
    """
    rank, ranks, data = dist.get_rank(group), dist.get_world_size(group), digits()
    x = data.train.flatten(1)[:images][rank::ranks].to(device())
    y = data.train_labels[:images][rank::ranks].to(device())
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(),
                                torch.nn.Linear(width, 10)).to(device())
    weights = dict(model.named_parameters())
    owner = {name: place % ranks for place, name in enumerate(weights)}
    mine = [name for name in weights if owner[name] == rank]
    optimizer = torch.optim.SGD([weights[name] for name in mine], lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = torch.arange(16 * step, 16 * step + 16, device=device()) % len(y)
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        for name in weights:
            dist.reduce(weights[name].grad, group_dst=owner[name], group=group)
            weights[name].grad /= ranks
        optimizer.step()
        model.zero_grad()
        for name in mine + [name for name in weights if name not in mine]:
            dist.broadcast(weights[name].data, group_src=owner[name], group=group)
    right = {}
    for digit, guess in zip(y.tolist(), model(x).argmax(dim=1).tolist()):
        right[digit] = right.get(digit, 0) + (guess == digit)
    for digit in right:
        count = torch.tensor(right[digit], device=device())
        dist.all_reduce(count, group=group)
        right[digit] = count.item()
    return {"weights": {name: weight.detach() for name, weight in weights.items()}, "right": right}


# %% [markdown]
# **Look.** The report says where each rank waits, but not for whom.

# %%
look(train_with_owners)

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. A rank is so slow that the others give up.
# 2. A rank makes fewer calls than the others.
# 3. All ranks make the same calls, but not in the same order.
# 4. The tensor of one call has another size on each rank.
# 5. Two groups are used, and the ranks take them in different orders.
#
# </details>

# %%
check(clinic_train_with_owners_cause=...)

# %%
train_with_owners = check(train_with_owners)

# %% [markdown]
# ### 4.2 A detector: the first call that differs
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 6 lines
#
# *After this you can compare the calls of all ranks by a function, and name the first that differs.*
#
# A function can do what you did by eye in 4.1: it gets each rank's list of calls and finds the first place where they differ. `ranklab diagnose` will call yours for each group of a run.

# %%
def first_difference(calls):
    """Return the number, counted from 0, of the first call that is not the same on all ranks.

    None if there is no such call.
    calls  {rank: [its calls, ...]} of a group; a shorter list is not a difference: its rank has
           not come as far yet, and the others are still compared
    """
    raise NotImplementedError("exercise 4.2: about 6 lines")


# %%
first_difference = check(first_difference)

# %% [markdown]
# ### 4.3 Two run, four do not
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 4 lines
#
# *After this you can take apart a hang in which each rank makes the expected number of calls.*
#
# > Two GPUs run, as one replica or as two. Four, as two replicas of two, hang in the first step. I have counted each rank's calls in a step on paper, for both groups. The numbers are the same on all ranks.

# %%
def train_on_a_grid(steps=8, tensor=2, width=32, seed=0, group=None):
    """Train a classifier of digits on replicas of `tensor` neighbouring ranks each.

    The ranks of a replica hold a part of the hidden width each, and see the same batch of 16; each
    replica has its own. Weights whose norm is above 6 are scaled down to it before the update.
    Replica r's norms are logged by its rank number r % tensor, so that not all are written by one
    node. Returns this rank's part of both matrices, and its log (empty where it does not write).
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    members, (replica, shard) = dist.get_process_group_ranks(group), divmod(rank, tensor)
    rows = dist.new_group(members[rank - shard:rank - shard + tensor],
                          use_local_synchronization=True)
    columns = dist.new_group(members[shard::tensor], use_local_synchronization=True)
    data, writes, log = digits(), shard == replica % tensor, []
    x, y = data.train.flatten(1).to(device()), data.train_labels.to(device())
    torch.manual_seed(seed)
    parts = [torch.nn.Parameter((torch.randn(shape) / 8).chunk(tensor, axis)[shard].to(device()))
             for shape, axis in (((width, 64), 0), ((10, width), 1))]

    def norm():
        squares = sum(part.detach().square().sum() for part in parts)
        dist.all_reduce(squares, group=rows)
        return squares.sqrt().item()

    for step in range(steps):
        start = 16 * (step * ranks // tensor + replica)
        part = (x[start:start + 16] @ parts[0].T).relu() @ parts[1].T
        whole = part.detach().clone()
        dist.all_reduce(whole, group=rows)
        logits = part + (whole - part.detach())
        F.cross_entropy(logits, y[start:start + 16]).backward()
        if writes:
            log.append(norm())
        for part in parts:
            dist.all_reduce(part.grad, group=columns)
        size = log[-1] if writes else norm()
        for part in parts:
            part.data = part.data * min(1, 6 / size) - 0.1 * part.grad * tensor / ranks
            part.grad = None
    return {"weights": [part.detach() for part in parts], "log": log}


# %% [markdown]
# **Look.** Draw the four ranks as a square, and an arrow from each to the rank that it waits for.

# %%
look(train_on_a_grid)

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. A rank has left the loop.
# 2. A rank leaves out a call that the others of its group make.
# 3. In one group the ranks make their calls in different orders.
# 4. The parts of a matrix have different sizes.
# 5. The ranks take their two groups in different orders.
#
# </details>

# %%
check(clinic_train_on_a_grid_cause=...)

# %%
train_on_a_grid = check(train_on_a_grid)

# %% [markdown]
# ### 4.4 A detector: who waits for whom
# > difficulty 4/5 · importance 4/5 · 20 minutes · about 10 lines
#
# *After this you can find a circle of waiting ranks in any run that hangs.*
#
# In 4.3 each rank waited in a call that another rank of its group had not reached. Follow the arrows. If they lead back to where you began, no rank will ever go on: that is a deadlock.

# %%
def circle_of_waits(waits):
    """Return ranks that wait for one another in a circle: [rank, ...], each waits for the next one.

    The last waits for the first, and the smallest rank comes first. [] if there is no circle.

    waits  {rank: set of ranks that it waits for}; a rank that waits for no other may be left out
    """
    raise NotImplementedError("exercise 4.4: about 10 lines")


# %%
circle_of_waits = check(circle_of_waits)

# %% [markdown]
# ### 4.5 It learns, then it hangs
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 5 lines
#
# *After this you can track down a hang that comes at another step in each run.*
#
# > It learns, and then it hangs, at a step that changes with the number of ranks. With one rank there is no trouble, however long it runs. With last year's scans it never happened, and nobody has touched the program since.

# %%
def train_until_good(steps=40, batch=4, good=0.7, seed=0, group=None):
    """Train a classifier of digits until it reads `good` of all held-out ones right.

    Each rank has its own scans, `batch` in a step; faint ones are left out. A step's gradient is
    the mean over the scans of all ranks that are left. Held-out digits are shared out, too.
    Returns the weights and the number of steps, the same on every rank.
    """
    rank, ranks, data = dist.get_rank(group), dist.get_world_size(group), digits()
    x, held = (part.flatten(1)[rank::ranks].to(device()) for part in (data.train, data.held_out))
    y, held_y = (part[rank::ranks].to(device()) for part in (data.train_labels,
                                                             data.held_out_labels))
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 10).to(device())
    for step in range(1, steps + 1):
        now = slice(batch * (step - 1), batch * step)
        clear = x[now].mean(dim=1) > 0
        if not clear.any():
            continue
        loss = F.cross_entropy(model(x[now][clear]), y[now][clear], reduction="sum")
        model.zero_grad()
        loss.backward()
        sums = torch.cat([model.weight.grad.flatten(), model.bias.grad, clear.sum()[None]])
        dist.all_reduce(sums, group=group)
        gradient = sums[:-1] / sums[-1].clamp(min=1)
        model.weight.data -= 0.1 * gradient[:640].view(10, 64)
        model.bias.data -= 0.1 * gradient[640:]
        right = (model(held).argmax(dim=1) == held_y).sum()
        if right >= good * len(held_y):
            break
    return {"weights": [model.weight.detach(), model.bias.detach()], "steps": step}


# %% [markdown]
# **Look.** Try two ranks, and three. What is the same each time?

# %% tags=["nbval-check-output"]
look(train_until_good)

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. A rank has crashed, and the others wait for it.
# 2. A rank has so many more scans that it is late.
# 3. All ranks make the same calls, but not in the same order.
# 4. The ranks take their two groups in different orders.
# 5. What a rank sees in its own data decides whether it makes a call.
#
# </details>

# %%
check(clinic_train_until_good_cause=...)

# %%
train_until_good = check(train_until_good)

# %% [markdown]
# ### 4.6 A curve for each number of ranks
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 6 lines
#
# *After this you can find out why a loss curve depends on the number of ranks.*
#
# > The same lines, the same seed, the same learning rate, and yet each number of ranks has a loss curve of its own. The last loss is 3.70 on one rank, 4.00 on two, 3.89 on four. On one rank it also moves with `pieces`: 3.69 for one backward a step, 3.70 for two. It shows in the first step already: 5.5052 for one backward, 5.5050 for two, and 5.5023 on four ranks.

# %%
def moving_curve(steps=6, lines=24, pieces=2, lr=0.5, group=None):
    """Train a GPT on the lines of a program, `lines` in a step.

    Each rank has lines // R of them, in `pieces` backwards; lines % R are left out.
    -> {"losses": of each step, "weights"}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    text = [line.encode()[:64] for line in inspect.getsource(argparse).splitlines() if line[1:]]
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_embd=32)).to(device())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr), []
    for step in range(steps):
        # Lines of about one length together: less is filled up.
        mine = sorted(text[lines * step:][:lines], key=len)[lines // R * rank:][:lines // R]
        losses.append(torch.zeros((), device=device()))
        optimizer.zero_grad()
        for piece in range(pieces):
            rows = [torch.tensor(list(line)) for line in mine[piece::pieces]]
            rows = pad_sequence(rows, True, -100).to(device())
            loss = model(rows[:, :-1].clamp(min=0), rows[:, 1:]) / pieces
            loss.backward()
            losses[-1] += loss.detach()
        for tensor in [losses[-1], *(p.grad for p in model.parameters())]:
            dist.all_reduce(tensor, group=group)
            tensor /= R
        optimizer.step()
    return {"losses": torch.stack(losses), "weights": pack(model.parameters()).detach()}


# %% [markdown]
# **Look.** The first loss on one, two and four ranks:

# %% tags=["nbval-check-output"]
[f"{launch(moving_curve, 1, ranks=ranks)[0]['losses'][0]:.4f}" for ranks in (1, 2, 4)]

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Means over different numbers of tokens are averaged as if these were equal.
# 2. Sums in another order are rounded in another way.
# 3. Sums over the ranks are taken where means are due.
# 4. What fills up the short lines is counted as tokens.
#
# </details>

# %%
check(clinic_moving_curve_cause=...)

# %%
moving_curve = check(moving_curve)

# %% [markdown]
# This was reported to Hugging Face's transformers in July 2023, for the pieces of gradient accumulation (issue 24725), and fixed in October 2024 (pull request 34191). For the ranks there is `average_tokens_across_devices` (34373), which is on by default in version 5.

# %% [markdown]
# ### 4.7 NaN on two of four
# > difficulty 4/5 · importance 5/5 · 15 minutes · about 1 line
#
# *After this you can trace a NaN to the first rank and the first step that had it.*
#
# > We train in float16, with torch's GradScaler. On one rank it goes well. On four the loss is NaN after a dozen steps, on two of the ranks first and a step later on all. A smaller `scale` puts it off, but it does not cure it.

# %%
def half_digits(group=None, steps=16, scale=2.0**16, growth=5, batch=60):
    """Train in float16; return {"losses": this rank's, "weights", "scale"}."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    images, losses = digits(), []
    x, y = images.train.flatten(1).to(device()), images.train_labels.to(device())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device().type, init_scale=scale, growth_interval=growth)
    for step in range(steps):
        at = torch.arange(step * batch, (step + 1) * batch).tensor_split(ranks)[rank] % len(x)
        with torch.autocast(device().type, torch.float16):
            loss = F.cross_entropy(model(x[at]), y[at])
        losses.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= ranks
        scaler.step(optimizer)
        scaler.update()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights, "scale": scaler.get_scale()}


# %% [markdown]
# **Look.** Each rank's losses, and its scale at the end:

# %%
for row in launch(half_digits, ranks=4):
    print([round(loss, 2) for loss in row["losses"]], row["scale"])

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. A rank decides by its own gradients alone whether to skip a step.
# 2. Gradients that are too small for float16 become 0, and something divides by 0.
# 3. One rank begins with other weights, and the ranks drift apart.
# 4. The learning rate is too high: the losses run away.
# 5. There is a NaN among the images of one rank.
#
# </details>

# %%
check(clinic_half_digits_cause=...)

# %%
half_digits = check(half_digits)

# %% [markdown]
# ### Further
#
# Five more, in any order that you like. A box that names no lab needs no more than 00 to 04.

# %% [markdown]
# #### Steps that are too long
# > difficulty 4/5 · importance 5/5 · 10 minutes · about 4 lines · after lab 06
#
# This is revision. You have fixed its twin as a bug of lab 06. Do you recognise it?
#
# > The job clips its gradient to a norm of 0.1 at a learning rate of 0.5, so no step may be longer than 0.05. One rank obeys. On four ranks the longest is 0.094, and on two it is 0.071. The loss falls even faster, so nobody complained. But when we turn clipping off (most=1e9), the learning rate that suits one rank does not suit four.

# %%
def long_steps(steps=30, lr=0.5, most=0.1, group=None):
    """Train softmax regression on digits; each rank updates its part of the weights.

    A step has 240 images. The gradient is that of their mean, clipped to a norm of `most`.
    -> {"loss" at the end, "longest": the norm of the longest step, "weights"}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    images = digits()
    x, y = images.train.flatten(1).to(device()), images.train_labels.to(device())
    size = -(-640 // R)
    w = torch.zeros(R * size, device=device(), requires_grad=True)
    part = nn.Parameter(torch.zeros(size, device=device()))
    optimizer, longest = torch.optim.SGD([part], lr), 0.0
    for step in range(steps):
        at = torch.arange(240)[rank::R] + 240 * (step % 5)
        w.grad, part.grad = None, torch.empty_like(part)
        F.cross_entropy(x[at] @ w[:640].view(64, 10), y[at]).backward()
        dist.reduce_scatter_single(part.grad, w.grad, group=group)
        norm = part.grad.norm()
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        part.grad *= (most / norm).clamp(max=1)
        optimizer.step()
        before = w.detach().clone()
        dist.all_gather_single(w.detach(), part.detach(), group=group)
        longest = max(longest, (w - before).norm().item())
    weights = w.detach()[:640]
    loss = F.cross_entropy(x @ weights.view(64, 10), y)
    return {"loss": loss.item(), "longest": longest, "weights": weights}


# %% [markdown]
# **Look.** The longest step on one, two and four ranks:

# %% tags=["nbval-check-output"]
[f"{launch(long_steps, ranks=ranks)[0]['longest']:.3f}" for ranks in (1, 2, 4)]

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Each rank clips before the ranks' gradients have come together.
# 2. The learning rate grows with the number of ranks.
# 3. The ranks' numbers are combined by the wrong operation.
# 4. The ranks' weights have drifted apart.
#
# </details>

# %%
check(clinic_long_steps_cause=...)

# %%
long_steps = check(long_steps)

# %% [markdown]
# Replicas that agree prove nothing, because all of them may have taken the same wrong step. Hold a step against the same step of one process.

# %% [markdown]
# #### A detector: `own_limit`
# > difficulty 3/5 · importance 3/5 · 15 minutes · about 5 lines · after the bugs of lab 06
#
# The norms of the gradients alone show the bug "Half of the norm" of lab 06, so you needn't read the program.

# %%
def own_limit(norms, tolerance=1e-3):
    """Return the norm to which ranks have clipped their own gradients, each by itself, or None.

    It is the largest finite norm, if two or more ranks have it, within `tolerance` times it, in the
    same step: in at least two steps, and in at least a tenth of all. (If all shards are clipped by
    one norm, the squares of the ranks' norms add up to its square, so no two ranks can have it.)
    norms  [[norm on rank 0, on rank 1, ...] of each step], of gradients that differ between ranks;
           inf and NaN are ignored, and [] is a run without steps
    """
    raise NotImplementedError("exercise own_limit: about 5 lines")


# %%
own_limit = check(own_limit)

# %% [markdown]
# #### A detector: `steps_behind`
# > difficulty 3/5 · importance 3/5 · 15 minutes · about 6 lines · after the bugs of lab 06
#
# The stale weights of "Faster, and it diverges", also in lab 06, leave a trace as well. In each step note the sum of the weights that the model used, and the sum of the weights that the optimizer held: the two lists are the same, but shifted.

# %%
def steps_behind(used, held, tolerance=1e-9):
    """Count by how many steps the model's weights are older than the optimizers' own.

    It is the smallest number that explains all but a tenth of the steps, not counting the first
    ones, whose counterpart would be before the run. None if no number of steps does.

    used  [sum of the weights in the forward of step 0, of step 1, ...]
    held  [sum of the weights that all optimizers held at that moment]; if nothing is stale, the
          two are equal to within `tolerance` times the larger one
    """
    raise NotImplementedError("exercise steps_behind: about 6 lines")


# %%
steps_behind = check(steps_behind)

# %% [markdown]
# #### Out of memory, always on GPU 0
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 2 lines · after lab 06
#
# > We run out of memory after some hours, always on the same one of four GPUs. The others stay at what they took in the first step. The losses are good. Half the batch does not help: the run ends at about the same step.

# %%
def validated_digits(group=None, steps=8, batch=60):
    """Train; return {"losses", "sure" (of rank 0, on held-out images, by step), "weights"}."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    images, losses, sure = digits(), [], []
    x, y = images.train.flatten(1).to(device()), images.train_labels.to(device())
    held_out, labels = images.held_out.flatten(1).to(device()), images.held_out_labels.to(device())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        at = torch.arange(step * batch, (step + 1) * batch).tensor_split(ranks)[rank] % len(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= ranks
        optimizer.step()
        if rank == 0:
            logits = model(held_out)
            losses.append(F.cross_entropy(logits, labels))
            sure.append(logits.softmax(1).amax(1).mean())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": [each.item() for each in losses], "sure": [each.item() for each in sure],
            "weights": weights}


# %% [markdown]
# **Look.** The peak of each rank's memory, in a run of 4 steps and in one of 8:

# %% tags=["nbval-check-output"]
def peak(steps):
    with MemoryCurve(nn.Identity()) as curve:
        validated_digits(steps=steps)
    return curve.peak_bytes


for steps in (4, 8):
    print(f"{steps} steps:", *(f"{n:,}" for n in launch(peak, steps, ranks=4)), "bytes")

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Batches of other lengths leave gaps: the memory is fragmented.
# 2. Each step leaves a copy of the held-out images on the GPU.
# 3. Rank 0 gathers the gradients of the others before it adds them up.
# 4. The optimizer's state grows from step to step.
# 5. What is kept of each validation holds the graph that it came from, and its activations.
#
# </details>

# %%
check(clinic_validated_digits_cause=...)

# %%
validated_digits = check(validated_digits)

# %% [markdown]
# #### One step, in every run
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 2 lines
#
# > In step 5 the loss jumps from 2.0 to 13.9, and at the end it is 6.7, where 1.3 is usual. It happens in every run, always in this step. With a tenth of the learning rate the loss jumps to 18.5. On one rank the jump comes in step 21.
#
# `stored_shards()` returns a list of `Shard(content, sha256)`, and a shard's `batch()` returns its images and labels. The program shows the rest.

# %%
def stored_digits(group=None, steps=12, shards=None):
    """Train on a shard for each rank and step; return {"losses": of each step, "weights"}."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shards, losses = shards or stored_shards(), []
    torch.manual_seed(0)
    model = nn.Linear(64, 10).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        shard = shards[(step * ranks + rank) % len(shards)]
        x, y = shard.batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        total = torch.stack([loss.detach(), torch.tensor(float(len(y)), device=device())])
        for each in [total, *(p.grad for p in model.parameters())]:
            dist.all_reduce(each, group=group)
        for p in model.parameters():
            p.grad /= total[1].clamp(min=1)
        optimizer.step()
        losses.append((total[0] / total[1].clamp(min=1)).item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights}


# %% [markdown]
# **Look.** The loss of each step:

# %% tags=["nbval-check-output"]
print([round(loss, 2) for loss in launch(stored_digits, ranks=4)[0]["losses"]])

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. A shard is not what was written: its bytes have changed.
# 2. One rank's weights were changed, by a bit that flipped.
# 3. The gradient of this step overflows to infinity.
# 4. The images of this step are right, but hard to read.
# 5. The step before was too large: its learning rate is too high.
#
# </details>

# %%
check(clinic_stored_digits_cause=...)

# %% [markdown]
# **Fixed.** The run goes on. Each of the other shards is still read by the same rank in the same step, and a step takes the mean over the images that it trains on.

# %%
stored_digits = check(stored_digits)

# %% [markdown]
# ## 5. The real thing
#
# **torch's own detector.** With `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch compares, before each collective, what the ranks are about to call. That is slow, but needs no report of ours. This is 4.1's program as you found it:

# %%
from ranklab.clinic.all_cases import CASES

CASE = {case.name: case for case in CASES}
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
look(CASE["train_with_owners"].broken())
del os.environ["TORCH_DISTRIBUTED_DEBUG"]

# %% [markdown]
# On GPUs torch's *flight recorder* keeps each rank's last collectives (`TORCH_FR_BUFFER_SIZE=2000`), and writes them to a file when the watchdog's time is up (`TORCH_NCCL_DUMP_ON_TIMEOUT=1`). A dump is a pickle of one rank. Its `entries` are the calls, each with its group, its number in that group (`collective_seq_id`), a name such as `nccl:all_reduce`, the sizes and types of what goes in and comes out, the state (scheduled, started or completed) and the stack of Python lines. `pg_config` has the ranks of each group, and `pg_status` the numbers of the last call that was enqueued, started and completed.
#
# Here is a real dump of a hang. Four ranks form a grid of rows (0, 1), (2, 3) and columns (0, 2), (1, 3). In a step the ranks of a row add up an activation twice, the ranks of a column a gradient, and all ranks a loss. It was recorded with torch 2.13 on gloo, which writes the same entries, except that `state` stays "scheduled" and `retired` says whether a call is done. The last two calls of each rank:

# %% tags=["nbval-check-output"]
from ranklab.clinic import flight

dumps = flight.read_dumps()
groups = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
for rank, dump in dumps.items():
    for entry in dump["entries"][-2:]:
        ranks = groups[entry["process_group"][0]]
        print(f"rank {rank}: {entry['profiling_name']} of ranks {ranks}, call "
              f"{entry['collective_seq_id']} of this group, sizes {entry['input_sizes'][0]}: "
              f"{'done' if entry['retired'] else 'WAITS'}")

# %% [markdown]
# **Predict.** All four have come equally far in the group of all ranks. Which rank do you look at first?

# %%
check(clinic_flight_rank=...)

# %% [markdown]
# `torchfrtrace FOLDER` reads a file of every rank, puts calls of the same group and number side by side, and prints the first that differ in kind, size, type or state: the same idea as your `first_difference`. It knows NCCL only, so the dumps get what gloo leaves out: the ranks of each group, and "started" for a call that is not done. Its verdict has a line for each group in which somebody is missing:

# %% tags=["nbval-check-output"]
with tempfile.TemporaryDirectory() as folder:
    flight.write_as_nccl(dumps, groups, Path(folder))
    for group, number, missing_ranks in flight.torchs_verdict(folder):
        print(f"call {number} of ranks {groups[group]}: missing {missing_ranks}")

# %% [markdown]
# Two ranks are called missing. But one of them waits itself, in another group: follow the waits until you reach a rank that waits for nobody. Then read the stack of its process (`py-spy dump`), because the recorder knows only that no call came.
#
# **`ranklab diagnose`** observes a program that knows nothing of it, and looks for the clinic's twenty-one diseases and eight more. Here it gets a plain script with torch's DDP, in which all ranks draw the same numbers:

# %%
from ranklab.engine import torchrun

script = Path(tempfile.mkdtemp(), "train.py")
script.write_text("""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x = torch.randn(32, 16)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
""")

# %%
from ranklab.course.diagnose import main as diagnose_command

diagnose_command(str(script), ranks=2)

# %% [markdown]
# ## 6. Project
#
# **A round through the ward.** Programs run under observation: as found, fixed, and a *variant* that you have not seen, with the same disease in another place. `diagnose` uses your detectors. Is every sick one found? Is a healthy one called sick?

# %%
from ranklab.projects import clinic as project

# The library's detector stands in for one whose cells you have not run.
detectors = "first_difference", "circle_of_waits", "own_limit", "steps_behind"
functions = {name: globals()[name] for name in detectors if name in globals()}
names = ["train_with_owners", "train_on_a_grid", "flat_model", "gathered_model"]
visits = [project.visit(CASE[name], form, **functions)
          for name in names for form in ("variant", "mended")]
print(project.report(visits))

# %% [markdown]
# The whole round is `python -m ranklab.projects.clinic`: 40 of the 42 sick programs are found, and none of the 21 healthy ones is called sick. The two missed ones are forms of `worse_together`: one run can't show that its learning rate was meant for another number of ranks. `ranklab diagnose --beside` compares it with a run on fewer ranks. All this says less than we thought. The tool was right about 64 further programs of ours, but of 49 sick ones by people who did not know it, it named 34, and it called 4 of 36 unusual healthy ones sick.
#
# **Your turn.** Break a healthy program in your own way. First write down which disease will be named, and which number will be the evidence:

# %% tags=["nbval-check-output"]
def my_patient(steps=12):
    torch.manual_seed(0)
    model = nn.Linear(64, 10).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = digits().train.flatten(1).to(device()), digits().train_labels.to(device())
    for step in range(steps):
        at = torch.arange(32, device=device()) + 32 * step  # all ranks: the same rows
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()


from ranklab.clinic.diagnose import diagnose

print(*diagnose(project.observe(my_patient)), sep="\n")

# %% [markdown]
# ## 7. Measure
#
# What does observation cost? The same training runs with it and without it, in turns, and the last number says how much is written:

# %%
import contextlib
import statistics
import time

from ranklab.clinic.hooks import observation


def seconds(observed):
    with tempfile.TemporaryDirectory() as folder:
        with observation(folder) if observed else contextlib.nullcontext():
            start = time.perf_counter()
            launch(lambda: CASE["no_faster"].program() and None, ranks=2)
            took = time.perf_counter() - start
        size = sum(path.stat().st_size for path in Path(folder).glob("**/*.jsonl"))
    return took, size


rounds = [(seconds(False)[0], *seconds(True)) for _ in range(3)]
plain, watched, size = map(statistics.median, zip(*rounds))
print(f"without {plain:.2f} s, observed {watched:.2f} s: {watched / plain:.1f} x; "
      f"{size / 1024:.0f} KiB written (on a busy machine the ratio may be anything)")

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 16` asks these and more. Now the whole bank is yours: `ranklab interview` is a mock interview of 45 minutes, typed and scored by rubric, and it says which lab to open.

# %%
questions("16_clinic")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# ranklab diagnose --ranks 8 train.py
# RANKLAB_DIAGNOSE=/shared/seen torchrun --nproc-per-node=8 -m ranklab.clinic.hooks train.py
# ranklab diagnose /shared/seen
# python -m ranklab.projects.clinic
# ```
#
# The clinic's programs run on NCCL as they are; what hangs on gloo also hangs there, and what gloo forgives may hang as well. The observer reads each gradient back once a step, so on a GPU each step waits for it. For the 20 programs that run on one rank, it noted the same on a GPU (an H200) as on a CPU: equal numbers of steps, calls, losses and FLOPs, and the same diseases. With several GPUs it has only been rehearsed.

# %% [markdown]
# ## 10. Take with you
#
# 1. Three questions in this order, on ten steps: does it hang, do the ranks agree, is it one process? Of the 21 bugs 15 fail the third, and 7 only that.
# 2. Change one thing that must matter, and one that must not: a batch that is split over two ranks must give one rank's loss.
# 3. Skip, clip, stop and save together, on all ranks: a decision that one of 8 ranks takes alone is a hang or a drift.
#
# **What we left out**
#
# - **Fragmentation** of a GPU's memory: a CPU's allocator has none that we could show.
# - **The network and the hardware**: labs 14 and 15.
# - **Two diseases at once.** Fix one, and look again.
# - **The ranks agree and the kernels do not.** On a GPU a number may be wrong because of *when* it was read, and a CPU with gloo has no streams in which we could show it. What follows is read from torch 2.13, not measured.
#   - *A missing wait.* With `async_op=True` a collective runs on a stream of its own. Until `wait()` nothing orders your kernels behind it, and they read what is there. The allocator has the same blind spot: it knows only the stream on which a tensor was made, so it may hand out memory that another stream still reads. For its own collectives torch keeps the tensors until `wait()`; for a stream of yours call `tensor.record_stream(stream)`, or make the first stream wait. The sign is a result that changes from run to run, and is stable with `CUDA_LAUNCH_BLOCKING=1`.
#   - *NaN from elsewhere.* After one all-reduce every rank has the NaN. `TORCH_NCCL_NAN_CHECK=1` looks at what each rank gives to a collective, and raises on the rank that gives one. It does not stop at infinity.
#   - *CUDA graphs.* A replay runs the captured kernels on the captured addresses, and no Python. A new batch that is not copied into the captured tensor is never read, and an `if`, a hook, or our observer never runs.
#   - *A recompute that differs.* `torch.utils.checkpoint` compares shape, type and device of what it computes again, not the values. It restores torch's random state, but not the state of Python's `random`, of NumPy, or of a layer that counts its calls.
#
# This was the last lab. You have built a library that trains one model on many ranks with data, tensor, pipeline, context and expert parallelism, with ZeRO and FSDP, and with several of these at once; and the means to show that it is right. It has no method that lets ranks drift apart on purpose, such as Local SGD or DiLoCo, no asynchronous training but lab 09's PipeDream, and no expert groups folded into tensor groups.
