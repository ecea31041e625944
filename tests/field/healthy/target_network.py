"""Q-learning: a target network is called first, never trained, and sometimes gets the weights.
expects: nothing
ranks: 2
"""
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
target, online = copy.deepcopy(network), DDP(network)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1 + dist.get_rank())
for step in range(24):
    state, after = torch.randn(2, 32, 8, generator=generator)
    action = torch.randint(3, (32, 1), generator=generator)
    best = target(after).max(1, keepdim=True).values.detach()
    reward = state.gather(1, action)
    loss = F.mse_loss(online(state).gather(1, action), reward + 0.9 * best)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        target.load_state_dict(network.state_dict())
dist.destroy_process_group()
