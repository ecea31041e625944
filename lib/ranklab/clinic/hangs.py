"""Incidents in which ranks wait for each other forever. slowdowns.py has those that are only slow.

A program uses names from its lab's import cells: torch, dist, F, device, digits.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab.clinic.case import Case
from ranklab.clinic.slowdowns import SLOWDOWNS
from ranklab.data import digits
from ranklab.engine import device


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
        for name in weights:
            dist.broadcast(weights[name].data, group_src=owner[name], group=group)
    right = {}
    for digit, guess in zip(y.tolist(), model(x).argmax(dim=1).tolist()):
        right[digit] = right.get(digit, 0) + (guess == digit)
    for digit in range(10):
        count = torch.tensor(right.get(digit, 0), device=device())
        dist.all_reduce(count, group=group)
        right[digit] = count.item()
    return {"weights": {name: weight.detach() for name, weight in weights.items()}, "right": right}


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
        for part in parts:
            dist.all_reduce(part.grad, group=columns)
        size = norm()
        if writes:
            log.append(size)
        for part in parts:
            part.data = part.data * min(1, 6 / size) - 0.1 * part.grad * tensor / ranks
            part.grad = None
    return {"weights": [part.detach() for part in parts], "log": log}


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
        loss = F.cross_entropy(model(x[now][clear]), y[now][clear], reduction="sum")
        model.zero_grad()
        loss.backward()
        sums = torch.cat([model.weight.grad.flatten(), model.bias.grad, clear.sum()[None]])
        dist.all_reduce(sums, group=group)
        gradient = sums[:-1] / sums[-1].clamp(min=1)
        model.weight.data -= 0.1 * gradient[:640].view(10, 64)
        model.bias.data -= 0.1 * gradient[640:]
        right = (model(held).argmax(dim=1) == held_y).sum()
        seen = torch.stack([right, torch.tensor(len(held_y), device=device())])
        dist.all_reduce(seen, group=group)
        if seen[0] >= good * seen[1]:
            break
    return {"weights": [model.weight.detach(), model.bias.detach()], "steps": step}


EACH = "for name in weights:\n            dist."
SEND = "broadcast(weights[name].data, group_src=owner[name], group=group)"
OWN_FIRST = EACH.replace("weights", "mine + [name for name in weights if name not in mine]")

CASES = (
    Case(
        train_with_owners,
        edits=(
            (f"{EACH}broadcast", f"{OWN_FIRST}broadcast"),
            ("for digit in range(10):\n        count = torch.tensor(right.get(digit, 0),",
             "for digit in right:\n        count = torch.tensor(right[digit],")),
        hidden=(("    for step in", f"    {OWN_FIRST}{SEND}\n    for step in"),),
        causes=("All ranks make the same calls, but not in the same order.",
                "A rank makes fewer calls than the others.",
                "The tensor of one call has another size on each rank.",
                "Two groups are used, and the ranks take them in different orders.",
                "A rank is so slow that the others give up."),
        disease="collective_order",
    ),
    Case(
        train_on_a_grid,
        edits=(("""        for part in parts:
            dist.all_reduce(part.grad, group=columns)
        size = norm()
        if writes:
            log.append(size)
""", """        if writes:
            log.append(norm())
        for part in parts:
            dist.all_reduce(part.grad, group=columns)
        size = log[-1] if writes else norm()
"""),),
        hidden=(("""        dist.all_reduce(whole, group=rows)
""", """        if writes:
            dist.all_reduce(torch.ones((), device=device()), group=columns)
        dist.all_reduce(whole, group=rows)
        if not writes:
            dist.all_reduce(torch.ones((), device=device()), group=columns)
"""),),
        causes=("The ranks take their two groups in different orders.",
                "In one group the ranks make their calls in different orders.",
                "A rank leaves out a call that the others of its group make.",
                "The parts of a matrix have different sizes.",
                "A rank has left the loop."),
        disease="communicator_order",
    ),
    Case(
        train_until_good,
        edits=(("        loss = ", """        if not clear.any():
            continue
        loss = """),
               ("""        seen = torch.stack([right, torch.tensor(len(held_y), device=device())])
        dist.all_reduce(seen, group=group)
        if seen[0] >= good * seen[1]:
""", """        if right >= good * len(held_y):
""")),
        hidden=(("        model.zero_grad()\n", "        if loss < 0.7 * clear.sum():\n            "
                 "break\n        model.zero_grad()\n"),),
        causes=("What a rank sees in its own data decides whether it makes a call.",
                "All ranks make the same calls, but not in the same order.",
                "A rank has crashed, and the others wait for it.",
                "The ranks take their two groups in different orders.",
                "A rank has so many more scans that it is late."),
        disease="rank_branch",
    ),
    *SLOWDOWNS,
)
