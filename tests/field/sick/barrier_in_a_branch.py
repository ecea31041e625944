"""The barrier after saving stands inside `if rank == 0`: the other ranks never come to it.
expects: rank_branch
ranks: 2
"""
import datetime
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def is_main_process():
    return dist.get_rank() == 0


def train_one_epoch(model, optimizer, generator):
    for _ in range(8):
        x = torch.randn(16, 14, generator=generator)
        loss = F.cross_entropy(model(x), x[:, :7].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
model = DDP(nn.Sequential(nn.Linear(14, 28), nn.ReLU(), nn.Linear(28, 7)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
generator = torch.Generator().manual_seed(dist.get_rank())
with tempfile.TemporaryDirectory() as folder:
    for epoch in range(3):
        loss = train_one_epoch(model, optimizer, generator)
        if is_main_process():
            print(f"epoch {epoch}: {loss:.3f}")
            torch.save(model.module.state_dict(), Path(folder, f"{epoch}.pt"))
            dist.barrier()  # so that nobody reads a half of it
dist.destroy_process_group()
