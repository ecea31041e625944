"""The programs of silent_errors.py, fixed: short training runs on real data.

From its lab's import cells an answer uses, besides torch, dist, nn and F: argparse, copy, inspect,
LambdaLR, DataLoader, DistributedSampler, TensorDataset, pad_sequence; and from ranklab CNN,
CNNConfig, GPT, GPTConfig, convert_sync_batch_norm (from data_parallel), device, digits, pack.
"""

import argparse
import copy
import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ranklab.basics.flat import pack
from ranklab.data import digits
from ranklab.data_parallel import convert_sync_batch_norm
from ranklab.engine import device
from ranklab.models.cnn import CNN, CNNConfig
from ranklab.models.gpt import GPT, GPTConfig


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
        part.grad /= R
        norm = part.grad.square().sum()
        dist.all_reduce(norm, group=group)
        norm = norm.sqrt()
        part.grad *= (most / norm).clamp(max=1)
        optimizer.step()
        before = w.detach().clone()
        dist.all_gather_single(w.detach(), part.detach(), group=group)
        longest = max(longest, (w - before).norm().item())
    weights = w.detach()[:640]
    loss = F.cross_entropy(x @ weights.view(64, 10), y)
    return {"loss": loss.item(), "longest": longest, "weights": weights}


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
    for p in model.parameters():
        dist.broadcast(p.detach(), group=group, group_src=0)
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


def no_faster(epochs=2, batch=96, lr=0.05, seed=0, group=None):
    """Train softmax regression on digits; `batch` images a step on all ranks, shuffled each epoch.

    -> {"loss" at the end, "weights", "seen": of each epoch and step, the numbers of the images}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    images = digits()
    x, y = images.train.flatten(1), images.train_labels
    torch.manual_seed(seed)
    data = TensorDataset(x, y, torch.arange(len(x)))
    sampler = DistributedSampler(data, R, rank, seed=seed)
    loader = DataLoader(data, batch // R, sampler=sampler)
    model = nn.Linear(64, 10).to(device())
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
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
    times = R * batch / 32
    each = 1152 // (R * batch)
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
    model = convert_sync_batch_norm(model, group)
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
        count = torch.tensor(sum(len(line) - 1 for line in mine), device=device())
        dist.all_reduce(count, group=group)
        losses.append(torch.zeros((), device=device()))
        optimizer.zero_grad()
        for piece in range(pieces):
            rows = [torch.tensor(list(line)) for line in mine[piece::pieces]]
            rows = pad_sequence(rows, True, -100).to(device())
            loss = model(rows[:, :-1].clamp(min=0), rows[:, 1:], "sum") / count
            loss.backward()
            losses[-1] += loss.detach()
        for tensor in [losses[-1], *(p.grad for p in model.parameters())]:
            dist.all_reduce(tensor, group=group)
        optimizer.step()
    return {"losses": torch.stack(losses), "weights": pack(model.parameters()).detach()}
