"""One script for Horovod and for ranklab.horovod: python horovod_script.py MODULE FOLDER.

Rank r writes what it saw to FOLDER/r.json. Nothing below knows which of the two it runs on.
"""

import importlib
import json
import sys

import torch
from torch import nn


def verbs(hvd):
    rank = hvd.rank()
    x = torch.tensor([1.5, -2.0, 3.25]) * (rank + 1)
    handle = hvd.allreduce_async(x, name="async")
    seen = {
        "average": hvd.allreduce(x), "sum": hvd.allreduce(x, op=hvd.Sum),
        "min": hvd.allreduce(x, op=hvd.Min), "max": hvd.allreduce(x, op=hvd.Max),
        "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        "whole": hvd.allreduce(torch.tensor([3, 4, -5 + rank, 7 - rank])),
        "fp16": hvd.allreduce(x / 3, compression=hvd.Compression.fp16),
        "async": hvd.synchronize(handle),
        "rows": hvd.allgather(torch.arange(2 * (rank + 1)).view(-1, 2)),
        "broadcast": hvd.broadcast(x, hvd.size() - 1),
        "grouped": torch.cat(hvd.grouped_allreduce([x, x[:2]], name="g", op=hvd.Sum)),
        "in place": hvd.allreduce_(x.clone(), name="p"),
    }
    seen = {name: value.tolist() for name, value in seen.items()}
    seen["object"] = hvd.broadcast_object({"from": rank}, root_rank=0)
    seen["place"] = [rank, hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()]
    return seen


def train(hvd, **how):
    """(losses, sum of all weights) of a small net on fixed data."""
    torch.manual_seed(hvd.rank())
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 + hvd.rank(), momentum=0.9)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **how)
    draw = torch.Generator().manual_seed(100 + hvd.rank())
    x, y = torch.randn(32, 8, generator=draw), torch.randint(2, (32,), generator=draw)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        for _ in range(how.get("backward_passes_per_step", 1)):
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses, sum(p.sum().item() for p in net.parameters())


def wrong(hvd):
    try:
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="w")
    except RuntimeError as error:
        return type(error).__name__ in ("HorovodInternalError", "Mismatch")
    return False


def steps_after_broadcast(hvd):
    """How many steps a fresh Adam counts after its state was broadcast."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return [state["step"].item() for state in optimizer.state.values()]


def adasums(hvd):
    """A dot product's sum depends on the order, so a little may differ."""
    draw = torch.Generator().manual_seed(hvd.rank())
    tensors = [torch.randn(n, generator=draw) for n in (1, 7, 1000)]
    fused = hvd.grouped_allreduce(tensors, name="f", op=hvd.Adasum)
    return [hvd.allreduce(t, op=hvd.Adasum).tolist() for t in tensors], [t.tolist() for t in fused]


def main(module, folder, what="all"):
    hvd = importlib.import_module(module)
    hvd.init()
    seen = {"adasum": adasums(hvd)} if what == "adasum" else {
        "verbs": verbs(hvd), "plain": train(hvd),
        "fp16": train(hvd, compression=hvd.Compression.fp16),
        "twice": train(hvd, backward_passes_per_step=2),
        "predivided": train(hvd, gradient_predivide_factor=2.0),
        "wrong": wrong(hvd), "adam's steps": steps_after_broadcast(hvd)}
    with open(f"{folder}/{hvd.rank()}.json", "w") as file:
        json.dump(seen, file)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
