# %% [markdown]
# # 16 Clinic: broken runs
#
# > 150 minutes, 285 more with Further · difficulty 4/5 · **spine**: 4.1, two cases under Further · **laptop**: everything, with real ranks that really misbehave · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# In October 2024 Unsloth and Hugging Face found that many trainings with gradient accumulation had a wrong loss: each micro-batch was averaged over its own tokens, and then the averages were averaged. Nothing failed. The losses looked like losses. Every library that had copied those few lines had done so for years.
#
# This is the usual kind of bug in distributed training. A run hangs, and the log of the rank that waits blames the wrong one. Or it doesn't hang, trains to the end, and is worse than it should be. You find such bugs by evidence: count, compare the ranks, compare with one process. The labs before this one have built the tools for that.
#
# Here are twenty-one programs. Each misbehaves for a real reason, and a colleague tells you what was seen. You look, say why, and mend it. No line says where to look. At the end `ranklab diagnose` examines a program of your own with a set of detectors, four of which you write.
#
# You need labs 00 to 04. If a case needs another lab, its box says so.

# %%
import argparse
import copy
import hashlib
import inspect
import io
import math
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab.engine import HangError, RankError

begin("16_clinic")

# %%
from ranklab.data_parallel import pack
from ranklab.clinic.shards import stored_shards
from ranklab.data import batch_at, digits, held_out_batch, text_file
from ranklab.data_parallel import convert_sync_batch_norm, replicas_agree
from ranklab.meter import MemoryCurve, Traffic
from ranklab.models import CNN, GPT, CNNConfig, GPTConfig
from ranklab.pipeline_parallel import keep_layers
from ranklab.tensor_parallel import copy_to_region, dropout_seeds, own_random, reduce_from_region

# %% [markdown]
# ## 2. Picture
#
# Three questions, in this order, find most bugs. Does it hang? Do the ranks still agree? Is the result that of one process? The figure shows what each disease of this lab does to a healthy training:

# %%
from ranklab.plots import clinic as plots

plots.symptoms()

# %% [markdown]
# Look at the column "differs from one process": 15 of the 21 have a sign there, and for 7 of these, the diamonds, it is the only one. They neither hang nor fail, and the ranks agree.

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
# Rank 0 waits in a call that rank 1 never makes: one call too many, on one rank. The report says what each of the two did. The log of a real job says only that rank 0 timed out, so people look at rank 0's node. But the cause is the `if`, a branch that only one rank takes. Had rank 0 taken it a step earlier, its extra call would have met the next step's all-reduce on rank 1, and the sums would have been wrong before anything hung.

# %% [markdown]
# ## 4. Build it
#
# Your colleagues bring their programs and say what they see. None of them knows why. Each case takes three steps:
#
# - **Look.** A cell runs the program. What else you print, count or compare is up to you: `print` on each rank, `Traffic`, `MemoryCurve`, `replicas_agree`, lab 04's timeline, one rank beside four, a smaller case. On each rank `with Traffic() as traffic:` counts what it sends, and `traffic.table()` shows it; `with MemoryCurve(model) as curve:` has `curve.peak_bytes`.
# - **Why?** Put the number of the cause. A wrong one is answered with the measurement that speaks against it.
# - **Mend it** in the program's own cell, run that cell, then the check. Mended means that the program has the numbers of one process, on any number of ranks that shares its data evenly, and in a group of some of them; and that it does what torch's documentation asks for, also where gloo forgives. The check tries other settings than the lab does. Some cases ask for more, and say so.
#
# `look` runs a program and prints what each rank returns, or the report of a hang:

# %%
def look(program, ranks=4, **settings):
    try:
        found = launch(lambda: program(**settings), ranks=ranks, stall=1)
        for rank, of_rank in enumerate(found):
            print(f"rank {rank}", {name: x for name, x in of_rank.items() if name != "weights"})
    except (RankError, HangError) as error:
        print(error)

# %% [markdown]
# ### 4.1 It stands still in the first step
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 3 lines
#
# > With one rank it runs. With more it stands still in the first step, each time. I raised the timeout to an hour, and now it stands still for an hour. My colleague once got it through. Then the ranks did not agree on how many of each digit are read right.

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
# **Look.** The report says where each rank waits. It doesn't say for whom.

# %%
look(train_with_owners)

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. A rank is so slow that the others give up.
# 2. A rank makes fewer calls than the others.
# 3. All ranks make the same calls, but not in the same order.
# 4. The tensor of one call has another size on each rank.
# 5. Two groups are used, and the ranks take them in different orders.

# %%
check(clinic_train_with_owners_cause=...)

# %%
train_with_owners = check(train_with_owners)

# %% [markdown]
# ### 4.2 A detector: the first call that differs
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 6 lines
#
# A function can do what you did by eye in 4.1. It gets each rank's list of calls and finds the first place where the lists differ. `ranklab diagnose` will call yours for each group of a run.

# %%
def first_difference(calls):
    """Return the number, counted from 0, of the first call that is not the same on all ranks.

    None where there is no such call.
    calls  {rank: [what it called, ...]} of a group; a shorter list is no difference: its rank has
           only not come as far, and the others are still compared
    """
    raise NotImplementedError("exercise 4.2: about 6 lines")


# %%
first_difference = check(first_difference)

# %% [markdown]
# ### 4.3 Two run, four do not
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 4 lines
#
# > Two GPUs run, as one replica or as two. Four, as two replicas of two, stand still in the first step. I have counted each rank's calls in a step on paper, for both groups. The numbers are the same on all ranks.

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
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. A rank has left the loop.
# 2. A rank leaves out a call that the others of its group make.
# 3. In one group the ranks make their calls in different orders.
# 4. The parts of a matrix have different sizes.
# 5. The ranks take their two groups in different orders.

# %%
check(clinic_train_on_a_grid_cause=...)

# %%
train_on_a_grid = check(train_on_a_grid)

# %% [markdown]
# ### 4.4 A detector: who waits for whom
# > difficulty 4/5 · importance 4/5 · 20 minutes · about 10 lines
#
# In 4.3 each rank waited in a call that another rank of its group had not reached. Follow the arrows. If they lead back to where you began, no rank will ever go on: that is a deadlock.

# %%
def circle_of_waits(waits):
    """Find ranks that wait for one another in a circle: [rank, ...], each waits for the next one.

    The last waits for the first, and the smallest rank stands first. [] where there is no circle.

    waits  {rank: set of ranks that it waits for}; a rank that waits for nobody may be left out
    """
    raise NotImplementedError("exercise 4.4: about 10 lines")


# %%
circle_of_waits = check(circle_of_waits)

# %% [markdown]
# ### 4.5 It learns, then it stands still
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 5 lines
#
# > It learns, and then it stands still, at a step that changes with the number of ranks. With one rank there is no trouble, however long it runs. With last year's scans it never happened, and nobody has touched the program since.

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
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. A rank has crashed, and the others wait for it.
# 2. A rank has so many more scans that it is late.
# 3. All ranks make the same calls, but not in the same order.
# 4. The ranks take their two groups in different orders.
# 5. What a rank sees in its own data decides whether it makes a call.

# %%
check(clinic_train_until_good_cause=...)

# %%
train_until_good = check(train_until_good)

# %% [markdown]
# ### 4.6 A curve for each number of ranks
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 6 lines
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

# %%
[f"{launch(moving_curve, 1, ranks=ranks)[0]['losses'][0]:.4f}" for ranks in (1, 2, 4)]

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Means over different numbers of tokens are averaged as if these were equal.
# 2. Sums in another order are rounded in another way.
# 3. Sums over the ranks are taken where means are due.
# 4. What fills up the short lines is counted as tokens.

# %%
check(clinic_moving_curve_cause=...)

# %%
moving_curve = check(moving_curve)

# %% [markdown]
# This was reported to Hugging Face's transformers in July 2023, for the pieces of gradient accumulation (issue 24725), and mended in October 2024 (pull request 34191). For the ranks there is `average_tokens_across_devices` (34373), which is on by default in version 5.

# %% [markdown]
# ### 4.7 NaN on two of four
# > difficulty 4/5 · importance 5/5 · 15 minutes · about 1 line
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
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. A rank decides by its own gradients alone whether to skip a step.
# 2. Gradients that are too small for float16 become 0, and something divides by 0.
# 3. One rank begins with other weights, and the ranks drift apart.
# 4. The learning rate is too high: the losses run away.
# 5. There is a NaN among the images of one rank.

# %%
check(clinic_half_digits_cause=...)

# %%
half_digits = check(half_digits)

# %% [markdown]
# ### Further
#
# More patients, in any order that you like. A box that names no lab needs no more than 00 to 04.

# %% [markdown]
# #### Accumulating does not help
# > difficulty 2/5 · importance 5/5 · 15 minutes · about 6 lines
#
# > Our network is slow, so we accumulate: eight micro-batches for each step. The losses are right to the last digit. But an epoch takes as long as it does with accumulate=1, and the network is busy all the time.

# %%
def train_large_batch(micro_batches=16, accumulate=8, batch=2, length=32, seed=0, group=None):
    """Train a small GPT on argparse's source, `micro_batches` of `batch` windows on each rank.

    A step's gradient is the mean over `accumulate` micro-batches of all ranks; the last step may
    have fewer. Returns the weights and the steps' losses, which are such means, too; the same on
    every rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    text = torch.tensor(list(inspect.getsource(argparse).encode())).to(device())
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_ctx=length, n_layer=1, n_embd=32)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for first in range(0, micro_batches, accumulate):
        numbers = range(first, min(first + accumulate, micro_batches))
        loss = torch.zeros((), device=device())
        for number in numbers:
            start = (number * ranks + rank) * batch * length
            window = text[start:start + batch * length + 1]
            x, y = window[:-1].view(batch, length), window[1:].view(batch, length)
            part = model(x, y) / len(numbers)
            part.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= ranks
            part = part.detach()
            dist.all_reduce(part, group=group)
            loss += part / ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"weights": dict(model.named_parameters()), "losses": losses}


# %% [markdown]
# **Look.** Nothing is wrong in what comes back. So count what it costs.

# %%
look(train_large_batch)

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Each parameter is sent by a call of its own, not in large buckets.
# 2. Gradients are sent after each micro-batch, not once in a step.
# 3. Gradients travel in float32; bfloat16 would halve them.
# 4. One rank is slower than the others, and they wait for it.
# 5. The model is too large for this network, whatever is accumulated.

# %%
check(clinic_train_large_batch_cause=...)

# %%
train_large_batch = check(train_large_batch)

# %% [markdown]
# #### It is always rank 3
# > difficulty 4/5 · importance 4/5 · 25 minutes · about 4 lines
#
# > Losses and weights are right. But four GPUs are not even twice as fast as one. Three of them stand still in all_reduce for a good part of each step, and rank 3 never does. We have replaced its card, twice.

# %%
def train_on_functions(steps=2, batch=32, micro=2, longest=1024, seed=0, group=None):
    """Train a small GPT on argparse's functions, `batch` in a step, and tries it on the last 24.

    `micro` functions of about one length are worked through together, so that little is padded.
    Each is cut to its first `longest` bytes. A step's gradient is the mean over the tokens of all
    ranks. Returns the weights, the steps' losses and the held-out loss, which are such means, too;
    the same on every rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    functions = re.split(r"\n(?=(?:    )?def )", inspect.getsource(argparse))
    functions = [torch.tensor(list(function.encode()[:longest])) for function in functions]
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_ctx=longest, n_layer=1, n_head=1, n_embd=16)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def piles_of(texts):
        texts = sorted(texts, key=len)
        return [torch.nn.utils.rnn.pad_sequence(texts[i:i + micro], True, -100).to(device())
                for i in range(0, len(texts), micro)]

    def loss_of(pile):
        loss = model(pile[:, :-1].clamp(min=0), pile[:, 1:], "sum")
        return torch.stack([loss, (pile[:, 1:] >= 0).sum()])

    losses = []
    for step in range(steps):
        piles, seen = piles_of(functions[batch * step:batch * step + batch]), 0
        for pile in piles[len(piles) * rank // ranks:len(piles) * (rank + 1) // ranks]:
            both = loss_of(pile)
            both[0].backward()
            seen += both.detach()
        dist.all_reduce(seen, group=group)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= seen[1]
        optimizer.step()
        optimizer.zero_grad()
        losses.append((seen[0] / seen[1]).item())
    piles = piles_of(functions[-24:])
    with torch.no_grad():
        seen = sum(map(loss_of, piles[len(piles) * rank // ranks:len(piles) * (rank + 1) // ranks]))
    dist.all_reduce(seen, group=group)
    return {"weights": dict(model.named_parameters()), "losses": losses,
            "held_out": (seen[0] / seen[1]).item()}


# %% [markdown]
# **Look.** A step takes the same time on all ranks, so the time of a step doesn't show for which rank the others wait. Look at what each rank does before it meets the others.

# %%
look(train_on_functions)

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. It has more functions than the other ranks.
# 2. It waits for its data.
# 3. Its card, or its core, is slower than the others.
# 4. Its functions are longer than those of the other ranks.
# 5. Its link to the others is slow.

# %%
check(clinic_train_on_functions_cause=...)

# %% [markdown]
# **Mended.** No rank has more than 1.25 times its fair share of the work, in training and in evaluation. Count the work in tokens, padding included, or in FLOPs: it is enough that one of the two is fair.

# %%
train_on_functions = check(train_on_functions)

# %% [markdown]
# #### Steps that are too long
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 4 lines · after lab 06
#
# > The job clips its gradient to a norm of 0.1 at a learning rate of 0.5, so no step may be longer than 0.05. On one rank none is. On four ranks the longest is 0.094, and on two it is 0.071. The loss falls even faster, so nobody complained. But when we turn clipping off (most=1e9), the learning rate that suits one rank does not suit four.

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
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Each rank clips before the ranks' gradients have come together.
# 2. The learning rate grows with the number of ranks.
# 3. The ranks' numbers are combined by the wrong operation.
# 4. The ranks' weights have drifted apart.

# %%
check(clinic_long_steps_cause=...)

# %%
long_steps = check(long_steps)

# %% [markdown]
# Replicas that agree prove nothing, because all of them may have taken the same wrong step. Hold a step against the same step of one process.

# %% [markdown]
# #### A saved model that is worse than its log
# > difficulty 2/5 · importance 5/5 · 15 minutes · about 2 lines
#
# > Our log has the mean of the ranks' training losses, and it looks as it always did. But the model that rank 0 saves has a loss of 1.72 on held-out images. A model trained on one rank has 1.19, and if ranks 1, 2 or 3 saved theirs, those would have 1.31. We use the same seed everywhere, of course.

# %%
def saved_model(steps=20, lr=0.3, decay=0.9, seed=0, group=None):
    """Train an MLP on digits, and the running mean of its weights, which rank 0 saves.

    seed  of this rank's random numbers; the ranks may be given different ones. All begin with the
          weights that one of them draws by its seed
    -> {"start": the first weights, "weights": the last, "mean": of them, "loss": of the mean on
    held-out images, "examples": eight labels, for the log of rank 0}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(seed)
    images = digits()
    x, y = images.train.flatten(1).to(device()), images.train_labels.to(device())
    examples = y[torch.randperm(len(y))[:8]].tolist() if rank == 0 else []
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(device())
    mean = copy.deepcopy(model)
    start = pack(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        at = torch.arange(240)[rank::R] + 240 * (step % 5)
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= R
        optimizer.step()
        with torch.no_grad():
            for kept, p in zip(mean.parameters(), model.parameters()):
                kept.lerp_(p, 1 - decay)
    held = images.held_out.flatten(1).to(device())
    loss = F.cross_entropy(mean(held), images.held_out_labels.to(device())).item()
    return {"start": start, "weights": pack(model.parameters()).detach(), "loss": loss,
            "mean": pack(mean.parameters()).detach(), "examples": examples}


# %% [markdown]
# **Look.** The held-out loss of each rank's model:

# %% tags=["nbval-check-output"]
[f"{each['loss']:.2f}" for each in launch(saved_model, ranks=4)]

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Rank 0 trains on fewer images than the others.
# 2. Some gradients are not averaged over the ranks.
# 3. The ranks begin with different weights.
# 4. The running mean of rank 0 lacks the last steps.

# %%
check(clinic_saved_model_cause=...)

# %%
saved_model = check(saved_model)

# %% [markdown]
# `replicas_agree(model)` before the first step costs 16 bytes. Suppose that nobody sets a seed. Ranks that torchrun starts then begin with different random numbers, because each process draws its own seed. Here you wouldn't notice: `launch` forks all its ranks from one process, so they happen to begin with the same ones.

# %% [markdown]
# #### Four ranks are no faster than one
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 3 lines
#
# > One rank goes twice through the digits in 30 steps of 96 images. We gave the job four ranks, 24 images each, and now it takes 120 steps for the same two epochs. The replicas agree, the loss falls well, and no rank waits for another. But four ranks are no faster than one.

# %%
def no_faster(epochs=2, batch=96, lr=0.05, seed=0, group=None):
    """Train softmax regression on digits; `batch` images a step on all ranks, shuffled each epoch.

    -> {"loss" at the end, "weights", "seen": of each epoch and step, the numbers of the images}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    images = digits()
    x, y = images.train.flatten(1), images.train_labels
    torch.manual_seed(seed)
    data = TensorDataset(x, y, torch.arange(len(x)))
    loader = DataLoader(data, batch // R, shuffle=True)
    model = nn.Linear(64, 10).to(device())
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr), []
    for epoch in range(epochs):
        seen.append([])
        for images, labels, at in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device())), labels.to(device())).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
                p.grad /= R
            optimizer.step()
            seen[-1].append(at.tolist())
    loss = F.cross_entropy(model(x.to(device())), y.to(device())).item()
    return {"loss": loss, "weights": pack(model.parameters()).detach(), "seen": seen}


# %% [markdown]
# **Look.** How many steps an epoch takes on four ranks:

# %% tags=["nbval-check-output"]
len(launch(no_faster, ranks=4)[0]["seen"][0])

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. A rank's share of a step should be 96 images, not 24.
# 2. All ranks read the same images.
# 3. The gradients are all-reduced more often than once a step.
# 4. The ranks begin with different weights.

# %%
check(clinic_no_faster_cause=...)

# %%
no_faster = check(no_faster)

# %% [markdown]
# Print a fingerprint of each rank's first batch once, and you find this in a second.

# %% [markdown]
# #### Worse together
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 2 lines
#
# > Four epochs on one rank end at a loss of 0.84. On four ranks, four epochs of the same images end at 1.35. Each gradient is right: we compared it with the gradient of one process on the same 128 images. Ten epochs get there. That is 90 steps instead of 144, with four times the machines.

# %%
def worse_together(epochs=4, batch=32, lr=0.03, group=None):
    """Train softmax regression on digits, `batch` images a step on each rank.

    The recipe (after Goyal et al. 2017): `lr` is for steps of 32 images, and a step of k times as
    many has k times the rate. In the first epoch the rate climbs from `lr` to that, evenly. At all
    times it is multiplied by the share of steps that are left.
    -> {"loss" at the end, "weights", "rates": the learning rate of each step}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    images = digits()
    x = images.train[:1152].flatten(1)[rank::R].to(device())
    y = images.train_labels[:1152][rank::R].to(device())
    model = nn.Linear(64, 10).to(device())
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer, rates = torch.optim.SGD(model.parameters(), lr), []
    times = batch / 32
    each = 1152 // batch
    scheduler = LambdaLR(optimizer, lambda step: (1 + (times - 1) * min(1, step / each))
                         * max(0, 1 - step / (epochs * each)))
    for epoch in range(epochs):
        for images, labels in zip(x.split(batch), y.split(batch)):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
                p.grad /= R
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    loss = F.cross_entropy(model(x), y)
    dist.all_reduce(loss.detach(), group=group)
    return {"loss": loss.item() / R, "weights": pack(model.parameters()).detach(), "rates": rates}


# %% [markdown]
# **Look.** The loss at the end, on one rank and on four:

# %%
[f"{launch(worse_together, ranks=ranks)[0]['loss']:.2f}" for ranks in (1, 4)]

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Each rank sees only a quarter of the images.
# 2. The gradients are averaged, and should be summed.
# 3. The learning rate does not follow the number of ranks.
# 4. The warm-up is too long for so few steps.

# %%
check(clinic_worse_together_cause=...)

# %%
worse_together = check(worse_together)

# %% [markdown]
# Goyal et al. (arXiv 1706.02677): when the batch is multiplied by k, multiply the learning rate by k. Whatever counts steps is divided by k: warm-up, decay, and how often you evaluate and save.

# %% [markdown]
# #### Which score is right?
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 1 line
#
# > After the training each rank counts how many of the same 360 held-out images it has right: 315, 309, 310 and 311. Which one shall we publish? If we broadcast all model.parameters() from rank 0 before we count, nothing changes. And a single process that trains on the same images gets 322.

# %%
def two_scores(steps=20, lr=0.3, width=8, group=None):
    """Train a CNN on digits, 240 images a step; each rank has a shard, in the order of labels.

    The model is the one that a single process would train on the same 240 images.
    -> {"loss" on the 360 held-out images, "score": how many of them are right, "weights"}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    images = digits()
    x, y = images.train.to(device()), images.train_labels.to(device())
    shard = y.argsort(stable=True).chunk(R)[rank]
    torch.manual_seed(0)
    model = CNN(CNNConfig(width=width)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        at = shard[step % 5::5][:240 // R]
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= R
        optimizer.step()
    model.eval()
    labels = images.held_out_labels.to(device())
    with torch.no_grad():
        logits = model(images.held_out.to(device()))
    return {"loss": F.cross_entropy(logits, labels).item(),
            "score": (logits.argmax(1) == labels).sum().item(),
            "weights": pack(model.parameters()).detach()}


# %% [markdown]
# **Look.** Each rank's score:

# %% tags=["nbval-check-output"]
[each["score"] for each in launch(two_scores, ranks=4)]

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Each rank normalises by the statistics of its own images.
# 2. The model is still in training mode when they count.
# 3. The ranks do not count on the same images.
# 4. The ranks' weights have drifted apart.

# %%
check(clinic_two_scores_cause=...)

# %%
two_scores = check(two_scores)

# %% [markdown]
# Unless you turn it off, DDP broadcasts rank 0's buffers before each forward. Then the ranks agree, but all of them evaluate with what rank 0 saw. For statistics of the whole batch you need SyncBatchNorm, or else a norm that doesn't look at the batch. torch's own SyncBatchNorm runs on GPUs only; lab 03's, imported above, runs here too.

# %% [markdown]
# #### Two ranks, one batch, two losses
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 4 lines · after lab 08
#
# > Since we cut the wide layer in two, the two ranks of a pair print different losses from the first step on, although they read the same rows. At the start the weights that both of them hold are equal. At the end rank 0's head differs from rank 1's. Our checkpoint keeps rank 0's.

# %%
def wide_layer(steps=12, lr=0.5, p=0.25, tensor=2, seed=0, group=None):
    """Train a small language model whose wide layer is cut over `tensor` ranks.

    Each such set of ranks has rows of its own.

    Returns {"losses": [of this rank's rows], "weights": {name: this rank's tensor}}.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    row, column = divmod(rank, tensor)
    inside = dist.new_group(ranks[row * tensor:][:tensor], use_local_synchronization=True)
    across = dist.new_group(ranks[column::tensor], use_local_synchronization=True)
    torch.manual_seed(seed)
    model = nn.ModuleDict({
        "embed": nn.Embedding(256, 16), "up": nn.Linear(128, 96, bias=False),
        "down": nn.Linear(96, 32, bias=False), "head": nn.Linear(32, 256)}).to(device())
    for name, dim in (("up", 0), ("down", 1)):
        part = model[name].weight.detach().chunk(tensor, dim)[column].clone()
        model[name].weight = nn.Parameter(part)
    torch.manual_seed(seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    tokens, losses = text_file(os.__file__).train, []
    for step in range(steps):
        inputs, targets = (each.chunk(len(ranks) // tensor)[row].to(device())
                           for each in batch_at(tokens, step, 24, 8, seed))
        x = copy_to_region(model["embed"](inputs).flatten(1), inside)
        h = F.dropout(F.relu(model["up"](x)), p)
        y = F.dropout(reduce_from_region(model["down"](h), inside), p)
        loss = F.cross_entropy(model["head"](y), targets[:, -1])
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=across)
            weight.grad /= len(ranks) // tensor
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": {n: w.detach() for n, w in model.named_parameters()}}


# %% [markdown]
# **Look.** The four ranks are two pairs. A pair begins a step with equal tensors and ends it with two losses. Which tensor is the last one that is still equal on both ranks? Print in the program, or return more from it. Sometimes a setting shows more than a print does: try `p` and `steps`.

# %%
for rank, seen in enumerate(launch(wide_layer, ranks=4)):
    print(f"rank {rank}: the first losses", *(f"{loss:.4f}" for loss in seen["losses"][:3]))

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Gradients are averaged over the wrong ranks.
# 2. Ranks that hold the same numbers drop different ones.
# 3. The two halves of the wide layer are never added up.
# 4. The two ranks of a pair read different rows.

# %%
check(clinic_wide_layer_cause=...)

# %% [markdown]
# **Mended.** It is not enough that the two ranks of a pair agree. The check reads what `F.dropout` drops on every rank, so keep both calls, as `F.dropout` or `nn.Dropout`, and it runs one process that drops the same beside yours. It also tries `tensor=1` and `tensor=3`.

# %%
wide_layer = check(wide_layer)

# %% [markdown]
# #### Good in training, bad in the file
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 5 lines · after lab 09
#
# > In four stages the training loss goes down as it should. We save the stages, merge the files and evaluate. Embedding and head share one matrix, so the file has it once, from the first stage. On the rows that it was trained on, the merged model's loss is higher by 1 than the loss in the training log. A run on one rank has no such gap.

# %%
def staged_gpt(steps=20, lr=0.01, seed=0, group=None):
    """Train a GPT of four blocks, each rank a stage; one matrix is its embedding and its head.

    Returns {"losses": [those of the last stage, [] elsewhere], "weights": {name: of this stage}}.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    R, first, last = len(ranks), rank == 0, rank == len(ranks) - 1
    torch.manual_seed(seed)
    config = GPTConfig(n_ctx=16, n_embd=32, n_layer=4)
    model = keep_layers(GPT(config), range(6 * rank // R, 6 * (rank + 1) // R)).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    tokens, losses = text_file(os.__file__).train, []
    for step in range(steps):
        inputs, targets = (each.to(device()) for each in batch_at(tokens, step, 8, 16, seed))
        x = inputs if first else torch.empty(8, 16, config.n_embd, device=device())
        if not first:
            dist.recv(x, group=group, group_src=rank - 1)
            x.requires_grad_()
        y = model(x, targets if last else None)
        gradient = torch.empty_like(y)
        if not last:
            dist.send(y.detach(), group=group, group_dst=rank + 1)
            dist.recv(gradient, group=group, group_src=rank + 1)
        optimizer.zero_grad()
        y.backward(None if last else gradient)
        if not first:
            dist.send(x.grad, group=group, group_dst=rank - 1)
        optimizer.step()
        losses += [y.item()] if last else []
    return {"losses": losses, "weights": {n: w.detach() for n, w in model.named_parameters()}}


# %% [markdown]
# **Look.** Compare the stages' weights with those of one rank, after 0 steps and after 1.

# %%
stages, [alone] = launch(staged_gpt, 1, ranks=4), launch(staged_gpt, 1, ranks=1)
for name, weight in {n: w for stage in stages for n, w in stage["weights"].items()}.items():
    right = alone["weights"].get(name, alone["weights"]["token.weight"])
    if not torch.allclose(weight, right, atol=1e-6):
        print(f"{name} is up to {(weight - right).abs().max():.2g} off one rank's")

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Each end trains a copy of the shared matrix by what it sees itself.
# 2. The merged file lacks the blocks of some stage.
# 3. The middle stages get gradients that belong to other rows.
# 4. The two copies of the shared matrix differ from the start.

# %%
check(clinic_staged_gpt_cause=...)

# %% [markdown]
# **Mended.** With one to four stages, the weights must be those that one process trains.

# %%
staged_gpt = check(staged_gpt)

# %% [markdown]
# #### Faster, and it diverges
# > difficulty 4/5 · importance 5/5 · 15 minutes · about 4 lines · after lab 06
#
# > To save time we gather the weights while the optimizer works. Since then the run diverges at a learning rate that was fine before. A quarter of that rate trains, but slowly. The held-out loss in the log is not the one that the checkpoint of the same step has. All ranks print the same numbers.

# %%
def gathered_model(steps=16, lr=1.0, seed=0, group=None):
    """Train a small language model: each rank keeps a shard, and gathers all of it for each step.

    Returns {"losses": [of all rows], "held_out": [after each fourth step], "weights": all}.
    """
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
                          nn.Linear(64, 256)).to(device())
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    shard, ahead = nn.Parameter(flat.chunk(R)[rank].clone()), torch.empty_like(flat)
    shard.grad = torch.empty_like(shard)
    optimizer = torch.optim.SGD([shard], lr, momentum=0.5)
    text, losses, held_out = text_file(os.__file__), [], []
    unseen, following = (each.to(device()) for each in held_out_batch(text.held_out, 48, 8))
    for step in range(steps):
        inputs, targets = (each.chunk(R)[rank].to(device())
                           for each in batch_at(text.train, step, 48, 8, seed))
        loss = F.cross_entropy(model(inputs), targets[:, -1]) / R
        gradients = torch.autograd.grad(loss, model.parameters())
        gradient = nn.utils.parameters_to_vector(gradients)
        dist.reduce_scatter_single(shard.grad, gradient, group=group)
        kept = shard.detach().clone()
        coming = dist.all_gather_single(ahead, kept, group=group, async_op=True)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
        if step % 4 == 3:
            with torch.no_grad():
                held_out.append(F.cross_entropy(model(unseen), following[:, -1]).item())
        coming.wait()
        flat.copy_(ahead)
    return {"losses": losses, "held_out": held_out, "weights": flat}


# %% [markdown]
# **Look.** Does it take four ranks to diverge? Does it take a large learning rate? Look at the first losses.

# %%
for ranks in (1, 4):
    losses = launch(gathered_model, ranks=ranks)[0]["losses"]
    print(f"ranks={ranks}:", *(f"{loss:.3f}" for loss in losses[:6]))

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. The forward uses weights from before the last step.
# 2. The gathered shards come in an order that differs between ranks.
# 3. The learning rate is too large for this batch.
# 4. The ranks' gradients are added up where their mean is due.

# %%
check(clinic_gathered_model_cause=...)

# %% [markdown]
# **Mended.** All weights, all losses and all held-out losses must be those of one process. The gather may stay asynchronous, with work that doesn't need it in between, but `coming` must be waited for.

# %%
gathered_model = check(gathered_model)

# %% [markdown]
# #### The loss that does not move
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 1 line · after lab 07
#
# > We moved a run to fully_shard. There is no error and no warning, and it is as fast as we had hoped. But however long we wait, the loss stays where it began, at the loss of a guess among 256 bytes.

# %%
def moved_gpt(steps=12, lr=0.01, seed=0, group=None):
    """Train a GPT under torch's fully_shard.

    Returns {"losses": [of all rows], "weights": {name: the whole tensor}}.
    """
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_ctx=16, n_embd=32)).to(device())
    mesh = DeviceMesh.from_group(group, device().type) if group else None
    optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens, losses = text_file(os.__file__).train, []
    for step in range(steps):
        inputs, targets = (each.chunk(R)[rank].to(device())
                           for each in batch_at(tokens, step, 12, 16, seed))
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / R
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: weight.full_tensor().detach()
                                          for name, weight in model.named_parameters()}}


# %% [markdown]
# **Look.** What does a step change? Is there a gradient when the step is taken?

# %%
losses = launch(moved_gpt, ranks=4)[0]["losses"]
print(*(f"{loss:.3f}" for loss in losses), f"   a guess: {np.log(256):.3f}")

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Each rank trains for itself, and nothing is averaged.
# 2. The gradients are zeroed before the step.
# 3. The learning rate is too small for shards.
# 4. The optimizer has parameters that the model no longer uses.

# %%
check(clinic_moved_gpt_cause=...)

# %% [markdown]
# **Mended.** All weights must be those of one process, the two blocks and the rest must still be sharded, and the optimizer must have the model's parameters and no others.

# %%
moved_gpt = check(moved_gpt)

# %% [markdown]
# #### Half of the norm
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 4 lines · after lab 06
#
# > In the first step one rank logs a gradient norm above 1, and four ranks log about half of that. Seed, rows and the first loss are the same. From the second step on the losses differ, and at first the curve of four ranks is the rougher one.

# %%
def flat_model(steps=24, lr=1.0, max_norm=0.5, seed=0, group=None):
    """Train a small language model, its gradient clipped; each rank's optimizer has a shard.

    Returns {"losses": [of all rows], "norms": [before clipping], "weights": all}.
    """
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
                          nn.Linear(64, 256)).to(device())
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    shard = nn.Parameter(flat.chunk(R)[rank].clone())
    shard.grad = torch.empty_like(shard)
    optimizer = torch.optim.SGD([shard], lr, momentum=0.9)
    tokens, losses, norms = text_file(os.__file__).train, [], []
    for step in range(steps):
        inputs, targets = (each.chunk(R)[rank].to(device())
                           for each in batch_at(tokens, step, 48, 8, seed))
        loss = F.cross_entropy(model(inputs), targets[:, -1]) / R
        gradients = torch.autograd.grad(loss, model.parameters())
        gradient = nn.utils.parameters_to_vector(gradients)
        dist.reduce_scatter_single(shard.grad, gradient, group=group)
        norm = nn.utils.clip_grad_norm_([shard], max_norm)
        optimizer.step()
        dist.all_gather_single(flat, shard.detach(), group=group)
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "weights": flat}


# %% [markdown]
# **Look.** Put the four ranks' norms of the first step beside that of one rank.

# %%
for ranks in (1, 4):
    norms = [seen["norms"][0] for seen in launch(flat_model, ranks=ranks)]
    print(f"ranks={ranks}:", *(f"{norm:.3f}" for norm in norms))

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Each rank clips by the norm of its own rows' gradient, before they are averaged.
# 2. Each rank clips by the norm of its own shard.
# 3. Momentum is kept for each shard alone.
# 4. The gradient is divided by the number of ranks twice.

# %%
check(clinic_flat_model_cause=...)

# %% [markdown]
# **Mended.** Norms, losses and weights must be those of one process that clips by torch's own `clip_grad_norm_`. A gradient that is short enough stays as it is.

# %%
flat_model = check(flat_model)

# %% [markdown]
# #### A detector: `own_limit`
# > difficulty 3/5 · importance 3/5 · 15 minutes · about 5 lines · after "Half of the norm"
#
# The norms of the gradients alone tell you of the disease in "Half of the norm", so you needn't read the program.

# %%
def own_limit(norms, tolerance=1e-3):
    """Find the norm to which ranks have clipped their own gradients, each by itself, or None.

    It is the largest finite norm, and two ranks or more have it, up to `tolerance` times it, in the
    same step: in at least two steps, and in a tenth of them all. (If all shards are clipped by one
    norm, the squares of the ranks' norms add up to its square, so no two ranks can have it.)
    norms  [[norm on rank 0, on rank 1, ...] of each step], of gradients that are not alike; inf and
           NaN count for nothing, and [] is a run without a step
    """
    raise NotImplementedError("exercise own_limit: about 5 lines")


# %%
own_limit = check(own_limit)

# %% [markdown]
# #### A detector: `steps_behind`
# > difficulty 3/5 · importance 3/5 · 15 minutes · about 6 lines · after "Faster, and it diverges"
#
# The stale weights of "Faster, and it diverges" leave a trace, too. In each step note the sum of the weights that the model used, and the sum of those that the optimizer held. The two lists are the same, but shifted.

# %%
def steps_behind(used, held, tolerance=1e-9):
    """Count by how many steps the model's weights are older than the optimizers' own.

    It is the smallest number that explains all steps but a tenth, not counting the first ones,
    whose partner would be before the run. None where no number of steps does.

    used  [sum of the weights in the forward of step 0, of step 1, ...]
    held  [sum of the weights that all optimizers held at that moment]; where nothing is stale the
          two are equal up to `tolerance` times the larger one
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

# %%
def peak(steps):
    with MemoryCurve(nn.Identity()) as curve:
        validated_digits(steps=steps)
    return curve.peak_bytes


for steps in (4, 8):
    print(f"{steps} steps:", *(f"{n:,}" for n in launch(peak, steps, ranks=4)), "bytes")

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Batches of other lengths leave gaps: the memory is fragmented.
# 2. Each step leaves a copy of the held-out images on the GPU.
# 3. Rank 0 gathers the gradients of the others before it adds them up.
# 4. The optimizer's state grows from step to step.
# 5. What is kept of each validation holds the graph that it came from, and its activations.

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
# `stored_shards()` returns a list of `Shard(content, sha256)`. A shard's `batch()` returns its images and labels. The program shows the rest.

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
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. A shard is not what was written: its bytes have changed.
# 2. One rank's weights were changed, by a bit that flipped.
# 3. The gradient of this step overflows to infinity.
# 4. The images of this step are right, but hard to read.
# 5. The step before was too large: its learning rate is too high.

# %%
check(clinic_stored_digits_cause=...)

# %% [markdown]
# **Mended.** The run goes on. Each of the other shards is still read by the same rank in the same step, and a step takes the mean over the images that it trains on.

# %%
stored_digits = check(stored_digits)

# %% [markdown]
# #### Better after the restart
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 2 lines · after lab 14
#
# > The job was stopped after step 8 and went on from its checkpoint. Its first loss after that was 0.48, and we were pleased, because a run without a stop has 0.58 there. But from the next step on the run without a stop is ahead, 0.40 against our 0.49.

# %%
def resumed_digits(group=None, steps=12, stops=(8,), batch=120):
    """Train; return {"losses": of each step, "weights", "seen": images this rank has trained on}.

    The job is stopped at `stops`. Each time it goes on from what it has saved.
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
    found = launch(lambda: resumed_digits(stops=stops), ranks=4)
    print(stops, [round(loss, 2) for loss in found[0]["losses"]])

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. After the restart all ranks train on the same images.
# 2. An epoch that was stopped begins from its start, and images that it has trained on come again.
# 3. The checkpoint is older than the stop: some steps are done twice.
# 4. The optimizer goes on without its momentum.
# 5. The weights of one rank are not those that were saved.

# %%
check(clinic_resumed_digits_cause=...)

# %%
resumed_digits = check(resumed_digits)

# %% [markdown]
# #### Most restarts go well
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 6 lines · after labs 08 and 14
#
# > Our machines may be taken away at any moment. Last time, says rank 0, the job went on from step 8. But its loss there is 0.75, and in a run that was never stopped it is 0.50. Most restarts go well.
#
# The program divides the model, not the batch: each rank has some columns of the images and the rows of the weights that belong to them. Softmax and its gradient are written out. Each rank's `TemporaryDirectory` plays the disk of its machine: the files of a rank are read by no other rank, and they are still there after the stop. On four ranks `first=4` is nobody, so all machines go together.

# %%
def split_digits(group=None, steps=12, every=4, stop=8, first=1, batch=120):
    """Train; return {"losses": of each step in the order done, "rows": this rank's of the weights}.

    The weights lie on the ranks in rows. After step `stop` all machines are taken away, and the one
    of rank `first` goes a moment earlier, if there is such a rank. Then the job goes on, each rank
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
    found = launch(lambda: split_digits(first=first), ranks=4)
    print(first, [round(loss, 2) for loss in found[0]["losses"]])

# %% [markdown]
# **Why?** Measure, put the number of the cause, then **mend it** in the program's cell:
#
# 1. Momentum is not saved: after a restart it begins from zero.
# 2. One rank's rows are those of an earlier step than the others'.
# 3. The data begin from their start again after a restart.
# 4. The ranks divide the columns of the images in another way after a restart.
# 5. What is saved is rounded: the file has fewer bits than the memory.

# %%
check(clinic_split_digits_cause=...)

# %%
split_digits = check(split_digits)

# %% [markdown]
# ## 5. The real thing
#
# **torch's own detector.** With `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch compares, before each collective, what the ranks are about to call. That makes it slow, but it needs no report of ours. This is 4.1's program as you found it:

# %%
from ranklab.clinic.all_cases import CASES

CASE = {case.name: case for case in CASES}
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
look(CASE["train_with_owners"].broken())
del os.environ["TORCH_DISTRIBUTED_DEBUG"]

# %% [markdown]
# On GPUs torch's *flight recorder* keeps each rank's last collectives (`TORCH_FR_BUFFER_SIZE=2000`), and writes them to a file when the watchdog's time is up (`TORCH_NCCL_DUMP_ON_TIMEOUT=1`). A dump is a pickle of one rank. Its `entries` are the calls, each with its group, its number in that group (`collective_seq_id`), a name such as `nccl:all_reduce`, the sizes and types of what goes in and comes out, the state (scheduled, started or completed) and the stack of Python lines. `pg_config` has the ranks of each group, and `pg_status` the numbers of the last call that was enqueued, started and completed. `torchfrtrace FOLDER` reads a file of every rank, puts calls of the same group and number side by side, and prints the first that differ in kind, size, type or state: the same idea as your `first_difference`. It has not been run here, because it needs NCCL's dumps: torch 2.13 records on gloo as well, but `torchfrtrace` stops at such a file.
#
# **`ranklab diagnose`** observes a program that knows nothing of it, and looks for these twenty-one diseases and eight more. Here it gets a plain script with torch's DDP, in which all ranks draw the same numbers:

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
# **A round through the ward.** Programs run under observation: as found, mended, and a *variant* that you have not seen, with the same disease in another place. `diagnose` uses your detectors. Is every sick one found? Is a healthy one called sick?

# %%
from ranklab.projects import clinic as project

# The library's detector stands in for one whose cells you have not run.
detectors = "first_difference", "circle_of_waits", "own_limit", "steps_behind"
mine = {name: globals()[name] for name in detectors if name in globals()}
chosen = ["train_with_owners", "train_on_a_grid", "flat_model", "gathered_model"]
visits = [project.visit(CASE[name], form, **mine)
          for name in chosen for form in ("variant", "mended")]
print(project.report(visits))

# %% [markdown]
# The whole round is `python -m ranklab.projects.clinic`: 40 of the 42 sick programs are found, and none of the 21 healthy ones is called sick. The two that are missed are forms of `worse_together`: one run can't show that its learning rate was meant for another number of ranks. `ranklab diagnose --beside` compares it with a run on fewer ranks.
#
# **Your turn.** Break a healthy program in your own way. First write down which disease will be named, and which number will be the evidence:

# %%
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
# The programs of this lab run on NCCL as they are; what hangs on gloo hangs there, and what gloo forgives may hang there, too. The observer reads each gradient back once a step, so on a GPU each step waits for it. Of the 20 programs that run on one rank, it noted as much on a GPU (an H200) as on a CPU: as many steps, calls, losses and FLOPs, and the same diseases. With several GPUs it has only been rehearsed.

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
# - **Two diseases at once.** Mend one, and look again.
# - **The ranks agree and the kernels do not.** On a GPU a number may be wrong because of *when* it was read, and a CPU with gloo has no streams in which we could show it. What follows is read from torch 2.13, not measured.
#   - *A missing wait.* With `async_op=True` a collective runs on a stream of its own. Until `wait()` nothing orders your kernels behind it, and they read what is there. The allocator has the same blind spot: it knows only the stream on which a tensor was made, so it may hand out memory that another stream still reads. For its own collectives torch keeps the tensors until `wait()`; for a stream of yours call `tensor.record_stream(stream)`, or make the first stream wait. The sign is a result that changes from run to run, and is stable with `CUDA_LAUNCH_BLOCKING=1`.
#   - *NaN from elsewhere.* After one all-reduce every rank has the NaN. `TORCH_NCCL_NAN_CHECK=1` looks at what each rank gives to a collective, and raises on the rank that gives one. It does not stop at infinity.
#   - *CUDA graphs.* A replay runs the captured kernels on the captured addresses, and no Python. A new batch that is not copied into the captured tensor is never read, and an `if`, a hook, or our observer never runs.
#   - *A recompute that differs.* `torch.utils.checkpoint` compares shape, type and device of what it computes again, not the values. It restores torch's random state, but not the state of Python's `random`, of NumPy, or of a layer that counts its calls.
#
# This was the last lab. You have built a library that trains one model on many ranks with data, tensor, pipeline, context and expert parallelism, with ZeRO and FSDP, and with several of these at once; and the means to show that it is right. It has no method that lets ranks drift apart on purpose, such as Local SGD or DiLoCo, no asynchronous training but lab 09's PipeDream, and no expert groups folded into tensor groups.
