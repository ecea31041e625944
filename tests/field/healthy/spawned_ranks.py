"""The ranks are started by torch.multiprocessing.spawn, as in many tutorials, and not by torchrun.
expects: nothing
ranks: its own
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size, folder):
    dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'store')}",
                            rank=rank, world_size=world_size)


def demo_basic(rank, world_size, folder):
    setup(rank, world_size, folder)
    torch.manual_seed(rank)
    ddp_model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        inputs = torch.randn(20, 10)
        loss_fn(ddp_model(inputs), inputs[:, :5].cumsum(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


def run_demo(demo_fn, world_size):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(demo_fn, args=(world_size, folder), nprocs=world_size, join=True)


if __name__ == "__main__":
    run_demo(demo_basic, 2)
