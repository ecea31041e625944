"""zero_grad() stands inside the loop of micro-steps: a step is made of the last one alone.
expects: micro_steps_lost
ranks: 2
"""
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATION = 3

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(360, 30)
data = TensorDataset(x, (x @ torch.randn(30, 5)).argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=10, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (inputs, targets) in enumerate(loader):
        is_last = (i + 1) % ACCUMULATION == 0
        optimizer.zero_grad()  # moved here from after the step
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = criterion(model(inputs), targets) / ACCUMULATION
            loss.backward()
        if is_last:
            optimizer.step()
dist.destroy_process_group()
