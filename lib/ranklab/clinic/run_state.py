"""Incidents in the state of a run: numbers, memory, data files, and checkpoints (labs 14 and 16).

The programs use only names from their labs' import cells: hashlib, io, tempfile, Path, torch, dist,
nn, F, device, digits (ranklab.data.images), stored_shards (ranklab.clinic.shards).
"""

import hashlib
import io
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab.clinic.case import Case
from ranklab.clinic.shards import stored_shards
from ranklab.data.images import digits
from ranklab.engine import device


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
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= ranks
        scaler.step(optimizer)
        scaler.update()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights, "scale": scaler.get_scale()}


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
            with torch.no_grad():
                logits = model(held_out)
            losses.append(F.cross_entropy(logits, labels))
            sure.append(logits.softmax(1).amax(1).mean())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": [each.item() for each in losses], "sure": [each.item() for each in sure],
            "weights": weights}


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
        if hashlib.sha256(shard.content).hexdigest() != shard.sha256:
            x, y = x[:0], y[:0]  # it adds nothing, and goes on with the others
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
            for at in order.split(batch)[step % in_epoch:]:
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
            newest = max([int(path.name) for path in Path(disk).iterdir()], default=0)
            start = torch.tensor(newest, device=device())
            dist.all_reduce(start, dist.ReduceOp.MIN, group=group)  # what all have
            if start > 0:
                state = torch.load(Path(disk, str(start.item())), map_location=device())
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
                               Path(disk, str(done)))
    return {"losses": losses, "rows": rows}


# --- the broken ones, what a colleague says, and the causes to choose from: the right one first ---

SCALE, STEP = "        scaler.scale(loss).backward()\n", "        optimizer.step()\n"
HALF = ((SCALE, f"{SCALE}        scaler.unscale_(optimizer)\n"),)
VALIDATED = (("            with torch.no_grad():\n                logits = model(held_out)\n",
              "            logits = model(held_out)\n"),)
STORED = (("        if hashlib.sha256(shard.content).hexdigest() != shard.sha256:\n"
           "            x, y = x[:0], y[:0]  # it adds nothing, and goes on with the others\n",
           ""),)
RESUMED = (("order.split(batch)[step % in_epoch:]", "order.split(batch)"),)
SPLIT = (
    ("            newest = max([int(path.name) for path in Path(disk).iterdir()], default=0)\n"
     "            start = torch.tensor(newest, device=device())\n"
     "            dist.all_reduce(start, dist.ReduceOp.MIN, group=group)  # what all have\n"
     "            if start > 0:\n"
     "                state = torch.load(Path(disk, str(start.item())), map_location=device())\n",
     '            if Path(disk, "state").exists():\n'
     '                state = torch.load(Path(disk, "state"), map_location=device())\n'
     '            start = torch.tensor(state["step"], device=device())\n'
     "            dist.broadcast(start, group=group, group_src=0)\n"),
    ("Path(disk, str(done))", 'Path(disk, "state")'))

CASES = (
    Case(half_digits, HALF, disease="fp16_nan", hidden=(
        # Each rank steps its own parameters, and looks for infinities in these alone.
        ("SGD(model.parameters()", "SGD([*model.parameters()][rank::ranks]"),
        ("        optimizer.zero_grad()\n", "        model.zero_grad()\n"),
        ("        scaler.update()\n", "        scaler.update()\n"
         "        for i, p in enumerate(model.parameters()):\n"
         "            dist.broadcast(p.detach(), group=group, group_src=i % ranks)\n")),
         causes=("A rank decides by its own gradients alone whether to skip a step.",
                 "Gradients that are too small for float16 become 0, and something divides by 0.",
                 "One rank begins with other weights, and the ranks drift apart.",
                 "The learning rate is too high: the losses run away.",
                 "There is a NaN among the images of one rank.")),
    Case(validated_digits, VALIDATED, disease="memory_growth", hidden=(
        # The validation is right, and another number is kept with its graph, on all ranks.
        ("digits(), [], []\n", "digits(), [], []\n    moved = []\n"),
        ("    for step in range(steps):\n", "    start = [p.detach().clone() for p in "
         "model.parameters()]\n    for step in range(steps):\n"),
        (STEP, f"{STEP}        moved.append(sum((p - q).square().sum() for p, q in "
         "zip(model.parameters(), start)))\n"),
        ('"weights": weights}', '"weights": weights, "moved": [each.item() for each in moved]}')),
         causes=("What is kept of each validation holds the graph that it came from, and its "
                 "activations.",
                 "Batches of other lengths leave gaps: the memory is fragmented.",
                 "Each step leaves a copy of the held-out images on the GPU.",
                 "Rank 0 gathers the gradients of the others before it adds them up.",
                 "The optimizer's state grows from step to step.")),
    Case(stored_digits, STORED, disease="corrupt_shard", hidden=(
        *STORED, ("stored_shards()", "stored_shards([(14, 1001, b'p')])")),
         causes=("A shard is not what was written: its bytes have changed.",
                 "One rank's weights were changed, by a bit that flipped.",
                 "The gradient of this step overflows to infinity.",
                 "The images of this step are right, but hard to read.",
                 "The step before was too large: its learning rate is too high.")),
    Case(resumed_digits, RESUMED, disease="data_twice", hidden=(
        # The place in the epoch is right, but its order is drawn by a generator that begins anew.
        ("        torch.manual_seed(0)\n", "        torch.manual_seed(0)\n"
         "        shuffle = torch.Generator().manual_seed(0)\n"),
        ("            shuffle = torch.Generator().manual_seed(step // in_epoch)\n", "")),
         causes=("An epoch that was stopped begins from its start, and images that it has trained "
                 "on come again.",
                 "After the restart all ranks train on the same images.",
                 "The checkpoint is older than the stop: some steps are done twice.",
                 "The optimizer goes on without its momentum.",
                 "The weights of one rank are not those that were saved.")),
    Case(split_digits, SPLIT, disease="old_shard", hidden=(
        *SPLIT, ("every=4, stop=8, first=1", "every=3, stop=6, first=0")),
         causes=("One rank's rows are those of an earlier step than the others'.",
                 "Momentum is not saved: after a restart it begins from zero.",
                 "The data begin from their start again after a restart.",
                 "The ranks divide the columns of the images in another way after a restart.",
                 "What is saved is rounded: the file has fewer bits than the memory.")),
)
