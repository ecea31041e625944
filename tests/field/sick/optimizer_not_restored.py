"""A resume loads the model and the place in the data, and Adam begins with empty moments.
expects: optimizer_not_restored
ranks: 2
"""
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": step,
                    "optimizer": optimizer.state_dict()}, path)
    dist.barrier()


def train(path, last):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer, first = torch.optim.Adam(model.parameters(), lr=1e-2), 0
    if path.exists():
        state = torch.load(path)
        model.module.load_state_dict(state["model"])
        first = state["step"]  # state["optimizer"] is left there
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + rank)  # a batch of each step
        x = torch.randn(16, 16, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    save(path, model, optimizer, last)


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
for last in (12, 24):  # the second time it resumes
    train(Path(folder[0], "checkpoint.pt"), last)
dist.destroy_process_group()
