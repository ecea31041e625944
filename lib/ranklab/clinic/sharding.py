"""Bugs in split models: tensor_parallel, pipeline_parallel, ZeRO and FSDP.

An answer uses these names from its lab's import cells: os, torch, dist, nn, F, DeviceMesh,
fully_shard, GPT, GPTConfig, batch_at, held_out_batch, text_file, device, and lab 08's
copy_to_region, reduce_from_region, dropout_seeds and own_random, lab 09's keep_layers.
The text is the source of Python's module os. Batches and sizes are divisible by 1 to 4 ranks.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ranklab.clinic.case import Case
from ranklab.data import batch_at, held_out_batch, text_file
from ranklab.engine import device
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.pipeline_parallel.stages import keep_layers
from ranklab.tensor_parallel.dropout import dropout_seeds, own_random
from ranklab.tensor_parallel.regions import copy_to_region, reduce_from_region


def fully_shard(module, **options):
    """Call torch's. Its import takes 1 s, and most labs' checks import this file."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, **options)


def wide_layer(steps=12, lr=0.5, p=0.25, tensor=2, seed=0, group=None):
    """Train a small language model whose wide layer is split over `tensor` ranks.

    Each set of `tensor` ranks has its own rows of the batch.

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
    shared, own = dropout_seeds(seed, row, column, tensor)
    torch.manual_seed(shared)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    tokens, losses = text_file(os.__file__).train, []
    for step in range(steps):
        inputs, targets = (each.chunk(len(ranks) // tensor)[row].to(device())
                           for each in batch_at(tokens, step, 24, 8, seed))
        x = copy_to_region(model["embed"](inputs).flatten(1), inside)
        with own_random(own):
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


def staged_gpt(steps=20, lr=0.01, seed=0, group=None):
    """Train a GPT of four blocks, a stage on each rank; one matrix is both embedding and head.

    Returns {"losses": [of each step] on the last stage, else [], "weights": {name: this stage's}}.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    R, first, last = len(ranks), rank == 0, rank == len(ranks) - 1
    torch.manual_seed(seed)
    config = GPTConfig(n_ctx=16, n_embd=32, n_layer=4)
    model = keep_layers(GPT(config), range(6 * rank // R, 6 * (rank + 1) // R)).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    ends = None
    if R > 1 and (first or last):
        ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
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
        if ends:
            end = model.token if first else model.head
            dist.all_reduce(end.weight.grad, group=ends)
        optimizer.step()
        losses += [y.item()] if last else []
    return {"losses": losses, "weights": {n: w.detach() for n, w in model.named_parameters()}}


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
        optimizer.step()
        coming = dist.all_gather_single(ahead, shard.detach(), group=group, async_op=True)
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
        coming.wait()
        flat.copy_(ahead)
        if step % 4 == 3:
            with torch.no_grad():
                held_out.append(F.cross_entropy(model(unseen), following[:, -1]).item())
    return {"losses": losses, "held_out": held_out, "weights": flat}


def moved_gpt(steps=12, lr=0.01, seed=0, group=None):
    """Train a GPT under torch's fully_shard.

    Returns {"losses": [of all rows], "weights": {name: the whole tensor}}.
    """
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_ctx=16, n_embd=32)).to(device())
    mesh = DeviceMesh.from_group(group, device().type) if group else None
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)
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
        square = shard.grad.square().sum()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
        shard.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        optimizer.step()
        dist.all_gather_single(flat, shard.detach(), group=group)
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "weights": flat}


# --- as they were found ---------------------------------------------------------------------------

SEEDS = ("    shared, own = dropout_seeds(seed, row, column, tensor)\n"
         "    torch.manual_seed(shared)\n")
OWN = "        with own_random(own):\n            h = ", "        h = "
NEW_ENDS = """    ends = None
    if R > 1 and (first or last):
        ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
"""
SUM_ENDS = """        if ends:
            end = model.token if first else model.head
            dist.all_reduce(end.weight.grad, group=ends)
"""
STEP = "        optimizer.step()\n"
GATHER = ("        coming = dist.all_gather_single(ahead, shard.detach(), group=group, "
          "async_op=True)\n")
SEND = GATHER.replace("shard.detach()", "kept")
KEEP = "        kept = shard.detach().clone()\n"
LOAD = "        coming.wait()\n        flat.copy_(ahead)\n"
HELD_OUT = """        if step % 4 == 3:
            with torch.no_grad():
                held_out.append(F.cross_entropy(model(unseen), following[:, -1]).item())
"""
BLOCKS = "    for block in model.blocks.values():\n        fully_shard(block, mesh=mesh)\n"
ROOT = "    fully_shard(model, mesh=mesh)\n"
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)\n"
SCATTER = "        dist.reduce_scatter_single(shard.grad, gradient, group=group)\n"
CLIP = """        square = shard.grad.square().sum()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
        shard.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
"""
OWN_CLIP = """        norm = R * gradient.norm()
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
"""

CASES = (
    Case(wide_layer, ((SEEDS, "    torch.manual_seed(seed + rank)\n"), OWN),
         hidden=((SEEDS, ""), OWN), disease="dropout_seeds",
         causes=("Ranks that hold the same numbers drop different ones.",
                 "Gradients are averaged over the wrong ranks.",
                 "The two ranks of a pair read different rows.",
                 "The two halves of the wide layer are never added up.")),
    Case(staged_gpt, ((NEW_ENDS, ""), (SUM_ENDS, "")),
         hidden=((SUM_ENDS + STEP, STEP + SUM_ENDS),), disease="tied_weights",
         causes=("Each end trains a copy of the shared matrix by what it sees itself.",
                 "The two copies of the shared matrix differ from the start.",
                 "The middle stages get gradients that belong to other rows.",
                 "The merged file lacks the blocks of some stage.")),
    Case(gathered_model, ((STEP + GATHER, KEEP + SEND + STEP), (LOAD + HELD_OUT, HELD_OUT + LOAD)),
         hidden=((STEP + GATHER, KEEP + STEP + SEND),), disease="stale_weights",
         causes=("The forward uses weights from before the last step.",
                 "The ranks' gradients are added up where their mean is due.",
                 "The learning rate is too large for this batch.",
                 "The gathered shards come in an order that differs between ranks.")),
    Case(moved_gpt, ((BLOCKS + ROOT + OPTIMIZER, OPTIMIZER + BLOCKS + ROOT),),
         hidden=((ROOT + OPTIMIZER, OPTIMIZER + ROOT),), disease="optimizer_before_sharding",
         causes=("The optimizer has parameters that the model no longer uses.",
                 "The learning rate is too small for shards.",
                 "Each rank trains on its own, and nothing is averaged.",
                 "The gradients are zeroed before the step.")),
    Case(flat_model, ((CLIP, "        norm = nn.utils.clip_grad_norm_([shard], max_norm)\n"),),
         hidden=((SCATTER + CLIP, OWN_CLIP + SCATTER),), disease="shard_norm",
         causes=("Each rank clips by the norm of its own shard.",
                 "Each rank clips by the norm of its own rows' gradient, before they are averaged.",
                 "The gradient is divided by the number of ranks twice.",
                 "Momentum is kept for each shard alone.")),
)
