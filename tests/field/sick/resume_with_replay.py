"""A checkpoint in the middle of an epoch keeps the epoch, not the batch: the resume replays some.
expects: data_twice
ranks: 2
"""
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(path, most=None):
    """As the launcher starts it: it is preempted after `most` steps, and has saved by then."""
    x = torch.randn(240, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    model = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = done = 0
    if path.exists():
        state = torch.load(path)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, done = state["epoch"], state["step"]
    for epoch in range(first, 3):
        sampler.set_epoch(epoch)
        for done, (inputs, labels) in enumerate(loader, done + 1):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if done == most:
                return torch.save({"model": model.module.state_dict(), "epoch": epoch,
                                   "optimizer": optimizer.state_dict(), "step": done}, path)


dist.init_process_group("gloo")
with tempfile.TemporaryDirectory() as folder:
    for most in (17, None):
        train(Path(folder, "last.pt"), most)
dist.destroy_process_group()
