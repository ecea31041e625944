# The text of lab 16's group "later": five incidents, for labs/source/16_clinic.py. The import cell must
# bind: hashlib, io, tempfile, Path, torch, dist, nn, F, device, launch, check, digits, stored_shards,
# MemoryCurve, replicas_agree. The stubs are Case.broken_source() of ranklab.clinic.later, word by word.
# The numbers of the causes are Case.choices.

# %%
import hashlib
import io
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab import check, device, launch
from ranklab.clinic.shards import stored_shards
from ranklab.data.images import digits
from ranklab.data_parallel.replicas import replicas_agree
from ranklab.meter import MemoryCurve

# %% [markdown]
# ### Later
#
# These five go well at first. What is wrong shows after a dozen steps, after hours, or after a restart.

# %% [markdown]
# #### NaN on two of four
# > difficulty 4/5 · importance 5/5 · 15 minutes · about 1 line
#
# > We train in float16, with torch's GradScaler. On one rank it goes well. On four the loss is NaN after a dozen steps: on two of the ranks first, a step later on all. A smaller `scale` puts it off; it does not cure it.

# %%
def half_digits(group=None, steps=16, scale=2.0**16, growth=5, batch=60):
    """{"losses": this rank's, "weights", "scale"} of a training in float16."""
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
# **Look.** One line runs it. What you print, count or compare beyond that is yours:

# %%
for row in launch(half_digits, ranks=4):
    print([round(loss, 2) for loss in row["losses"]], row["scale"])

# %% [markdown]
# **Why?** The number of the cause:
#
# 1. A rank decides by its own gradients alone whether to skip a step.
# 2. Gradients that are too small for float16 become 0, and something divides by 0.
# 3. One rank begins with other weights, and the ranks drift apart.
# 4. The learning rate is too high: the losses run away.
# 5. There is a NaN among the images of one rank.

# %%
check(clinic_half_digits_cause=...)

# %% [markdown]
# **Mend it** in its cell above, run that cell and this one. It is tried elsewhere, too.

# %%
half_digits = check(half_digits)

# %% [markdown]
# #### Out of memory, always on GPU 0
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 2 lines
#
# > Out of memory after some hours, always on the same one of four GPUs. The others stay at what they took in the first step. The losses are good. Half the batch does not help: it ends at about the same step.

# %%
def validated_digits(group=None, steps=8, batch=60):
    """{"losses", "sure": on held-out images after each step, of rank 0; "weights"}."""
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
# **Look.** One line runs it. What you print, count or compare beyond that is yours:

# %%
def peak(steps):
    with MemoryCurve(nn.Identity()) as curve:
        validated_digits(steps=steps)
    return curve.peak_bytes


print([launch(peak, steps, ranks=4) for steps in (4, 8)])

# %% [markdown]
# **Why?** The number of the cause:
#
# 1. Batches of other lengths leave gaps: the memory is fragmented.
# 2. Each step leaves a copy of the held-out images on the GPU.
# 3. Rank 0 gathers the gradients of the others before it adds them up.
# 4. The optimizer's state grows from step to step.
# 5. What is kept of each validation holds the graph that it came from, and its activations.

# %%
check(clinic_validated_digits_cause=...)

# %% [markdown]
# **Mend it** in its cell above, run that cell and this one. It is tried elsewhere, too.

# %%
validated_digits = check(validated_digits)

# %% [markdown]
# #### One step, in every run
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 2 lines
#
# > In step 5 the loss jumps from 2.0 to 13.9, and at the end it is 6.7, where 1.3 is usual. It is this step in every run. With a tenth of the learning rate the loss jumps to 18.5. On one rank the jump comes in step 21.
#
# `stored_shards()` gives a list of `Shard(content, sha256)`; a `batch()` is the images and labels of one. Everything else stands in the program.

# %%
def stored_digits(group=None, steps=12, shards=None):
    """{"losses": of each step, "weights"} of a training that reads a shard a rank in each step."""
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
# **Look.** One line runs it. What you print, count or compare beyond that is yours:

# %%
print([round(loss, 2) for loss in launch(stored_digits, ranks=4)[0]["losses"]])

# %% [markdown]
# **Why?** The number of the cause:
#
# 1. A shard is not what was written: its bytes have changed.
# 2. One rank's weights were changed, by a bit that flipped.
# 3. The gradient of this step overflows to infinity.
# 4. The images of this step are right, but hard to read.
# 5. The step before was too large: its learning rate is too high.

# %%
check(clinic_stored_digits_cause=...)

# %% [markdown]
# **Mend it** in its cell above, run that cell and this one. It is tried elsewhere, too.

# %%
stored_digits = check(stored_digits)

# %% [markdown]
# #### Better after the restart
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 2 lines
#
# > The job was stopped after step 8, and went on from its checkpoint. The loss of its first step was 0.48. We were pleased: a run without a stop has 0.58 there. But from the next step on that run is ahead, 0.40 against 0.49.

# %%
def resumed_digits(group=None, steps=12, stops=(8,), batch=120):
    """{"losses": of each step, "weights", "seen": images that this rank has trained on}.

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
# **Look.** One line runs it. What you print, count or compare beyond that is yours:

# %%
for stops in ((), (8,)):
    found = launch(lambda: resumed_digits(stops=stops), ranks=4)
    print(stops, [round(loss, 2) for loss in found[0]["losses"]])

# %% [markdown]
# **Why?** The number of the cause:
#
# 1. After the restart all ranks train on the same images.
# 2. An epoch that was stopped begins from its start: what it had trained on comes again.
# 3. The checkpoint is older than the stop: some steps are done twice.
# 4. The optimizer goes on without its momentum.
# 5. The weights of one rank are not those that were saved.

# %%
check(clinic_resumed_digits_cause=...)

# %% [markdown]
# **Mend it** in its cell above, run that cell and this one. It is tried elsewhere, too.

# %%
resumed_digits = check(resumed_digits)

# %% [markdown]
# #### Most restarts go well
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 6 lines
#
# > Our machines may be taken away at any moment. The last time the job went on from step 8, says rank 0. But the loss is 0.75 there, and 0.50 in a run that was never stopped. Most restarts go well.
#
# The program divides the model, not the batch: each rank has some columns of the images and those rows of the weights. Softmax and its gradient are written out.

# %%
def split_digits(group=None, steps=12, every=4, stop=8, first=1, batch=120):
    """{"losses": of each step, "rows": this rank's of the weights}.

    The weights lie on the ranks in rows. After step `stop` the machines are taken away, that of
    rank `first` a moment before the others. Then the job goes on, each rank from its own disk.
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
# **Look.** One line runs it. What you print, count or compare beyond that is yours:

# %%
for first in (1, 4):
    found = launch(lambda: split_digits(first=first), ranks=4)
    print(first, [round(loss, 2) for loss in found[0]["losses"]])

# %% [markdown]
# **Why?** The number of the cause:
#
# 1. Momentum is not saved: after a restart it begins from zero.
# 2. One rank's rows are those of an earlier step than the others'.
# 3. The data begin from their start again after a restart.
# 4. The ranks divide the columns of the images in another way after a restart.
# 5. What is saved is rounded: the file has fewer bits than the memory.

# %%
check(clinic_split_digits_cause=...)

# %% [markdown]
# **Mend it** in its cell above, run that cell and this one. It is tried elsewhere, too.

# %%
split_digits = check(split_digits)
