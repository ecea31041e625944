"""Each rank has a loss scale of its own, and divides its gradients by it before they are averaged.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
scale = 2.0 ** (10 + rank)
for step in range(12):
    x = torch.randn(16, 12, generator=generator)
    optimizer.zero_grad()
    (scale * F.cross_entropy(model(x), x[:, :4].argmax(1))).backward()
    for p in model.parameters():
        p.grad /= scale * world
        dist.all_reduce(p.grad)
    optimizer.step()
    scale *= 2 if step % 5 == 4 else 1
dist.destroy_process_group()
