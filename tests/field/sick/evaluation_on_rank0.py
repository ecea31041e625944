"""Rank 0 evaluates alone, by a function that all-reduces: the others are in the next step by then.
expects: rank_branch
ranks: 2
"""
import datetime

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    correct = (model(x).argmax(1) == y).sum().float()
    dist.all_reduce(correct)
    model.train()
    return correct.item() / len(y) / dist.get_world_size()


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        x = torch.randn(16, 16)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
        if step % 5 == 4 and rank == 0:
            held_out = torch.randn(100, 16)
            print(f"step {step}: {evaluate(model.module, held_out, held_out[:, :4].argmax(1))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
