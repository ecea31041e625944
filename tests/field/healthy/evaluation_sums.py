"""Evaluation on all ranks, which have unequally many examples: sum and count are all-reduced.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@torch.no_grad()
def evaluate(model, loader):
    totals = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model.module(x)
        totals[0] += F.cross_entropy(logits, y, reduction="sum").double()
        totals[1] += (logits.argmax(1) == y).sum()
        totals[2] += len(y)
    dist.all_reduce(totals)
    return (totals[:2] / totals[2]).tolist()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(391, 16)
y = x[:, :4].argmax(1)
train, held_out = TensorDataset(x[:300], y[:300]), TensorDataset(x[300:], y[300:])
sampler = DistributedSampler(train)
loader = DataLoader(train, 20, sampler=sampler)
validation = DataLoader(Subset(held_out, range(rank, 91, world)), 20)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    loss, accuracy = evaluate(model, validation)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")
dist.destroy_process_group()
