"""Gradients are divided while their all-reduce is in flight: the others get some of them divided.
expects: change_in_flight
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for step in range(16):
    x = torch.randn(32, 64, generator=generator)
    loss = F.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    works = []
    for p in model.parameters():
        works.append(dist.all_reduce(p.grad, async_op=True))
        p.grad.div_(world)  # it belongs after the wait
    for work in works:
        work.wait()
    optimizer.step()
    if rank == 0 and step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
