"""Local SGD averages weights every 4 steps, never momentum. In the docs it is so: no name is due.
expects: nothing known
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

EVERY = 4


@torch.no_grad()
def average_weights(model):
    for p in model.parameters():
        dist.all_reduce(p)
        p /= dist.get_world_size()


def main(steps=24):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.95)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randn(16, 20, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            average_weights(model)  # the momenta still point where each rank alone went
    dist.destroy_process_group()


main()
