"""The best model of a first phase is loaded and gets a new head, with SGD in the place of AdamW.
expects: nothing
ranks: 2
"""
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, optimizer, classes, steps=10):
    ddp, generator = DDP(model), torch.Generator().manual_seed(classes + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(16, 12, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), x[:, :classes].argmax(1)).backward()
        optimizer.step()


dist.init_process_group("gloo")
folder = [mkdtemp()]
dist.broadcast_object_list(folder)
path = Path(folder[0], "best.pt")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train(model, optimizer, classes=6)
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
dist.barrier()
model.load_state_dict(torch.load(path)["model"])
model[2] = nn.Linear(24, 3)
train(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), classes=3)
dist.destroy_process_group()
