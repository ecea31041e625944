"""Incidents in which the results are right but slow; they are the last of hangs.py's CASES.

A program uses names from its lab's import cells: argparse, inspect, re, torch, dist, device, GPT,
GPTConfig.
"""

import argparse
import inspect
import re

import torch
import torch.distributed as dist

from ranklab.clinic.case import Case
from ranklab.engine import device
from ranklab.models.gpt import GPT, GPTConfig


def train_large_batch(micro_batches=16, accumulate=8, batch=2, length=32, seed=0, group=None):
    """Train a small GPT on argparse's source, `micro_batches` of `batch` windows on each rank.

    A step's gradient is the mean over `accumulate` micro-batches of all ranks; the last step may
    have fewer. Returns the weights and each step's loss, a mean over the same micro-batches; the
    same on every rank.
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
            loss += part.detach() / ranks
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= ranks
        dist.all_reduce(loss, group=group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"weights": dict(model.named_parameters()), "losses": losses}


def train_on_functions(steps=2, batch=32, micro=2, longest=1024, seed=0, group=None):
    """Train a small GPT on argparse's functions, `batch` in a step, and try it on the last 24.

    `micro` functions of about one length are worked through together, so that little is padded.
    Each is cut to its first `longest` bytes. A step's gradient is the mean over the tokens of all
    ranks. Returns the weights, the steps' losses and the held-out loss, means over tokens as well;
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
        for pile in piles[rank::2 * ranks] + piles[2 * ranks - 1 - rank::2 * ranks]:
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
        seen = sum(map(loss_of, piles[rank::2 * ranks] + piles[2 * ranks - 1 - rank::2 * ranks]))
    dist.all_reduce(seen, group=group)
    return {"weights": dict(model.named_parameters()), "losses": losses,
            "held_out": (seen[0] / seen[1]).item()}


SENT = """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= ranks
"""
WRAPPED = "torch.nn.parallel.DistributedDataParallel(model, process_group=group)"
SHARE = "piles[rank::2 * ranks] + piles[2 * ranks - 1 - rank::2 * ranks]"
IN_A_ROW = "piles[len(piles) * rank // ranks:len(piles) * (rank + 1) // ranks]"
BY_SIZE = "functions = sorted(functions, key=len)[len(functions) // ranks * rank:][:32]"

SLOWDOWNS = (
    Case(
        train_large_batch,
        edits=((f"""            loss += part.detach() / ranks
{SENT}        dist.all_reduce(loss, group=group)
""", """            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= ranks
            part = part.detach()
            dist.all_reduce(part, group=group)
            loss += part / ranks
"""),),
        hidden=((SENT, ""), ("    losses = []\n", f"    losses, model = [], {WRAPPED}\n"),
                ("dict(model.named", "dict(model.module.named")),
        causes=("Gradients are sent after each micro-batch, not once in a step.",
                "One rank is slower than the others, and they wait for it.",
                "Each parameter is sent by a call of its own, not in large buckets.",
                "Gradients travel in float32; bfloat16 would halve them.",
                "The model is too large for this network, whatever is accumulated."),
        disease="sync_every_micro_step",
    ),
    Case(
        train_on_functions,
        edits=((f"for pile in {SHARE}", f"for pile in {IN_A_ROW}"),
               (f"map(loss_of, {SHARE})", f"map(loss_of, {IN_A_ROW})")),
        hidden=(("functions = [torch.tensor", f"{BY_SIZE}\n    functions = [torch.tensor"),
                ("batch * step:batch * step + batch", "batch // ranks * step:][:batch // ranks"),
                (f"for pile in {SHARE}", "for pile in piles"), (f"(loss_of, {SHARE})",
                                                                "(loss_of, piles)")),
        causes=("Its functions are longer than those of the other ranks.",
                "Its card, or its core, is slower than the others.",
                "It has more functions than the other ranks.",
                "Its link to the others is slow.",
                "It waits for its data."),
        disease="straggler",
    ),
)
