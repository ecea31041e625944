# The names that these cells need, for the lab's import cell:
# %%
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ranklab import check, device, launch
from ranklab.data import batch_at, held_out_batch, text_file
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.pipeline_parallel.stages import keep_layers
from ranklab.tensor_parallel.dropout import dropout_seeds, own_random
from ranklab.tensor_parallel.regions import copy_to_region, reduce_from_region

# %% [markdown]
# #### Two ranks, one batch, two losses
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 4 lines
#
# > Since the wide layer is cut in two, the two ranks of a pair print different losses, from the first step on, and they have the same rows. The weights that both hold are alike at the start; at the end the head of rank 0 is not that of rank 1. Our checkpoint takes the first.

# %%
def wide_layer(steps=12, lr=0.5, p=0.25, tensor=2, seed=0, group=None):
    """A small language model is trained: its wide layer is cut over `tensor` ranks, and each such
    set of ranks has rows of its own.

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
# **Look.** Which tensor is the last that two ranks of a pair have alike? The program has four ranks in two pairs: print in it, or return more than it does. A setting may show more than a print: `p`, `steps`.

# %%
for rank, seen in enumerate(launch(wide_layer, ranks=4)):
    print(f"rank {rank}: the first losses", *(f"{loss:.4f}" for loss in seen["losses"][:3]))

# %% [markdown]
# **The cause.** Which is it, and which number proves it?
#
# 1. Gradients are averaged over the wrong ranks.
# 2. Ranks that hold the same numbers drop different ones.
# 3. The two halves of the wide layer are never added up.
# 4. The two ranks of a pair read different rows.

# %%
check(clinic_wide_layer_cause=...)

# %% [markdown]
# **Mend it,** in the cell above. The pair must agree again, and more than that: the check reads what `F.dropout` drops on every rank, so keep both calls, as `F.dropout` or `nn.Dropout`. Then one process that drops the same is run beside it. In the check `tensor` is 1 and 3 as well.

# %%
wide_layer = check(wide_layer)

# %% [markdown]
# #### Good in training, bad in the file
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 5 lines
#
# > In four stages the training loss goes down as it should. We save the stages, merge the files and evaluate. The matrix of the embedding and the head is one, so the file has it once, from the first stage. On the very rows that it was trained on, the merged model's loss is 1 above what training logged. A run on one rank has no such gap.

# %%
def staged_gpt(steps=20, lr=0.01, seed=0, group=None):
    """A GPT of four blocks is trained, each rank a stage; one matrix is its embedding and its head.

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
# **The cause.** Which is it, and which number proves it?
#
# 1. Each end trains a copy of the shared matrix by what it sees itself.
# 2. The merged file lacks the blocks of some stage.
# 3. The middle stages get gradients that belong to other rows.
# 4. The two copies of the shared matrix differ from the start.

# %%
check(clinic_staged_gpt_cause=...)

# %% [markdown]
# **Mend it,** in the cell above. One to four stages must train what one process trains.

# %%
staged_gpt = check(staged_gpt)

# %% [markdown]
# #### Faster, and it diverges
# > difficulty 4/5 · importance 5/5 · 15 minutes · about 4 lines
#
# > Weights are gathered while the optimizer works, to save time. Since then the run diverges, at a learning rate at which it went well before; with a quarter of it it trains, but slowly. The held-out loss in the log is not that of the checkpoint of the same step. All ranks print the same numbers.

# %%
def gathered_model(steps=16, lr=1.0, seed=0, group=None):
    """A small language model is trained: each rank keeps a shard of it, and gathers all of it for
    each step.

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
# **Look.** Is it the number of ranks? Is it the learning rate? Look at the first losses.

# %%
for ranks in (1, 4):
    losses = launch(gathered_model, ranks=ranks)[0]["losses"]
    print(f"ranks={ranks}:", *(f"{loss:.3f}" for loss in losses[:6]))

# %% [markdown]
# **The cause.** Which is it, and which number proves it?
#
# 1. The forward uses weights from before the last step.
# 2. The gathered shards come in an order that differs between ranks.
# 3. The learning rate is too large for this batch.
# 4. The ranks' gradients are added up where their mean is due.

# %%
check(clinic_gathered_model_cause=...)

# %% [markdown]
# **Mend it,** in the cell above. All weights, all losses and all held-out losses must be those of one process. `coming` must be waited for, and the gather stays asynchronous if you like: work that does not need it may stand in between.

# %%
gathered_model = check(gathered_model)

# %% [markdown]
# #### The loss that does not move
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 1 lines
#
# > We moved a run to fully_shard. It has no error and no warning, and it has the speed that we hoped for. The loss stays where it begins, at that of a guess among 256 bytes, as long as we wait.

# %%
def sharded_gpt(steps=12, lr=0.01, seed=0, group=None):
    """A GPT is trained under torch's fully_shard.

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
# **Look.** What does a step change? Is there a gradient when it is taken?

# %%
losses = launch(sharded_gpt, ranks=4)[0]["losses"]
print(*(f"{loss:.3f}" for loss in losses), f"   a guess: {np.log(256):.3f}")

# %% [markdown]
# **The cause.** Which is it, and which number proves it?
#
# 1. Each rank trains for itself, and nothing is averaged.
# 2. The gradients are zeroed before the step.
# 3. The learning rate is too small for shards.
# 4. The optimizer has parameters that the model no longer uses.

# %%
check(clinic_sharded_gpt_cause=...)

# %% [markdown]
# **Mend it,** in the cell above. All weights must be those of one process, and the two blocks and the rest must still be sharded.

# %%
sharded_gpt = check(sharded_gpt)

# %% [markdown]
# #### Half of the norm
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 4 lines
#
# > One rank logs a gradient norm above 1 at the first step, four ranks log about half of it. Seed, rows and the first loss are the same. From the second step on the losses differ, and the curve on four ranks is the rougher one at first.

# %%
def flat_model(steps=24, lr=1.0, max_norm=0.5, seed=0, group=None):
    """A small language model is trained, its gradient clipped; each rank's optimizer has a shard.

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
# **The cause.** Which is it, and which number proves it?
#
# 1. Each rank clips by the norm of its own rows' gradient, before they are averaged.
# 2. Each rank clips by the norm of its own shard.
# 3. Momentum is kept for each shard alone.
# 4. The gradient is divided by the number of ranks twice.

# %%
check(clinic_flat_model_cause=...)

# %% [markdown]
# **Mend it,** in the cell above. Norms, losses and weights must be those of one process that clips by torch's own `clip_grad_norm_`, also where the whole gradient is just short enough.

# %%
flat_model = check(flat_model)
