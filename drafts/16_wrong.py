# %% [markdown]
# ### 4.x Steps that are too long
# > difficulty 4/5 · importance 5/5 · 20 minutes · about 4 lines
#
# Each step has a limit, and the program has a line for it.
#
# > The job clips its gradient to a norm of 0.1 at a learning rate of 0.5, so no step may be longer than 0.05. On one rank none is. On four ranks the longest is 0.094, and on two it is 0.071. The loss falls all the faster, and so nobody complained. But with clipping turned off (most=1e9), four ranks need another learning rate than one has.

# %%
def long_steps(steps=30, lr=0.5, most=0.1, group=None):
    """Softmax regression on digits, 240 images a step; each rank updates its part of the weights.

    The gradient is that of the mean over the 240, clipped to a norm of `most`.
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


# %%
[f"{launch(long_steps, ranks=ranks)[0]['longest']:.3f}" for ranks in (1, 2, 4)]

# %% [markdown]
# **The cause.** Which one is it? Measure, then put its number.
#
# 1. Each rank clips before the ranks' gradients have come together
# 2. The learning rate grows with the number of ranks
# 3. The ranks' numbers are combined by the wrong operation
# 4. The ranks' weights have drifted apart

# %%
check(clinic_long_steps_cause=...)

# %% [markdown]
# Mend it in the cell above.

# %%
long_steps = check(long_steps)

# %% [markdown]
# Replicas that agree are no proof: all may have made the same wrong step. A step against that of one process is one.

# %% [markdown]
# ### 4.x A saved model that is worse than its log
# > difficulty 2/5 · importance 5/5 · 15 minutes · about 2 lines
#
# The log looks well. The file does not.
#
# > The training loss in our log, a mean over the ranks, looks as it always did. But the model that rank 0 saves has a loss of 1.72 on held-out images. Trained on one rank it has 1.19, and models saved by ranks 1, 2 or 3 would have 1.31. We use the same seed everywhere, of course.

# %%
def saved_model(steps=20, lr=0.3, decay=0.9, seed=0, group=None):
    """An MLP on digits, and the running mean of its weights, which rank 0 saves.

    seed  of this rank's random numbers; the ranks may be given different ones
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


# %%
[f"{each['loss']:.2f}" for each in launch(saved_model, ranks=4)]

# %% [markdown]
# **The cause.** Which one is it? Measure, then put its number.
#
# 1. Rank 0 trains on fewer images than the others
# 2. Some gradients are not averaged over the ranks
# 3. The ranks begin with different weights
# 4. The running mean of rank 0 lacks the last steps

# %%
check(clinic_saved_model_cause=...)

# %% [markdown]
# Mend it in the cell above.

# %%
saved_model = check(saved_model)

# %% [markdown]
# `replicas_agree(model)` before the first step costs 16 bytes. Without a seed, ranks that torchrun starts begin with different random numbers, since each process draws its own seed; the ranks of one `launch` are forked from one process, and are equal by luck.

# %% [markdown]
# ### 4.x Four ranks are no faster than one
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 3 lines
#
# Nothing hangs, nothing is wrong, and nothing is won.
#
# > One rank goes twice through the digits in 30 steps of 96 images. We gave the job four ranks, 24 images each, and now it takes 120 steps for the same two epochs. The replicas agree, the loss falls well, no rank waits for another. Only: four ranks are no faster than one.

# %%
def no_faster(epochs=2, batch=96, lr=0.05, seed=0, group=None):
    """Softmax regression on digits, shuffled in each epoch; `batch` images a step on all ranks.

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


# %%
len(launch(no_faster, ranks=4)[0]["seen"][0])

# %% [markdown]
# **The cause.** Which one is it? Measure, then put its number.
#
# 1. A rank's share of a step should be 96 images, not 24
# 2. All ranks read the same images
# 3. The gradients are all-reduced more often than once a step
# 4. The ranks begin with different weights

# %%
check(clinic_no_faster_cause=...)

# %% [markdown]
# Mend it in the cell above.

# %%
no_faster = check(no_faster)

# %% [markdown]
# A fingerprint of each rank's first batch, printed once, finds this in a second.

# %% [markdown]
# ### 4.x Worse together
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 2 lines
#
# The same images, four times the ranks, and a worse loss.
#
# > Four epochs on one rank end at a loss of 0.84. On four ranks, four epochs of the same images end at 1.35. Each gradient is right: we compared it with that of one process on the same 128 images. With 16 epochs it gets there, but then we have won nothing.

# %%
def worse_together(epochs=4, batch=32, lr=0.03, group=None):
    """Softmax regression on digits, `batch` images a step on each rank.

    The recipe (after Goyal et al. 2017): `lr` is for steps of 32 images, and goes with their
    number; in the first epoch it moves there evenly. It is multiplied by the share of steps left.
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


# %%
[f"{launch(worse_together, ranks=ranks)[0]['loss']:.2f}" for ranks in (1, 4)]

# %% [markdown]
# **The cause.** Which one is it? Measure, then put its number.
#
# 1. Each rank sees only a quarter of the images
# 2. The gradients are averaged, and should be summed
# 3. The learning rate does not follow the number of ranks
# 4. The warm-up is too long for so few steps

# %%
check(clinic_worse_together_cause=...)

# %% [markdown]
# Mend it in the cell above.

# %%
worse_together = check(worse_together)

# %% [markdown]
# Goyal et al. (arXiv 1706.02677): when the batch is multiplied by k, multiply the learning rate by k. What counts steps is divided by k: warm-up, decay, and how often one evaluates and saves.

# %% [markdown]
# ### 4.x Which score is right?
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 1 line
#
# The replicas agree. Their scores don't.
#
# > After the training each rank counts how many of the same 360 held-out images it has right: 315, 309, 310 and 311. Which one shall we publish? We broadcast all model.parameters() from rank 0 before we count, and it changes nothing. And a single process that trains on the same images has 322.

# %%
def two_scores(steps=20, lr=0.3, width=8, group=None):
    """A CNN on digits, 240 images a step; each rank has a shard of them, in the order of labels.

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


# %%
[each["score"] for each in launch(two_scores, ranks=4)]

# %% [markdown]
# **The cause.** Which one is it? Measure, then put its number.
#
# 1. Each rank normalises by the statistics of its own images
# 2. The model is still in training mode when they count
# 3. The ranks do not count on the same images
# 4. The ranks' weights have drifted apart

# %%
check(clinic_two_scores_cause=...)

# %% [markdown]
# Mend it in the cell above.

# %%
two_scores = check(two_scores)

# %% [markdown]
# DDP broadcasts rank 0's buffers before each forward, unless told otherwise: then the ranks agree, and evaluate with what rank 0 saw. Statistics of the whole batch need SyncBatchNorm, or a norm that knows no batch.

# %% [markdown]
# ### 4.x A curve for each number of ranks
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 6 lines
#
# How many ranks there are should not be seen in a curve.
#
# > The same lines, the same seed, the same learning rate; but each number of ranks has its own curve. The last loss is 3.70 on one rank, 4.00 on two, 3.89 on four. On one rank it also moves with `pieces`: 3.69 for one backward a step, 3.70 for two. It is in the first step already: 5.5052 and 5.5050, and 5.5023 on four ranks.

# %%
def moving_curve(steps=6, lines=24, pieces=2, lr=0.5, group=None):
    """A GPT on the lines of a program, `lines` a step; a rank has its part in `pieces` backwards.

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


# %%
[f"{launch(moving_curve, 1, ranks=ranks)[0]['losses'][0]:.4f}" for ranks in (1, 2, 4)]

# %% [markdown]
# **The cause.** Which one is it? Measure, then put its number.
#
# 1. Means over different numbers of tokens are averaged as if these were equal
# 2. Sums in another order are rounded in another way
# 3. Sums over the ranks are taken where means are due
# 4. What fills up the short lines is counted as tokens

# %%
check(clinic_moving_curve_cause=...)

# %% [markdown]
# Mend it in the cell above.

# %%
moving_curve = check(moving_curve)

# %% [markdown]
# Reported to Hugging Face's transformers in July 2023 for the pieces of gradient accumulation (issue 24725), mended in October 2024 (pull request 34191); and for the ranks by `average_tokens_across_devices` (34373), which is on by default in version 5.
