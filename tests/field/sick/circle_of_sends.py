"""Gossip on a ring: every rank sends to the next one before it receives, and nobody receives.
expects: message_circle
ranks: 4
"""
import datetime

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)


def mix_with_neighbour():
    """The mean of these weights and those of the rank before."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    theirs = torch.empty_like(mine)
    dist.send(mine, (rank + 1) % world)  # it returns when the other side receives
    dist.recv(theirs, (rank - 1) % world)
    nn.utils.vector_to_parameters((mine + theirs) / 2, model.parameters())


for step in range(10):
    x = torch.randn(16, 64, generator=generator)
    loss = F.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mix_with_neighbour()
dist.destroy_process_group()
