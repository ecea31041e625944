"""The condition of no_sync() is the wrong way round: the last micro-step is never reduced.
expects: replicas_drift
ranks: 2
"""
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(rank, count, size=8):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        x = torch.randn(size, 20, generator=generator)
        yield x, x.sum(1).gt(0).long()


def main(steps=15, micro_steps=3):
    dist.init_process_group("gloo")
    model = DDP(nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stream = batches(dist.get_rank(), steps * micro_steps)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            is_last = micro == micro_steps - 1
            with model.no_sync() if is_last else contextlib.nullcontext():
                x, y = next(stream)
                (F.cross_entropy(model(x), y) / micro_steps).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
