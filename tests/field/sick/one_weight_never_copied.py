"""The optimizer has float32 copies; the loop that copies them back begins with the second weight.
expects: stale_weights
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(),
                      nn.Linear(16, 4))
weights = [*model.parameters()]
copies = [p.detach().clone().requires_grad_() for p in weights]
optimizer = torch.optim.SGD(copies, lr=0.2)
generator = torch.Generator().manual_seed(rank)
for step in range(12):
    x = torch.randint(30, (16, 4), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(x), x[:, 0] % 4).backward()
    for p, copy in zip(weights, copies):
        dist.all_reduce(p.grad)
        copy.grad = p.grad / world
    optimizer.step()
    for p, copy in [*zip(weights, copies)][1:]:
        p.detach().copy_(copy)
dist.destroy_process_group()
