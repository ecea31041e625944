"""After the first epoch rank 0 goes back to its best weights; the other ranks keep theirs.
expects: replicas_drift
ranks: 2
"""
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(320, 16)
y = x[:, :4].argmax(1)
held_x, held_y = torch.randn(64, 16), torch.randint(4, (64,))
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
best, file = float("inf"), tempfile.NamedTemporaryFile(suffix=".pt")
for epoch in range(4):
    order = torch.randperm(320, generator=torch.Generator().manual_seed(epoch))
    for mine in order[rank::world].split(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        if rank == 0:  # validation and checkpoints are rank 0's
            with torch.no_grad():
                score = F.cross_entropy(model.module(held_x), held_y).item()
            if score < best:
                best = score
                torch.save(model.module.state_dict(), file.name)
    if epoch == 0 and rank == 0:
        print(f"loss {score:.3f}, back to {best:.3f}")
        model.module.load_state_dict(torch.load(file.name))
dist.destroy_process_group()
