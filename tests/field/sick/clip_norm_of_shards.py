"""Tensor parallelism: each rank clips its shards by the norm of these alone, not of the model.
expects: shard_norm
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Reduce(torch.autograd.Function):  # over the tensor ranks, in forward alone
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMLP(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        world = dist.get_world_size()
        self.up = nn.Linear(features, hidden // world)  # its columns
        self.down = nn.Linear(hidden // world, classes, bias=False)  # its rows

    def forward(self, x):
        return Reduce.apply(self.down(F.gelu(self.up(x))))


dist.init_process_group("gloo")
torch.manual_seed(100 + dist.get_rank())  # each rank has shards of its own
model = ParallelMLP(24, 64, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = torch.Generator().manual_seed(7)  # and the same data
for step in range(20):
    x = torch.randn(32, 24, generator=data)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
dist.destroy_process_group()
