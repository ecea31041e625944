"""Batch norm over all ranks by hand (torch's own needs a GPU): forward and backward all-reduce.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP


class SyncBatchNorm1d(nn.BatchNorm1d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        sums = all_reduce(torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))]))
        total, squares, count = sums[:-1].chunk(2) + (sums[-1],)
        mean, var = total / count, squares / count - (total / count).square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(320, 12) + torch.arange(320).view(-1, 1) / 100
y = x[:, :3].argmax(1)
held_out = x[rank::world][:40] + 0.01
mine = torch.arange(320).chunk(world)[rank]  # the ranks' statistics would differ
model = DDP(nn.Sequential(nn.Linear(12, 24), SyncBatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for at in mine[torch.randperm(len(mine))].split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        optimizer.step()
    with torch.no_grad():
        model.eval()
        model.module(held_out)
        model.train()
dist.destroy_process_group()
