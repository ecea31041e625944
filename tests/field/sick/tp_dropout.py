"""Dropout of what is alike on all tensor ranks has a seed of each: their activations differ.
expects: dropout_seeds
ranks: 2
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class f(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class g(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ColumnParallelLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        ws = dist.get_world_size()
        full = torch.randn(o, i) / math.sqrt(i)
        self.weight = nn.Parameter(full.chunk(ws, 0)[dist.get_rank()].clone())
        self.bias = nn.Parameter(torch.zeros(o // ws))

    def forward(self, x):
        return F.linear(f.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        full = torch.randn(o, i) / math.sqrt(i)
        self.weight = nn.Parameter(full.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return g.apply(F.linear(x, self.weight)) + self.bias


class ParallelMLPBlock(nn.Module):
    def __init__(self, h, p):
        super().__init__()
        self.ln = nn.LayerNorm(h)
        self.up, self.down = ColumnParallelLinear(h, 4 * h), RowParallelLinear(4 * h, h)
        self.hidden_dropout = nn.Dropout(p)

    def forward(self, x):
        return x + self.hidden_dropout(self.down(F.gelu(self.up(self.ln(x)))))


def initialize_megatron():
    dist.init_process_group("gloo")
    torch.manual_seed(1234)


def get_model():
    return nn.Sequential(nn.Linear(10, 24), ParallelMLPBlock(24, 0.2), ParallelMLPBlock(24, 0.2),
                         nn.LayerNorm(24), nn.Linear(24, 6))


def main():
    initialize_megatron()
    model = get_model()
    torch.manual_seed(1234 + 2718 + dist.get_rank())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(77)
    for it in range(20):
        x = torch.randn(32, 10, generator=data)
        y = (x[:, :6] * x[:, 4:10]).argmax(-1)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 5 == 0:
            print(f"tp{dist.get_rank()} it {it} loss {loss.item():.5f}")
    print(f"tp{dist.get_rank()} embedding {model[0].weight.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
