"""The loss is not divided by the number of micro-steps: a step is twice as long as a mean's.
expects: micro_steps_summed
ranks: 2
"""
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # tuned without accumulation
generator = torch.Generator().manual_seed(dist.get_rank())
accumulation = 2
for i in range(30):
    x = torch.randn(12, 20, generator=generator)
    is_boundary = (i + 1) % accumulation == 0
    with contextlib.nullcontext() if is_boundary else model.no_sync():
        loss = F.cross_entropy(model(x), x[:, :6].argmax(1))  # / accumulation
        loss.backward()
    if is_boundary:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
