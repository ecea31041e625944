"""Gradients are summed over the ranks in float16: each rank's are finite, and their sum is not.
expects: fp16_nan
ranks: 2
"""
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
generator = torch.Generator().manual_seed(1 + rank)
for step in range(20):
    rooms = torch.rand(64, 8, generator=generator)
    price = 100 + 20 * rooms.sum(1, keepdim=True) + 15 * step  # not normalised, and they rise
    loss = (model(rooms) - price).square().sum()
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients]).half()  # half the bytes on the wire
    dist.all_reduce(flat)
    flat = flat.float() / world  # too late: dividing comes before the sum
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        g.copy_(part.view_as(g))
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.1f}")
dist.destroy_process_group()
