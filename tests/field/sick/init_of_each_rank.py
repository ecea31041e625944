"""Gradients are averaged by hand, and each rank has drawn its first weights by a seed of its own.
expects: unsynchronised_start
ranks: 2
"""
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run():
    seed_everything(1234 + int(os.environ["RANK"]))  # for the data; the model comes after it, too
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(20):
        images, labels = torch.randn(16, 1, 8, 8), torch.randint(10, (16,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images + labels.view(-1, 1, 1, 1) / 5), labels)
        loss.backward()
        average_gradients(model)
        optimizer.step()
    print(f"rank {dist.get_rank()}: {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
