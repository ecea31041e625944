"""Each rank decides by its own validation loss whether to stop early: one leaves before the others.
expects: rank_branch
ranks: 2
"""
import datetime

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def is_over(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad > self.patience


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
rank = dist.get_rank()
generator = torch.Generator().manual_seed(rank)
x, held_out = (torch.randn(n, 12, generator=generator) for n in (160, 40))
held_y = held_out[:, :3].argmax(1)
if rank == 1:  # its part of the validation set has other labels, so its loss grows
    held_y = 2 - held_y
model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
stopping = EarlyStopping(patience=2)
for epoch in range(8):
    for batch in x.split(20):
        optimizer.zero_grad()
        F.cross_entropy(model(batch), batch[:, :3].argmax(1)).backward()
        optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(model.module(held_out), held_y).item()
    if stopping.is_over(loss):
        print(f"rank {rank} stops after epoch {epoch}")
        break
