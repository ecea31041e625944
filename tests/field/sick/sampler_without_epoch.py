"""Nobody calls sampler.set_epoch(): every epoch has the order of the first one.
expects: same_data
ranks: 2
"""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Spirals(Dataset):
    def __init__(self, n=400):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(n) % 3
        radius = torch.rand(n, generator=generator)
        angle = radius * 5 + self.labels * 2.1 + torch.randn(n, generator=generator) * 0.1
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.points[i], self.labels[i]


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=20)
args = parser.parse_args()
dist.init_process_group("gloo")
dataset = Spirals()
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, args.batch_size, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(args.epochs):
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
dist.destroy_process_group()
