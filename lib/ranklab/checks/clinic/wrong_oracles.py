"""The trainings of clinic/trainings.py in one process, as they should be and as slips make them.

R is the number of ranks whose work it does. What follows the settings chooses a slip.
"""

import argparse
import contextlib
import inspect

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ranklab.data import digits
from ranklab.models.cnn import CNN, CNNConfig
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.targets import IGNORE

# How the norm of a gradient is made of those of its parts, one a rank.
NORMS = {"root of the sum of squares": torch.Tensor.norm, "largest": torch.Tensor.max,
         "sum": torch.Tensor.sum, "each its own": torch.Tensor.clone}


@contextlib.contextmanager
def one_thread():
    """Inside, torch computes by one thread: here two are 20 times slower, because products are
    small, and the more so where other processes wait for the cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def long_steps(R, steps=30, lr=0.5, most=0.1, times=1, norm="root of the sum of squares"):
    """times  by which the gradient is too large"""
    images, w, longest = digits(), torch.zeros(640, requires_grad=True), 0.0
    x, y = images.train.flatten(1), images.train_labels
    for step in range(steps):
        at = slice(240 * (step % 5), 240 * (step % 5) + 240)
        gradient, = torch.autograd.grad(F.cross_entropy(x[at] @ w.view(64, 10), y[at]), w)
        parts = (times * gradient).split(-(-640 // R))
        sizes = NORMS[norm](torch.stack([part.norm() for part in parts])).expand(len(parts))
        change = lr * torch.cat([part * (most / size).clamp(max=1)
                                 for part, size in zip(parts, sizes)])
        w.data -= change
        longest = max(longest, change.norm().item())
    loss = F.cross_entropy(x @ w.view(64, 10), y).item()
    return {"longest": longest, "loss": loss, "weights": w.detach()}


def saved_model(start, steps=20, lr=0.3, decay=0.9):
    """start  the first weights, flat"""
    images = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    x, y, mean = images.train.flatten(1), images.train_labels, start.clone()
    vector_to_parameters(start.clone(), model.parameters())
    for step in range(steps):
        at = slice(240 * (step % 5), 240 * (step % 5) + 240)
        _descend(model, F.cross_entropy(model(x[at]), y[at]), lr)
        mean = decay * mean + (1 - decay) * parameters_to_vector(model.parameters()).detach()
    weights = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(mean, model.parameters())
    loss = F.cross_entropy(model(images.held_out.flatten(1)), images.held_out_labels)
    return {"weights": weights, "mean": mean, "loss": loss.item()}


def no_faster(order, lr=0.05):
    """order  of each step, the numbers of the images of all ranks"""
    images, model = digits(), nn.Linear(64, 10)
    vector_to_parameters(torch.zeros(650), model.parameters())
    x, y = images.train.flatten(1), images.train_labels
    for at in order:
        _descend(model, F.cross_entropy(model(x[at]), y[at]), lr)
    weights = parameters_to_vector(model.parameters()).detach()
    return {"weights": weights, "loss": F.cross_entropy(model(x), y).item()}


def worse_together(R, epochs=4, batch=32, lr=0.03, grown=None, known=None):
    """grown  ranks for which the rate grows
    known  ranks by which the schedule counts the steps of an epoch
    """
    images, model, rates = digits(), nn.Linear(64, 10), []
    vector_to_parameters(torch.zeros(650), model.parameters())
    x, y = images.train[:1152].flatten(1), images.train_labels[:1152]
    times, each = (grown or R) * batch / 32, 1152 // (batch * (known or R))
    for step in range(epochs * 1152 // (R * batch)):
        at = torch.arange(R * batch) + step * R * batch
        warm, left = min(1, step / each), max(0, 1 - step / (epochs * each))
        rates.append(lr * left * (1 - warm + warm * times))
        _descend(model, F.cross_entropy(model(x[at % 1152]), y[at % 1152]), rates[-1])
    loss, weights = F.cross_entropy(model(x), y), parameters_to_vector(model.parameters())
    return {"rates": torch.tensor(rates), "loss": loss.item(), "weights": weights.detach()}


def two_scores(R, steps=20, lr=0.3, width=8, of_its_own=False):
    """of_its_own  each rank's images are normalised by themselves in training; then only the
    weights are told: the running statistics are many
    """
    images = digits()
    x, y, labels = images.train, images.train_labels, images.held_out_labels
    torch.manual_seed(0)
    model = CNN(CNNConfig(width=width))
    for step in range(steps):
        parts = [shard[step % 5::5][:240 // R] for shard in y.argsort(stable=True).chunk(R)]
        parts = parts if of_its_own else [torch.cat(parts)]
        loss = sum(F.cross_entropy(model(x[at]), y[at]) for at in parts) / len(parts)
        _descend(model, loss, lr)
    weights, logits = parameters_to_vector(model.parameters()), model.eval()(images.held_out)
    right = {"weights": weights.detach(), "loss": F.cross_entropy(logits, labels).item(),
             "score": (logits.argmax(1) == labels).sum().item()}
    return {"weights": right["weights"]} if of_its_own else right


def moving_curve(R, steps=6, lines=24, pieces=2, lr=0.5, mean_of=("whole",)):
    """mean_of  whose means are averaged: the "whole", or of each "rank", each "piece", or both"""
    text = [line.encode()[:64] for line in inspect.getsource(argparse).splitlines() if line[1:]]
    torch.manual_seed(0)
    model, losses = GPT(GPTConfig(n_layer=1, n_embd=32)), []
    for step in range(steps):
        batch = sorted(text[lines * step:][:lines], key=len)
        tokens = torch.full((lines, 64), IGNORE)
        for row, line in zip(tokens, batch):
            row[:len(line)] = torch.tensor(list(line))
        targets, n = tokens[:, 1:], (tokens[:, 1:] != IGNORE).sum(1)
        each = lines // R
        groups = [(i // each if "rank" in mean_of else 0,
                   i % each % pieces if "piece" in mean_of else 0) for i in range(lines)]
        count = [sum(n[j] for j in range(lines) if groups[j] == mine) for mine in groups]
        weight = 1 / torch.stack(count) / len({*groups})
        of_tokens = F.cross_entropy(model(tokens[:, :-1].clamp(min=0)).transpose(1, 2), targets,
                                    ignore_index=IGNORE, reduction="none")
        losses.append((of_tokens.sum(1) * weight).sum())
        _descend(model, losses[-1], lr)
    weights = parameters_to_vector(model.parameters()).detach()
    return {"losses": torch.stack(losses).detach(), "weights": weights}


def _descend(model, loss, lr):
    for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()])):
        p.data -= lr * gradient
