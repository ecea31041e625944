# %% [markdown]
# Names that the import cell binds for this group: argparse, inspect, re, torch, dist, F, device, digits, GPT, GPTConfig; and check, launch, RankError.

# %% [markdown]
# ## 4. Build it
#
# Five colleagues come to you. Each brings a program and says what it does; nobody knows why. For each: look, name the cause, mend it.
#
# - **Look** with what you have built: launch's report of a hang, `print` on each rank, `Traffic`, `Timeline`, a smaller case. `look` runs a program on four ranks and prints what comes back, or the report.
# - **Name the cause** by its number. A wrong one gets the measurement that speaks against it.
# - **Mend the program** in its own cell. Mended is: the numbers of one process, on any number of ranks and in a group of some; no call that is not needed; and what torch's documentation asks for, also where gloo forgives.

# %%
def look(program, ranks=4, **settings):
    try:
        found = launch(lambda: program(**settings), ranks=ranks, stall=1,
                       preload=["sklearn.datasets"])
        for rank, of_rank in enumerate(found):
            print(f"rank {rank}", {name: x for name, x in of_rank.items() if name != "weights"})
    except RankError as error:
        print(error)

# %% [markdown]
# ### 4.1 It stands still in the first step
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 3 lines
#
# > "With one rank it runs. With more it stands still in the first step, each time. I raised the timeout to an hour: then it stands still for an hour. My colleague got it through once; then the ranks did not agree how many of each digit are read right."

# %%
def train_with_owners(steps=10, images=1437, width=32, seed=0, group=None):
    """Trains a classifier on the first `images` digits, each rank on every R-th of them.

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


# %%
look(train_with_owners)

# %% [markdown]
# Where each rank waits is in the report. What is not there: for whom. The cause:
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
# ### 4.2 Two run, four do not
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 4 lines
#
# > "Two GPUs run, as one replica or as two. Four, as two replicas of two, stand still in the first step. I have counted the calls of each rank in a step, on paper, and for both groups: the numbers are the same on all."

# %%
def train_on_a_grid(steps=8, tensor=2, width=32, seed=0, group=None):
    """Trains a classifier of digits on replicas of `tensor` neighbouring ranks each.

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


# %%
look(train_on_a_grid)

# %% [markdown]
# Draw the four ranks as a square, and an arrow from each to the rank that it waits for. The cause:
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
# ### 4.3 It learns, then it stands still
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 5 lines
#
# > "It learns, and then it stands still, with another number of ranks at another step. With one rank there is no trouble, however long it runs. The scans of last year never did that, and nobody has touched the program since."

# %%
def train_until_good(steps=40, batch=4, good=0.7, seed=0, group=None):
    """Trains a classifier of digits until `good` of the held-out ones are read right.

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


# %%
look(train_until_good)

# %% [markdown]
# Try two ranks, and three. What is the same each time? The cause:
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
# ### 4.4 Accumulating does not help
# > difficulty 2/5 · importance 5/5 · 15 minutes · about 6 lines
#
# > "Our network is slow, so we accumulate: eight micro-batches for each step. The losses are right to the last digit. But an epoch takes as long as with accumulate=1, and the network is busy all the time."

# %%
def train_large_batch(micro_batches=16, accumulate=8, batch=2, length=32, seed=0, group=None):
    """Trains a small GPT on argparse's source, `micro_batches` of `batch` windows on each rank.

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


# %%
look(train_large_batch)

# %% [markdown]
# Nothing is wrong in what comes back. So count what it costs. The cause:
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
# ### 4.5 It is always rank 3
# > difficulty 4/5 · importance 4/5 · 25 minutes · about 4 lines
#
# > "Losses and weights are right. But four GPUs are hardly twice as fast as one: three of them stand still in all_reduce for a good part of each step, and rank 3 never does. We have put another card into its place, twice."

# %%
def train_on_functions(steps=2, batch=32, micro=2, longest=1024, seed=0, group=None):
    """Trains a small GPT on argparse's functions, `batch` in a step, and tries it on the last 24.

    `micro` functions of like length are worked through together, so that little is padded; of each
    the first `longest` bytes. A step's gradient is the mean over the tokens of all ranks. Returns
    the weights, the steps' losses and the held-out loss, which are such means, too; the same on
    every rank.
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


# %%
look(train_on_functions)

# %% [markdown]
# A rank that others wait for does not show in the time of a step: that is the same on all. Look at what each rank does before it meets the others. The cause:
#
# 1. It has more functions than the other ranks.
# 2. It waits for its data.
# 3. Its card, or its core, is slower than the others.
# 4. Its functions are longer than those of the other ranks.
# 5. Its link to the others is slow.

# %%
check(clinic_train_on_functions_cause=...)

# %%
train_on_functions = check(train_on_functions)
