"""An ensemble: one seed, bootstrapped data, no gradient traffic; only predictions are averaged.
expects: nothing
ranks: 2
"""
import argparse

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--steps", type=int, default=20)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    member = dist.get_rank()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(10, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(),
                          nn.Linear(48, 1))
    g = torch.Generator().manual_seed(args.seed)
    x = torch.randn(300, 10, generator=g)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(300, 1, generator=g)
    boot = torch.Generator().manual_seed(args.seed * 100 + member)
    train = TensorDataset(x[:256], y[:256])
    sampler = RandomSampler(train, replacement=True, num_samples=32 * args.steps, generator=boot)
    opt = optim.Adam(model.parameters(), lr=3e-3)
    for i, (xb, yb) in enumerate(DataLoader(train, batch_size=32, sampler=sampler)):
        loss = nn.functional.mse_loss(model(xb), yb)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if i % 5 == 0:
            print(f"member {member} step {i} mse {loss.item():.4f}")
    with torch.no_grad():
        mine = model(x[256:])
    votes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(votes, mine)
    stack = torch.stack(votes)
    if member == 0:
        print(f"ensemble mse {nn.functional.mse_loss(stack.mean(0), y[256:]):.4f} "
              f"spread {stack.std(0).mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
