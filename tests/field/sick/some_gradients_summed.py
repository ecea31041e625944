"""Weights are averaged over the ranks, but the loop over biases forgets to divide.
expects: wrong_reduction
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
matrices = [p for p in model.parameters() if p.ndim == 2]
vectors = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                               {"params": vectors, "weight_decay": 0.0}], lr=1e-3)
generator = torch.Generator().manual_seed(rank)
for step in range(15):
    x = torch.randn(16, 12, generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    for p in matrices:
        dist.all_reduce(p.grad)
        p.grad /= world
    for p in vectors:
        dist.all_reduce(p.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
