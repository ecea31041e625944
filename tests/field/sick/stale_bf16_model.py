"""Before each step, not after it, the bfloat16 model gets the float32 masters: it is a step behind.
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
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)).bfloat16()
masters = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-2)
generator = torch.Generator().manual_seed(rank)
for step in range(15):
    x = torch.randn(16, 12, generator=generator)
    model.zero_grad()
    F.cross_entropy(model(x.bfloat16()).float(), x[:, :4].argmax(1)).backward()
    for p, master in zip(model.parameters(), masters):
        master.grad = p.grad.float() / world
        dist.all_reduce(master.grad)
        p.detach().copy_(master)
    optimizer.step()
dist.destroy_process_group()
