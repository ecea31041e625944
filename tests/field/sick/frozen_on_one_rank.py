"""Rank 1 did not get the option --freeze: its stem moves, and that of rank 0 stays.
expects: replicas_drift
ranks: 2
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(20, 40), nn.ReLU())
        self.head = nn.Linear(40, 5)

    def forward(self, x):
        return self.head(self.stem(x))


def parameters_to_train(model, is_frozen):
    return [p for name, p in model.named_parameters() if not (is_frozen and "stem" in name)]


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    os.environ["FREEZE_STEM"] = "1"  # a launch script that exports it on the first node only
torch.manual_seed(0)
model = DDP(Tuned())
is_frozen = os.environ.get("FREEZE_STEM") == "1"
optimizer = torch.optim.AdamW(parameters_to_train(model, is_frozen), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
for step in range(20):
    x = torch.randn(16, 20, generator=generator)
    loss = F.cross_entropy(model(x), x[:, :5].argmax(1))
    model.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
