"""The rate grows with the ranks, and the batch does not: it is split. One run cannot show that.
expects: nothing known
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, RATE = 32, 0.05  # of all ranks together; the rate that was tuned for it

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(512, 20)
data = TensorDataset(x, x[:, :5].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE * world)  # the linear rule, for no reason
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
dist.destroy_process_group()
