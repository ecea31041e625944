"""Norms of each rank's gradient, and of their mean, are reduced for a log: the noise scale.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def norm_of_gradient(model):
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm()


def main(batch=16):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(20):
        x = torch.randn(batch, 20, generator=generator)
        with model.no_sync():  # so that each rank sees its own gradient first
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        largest = norm_of_gradient(model)
        small = largest.square() / world
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(small)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        big = norm_of_gradient(model).square()
        noise = (small - big) / (1 / batch - 1 / (batch * world))
        signal = (world * batch * big - batch * small) / (world * batch - batch)
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: largest norm {largest.item():.3f}, noise scale "
                  f"{(noise / signal).item():.1f}")
    dist.destroy_process_group()


main()
