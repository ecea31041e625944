"""FSDP2's gradient sync is off for accumulation and, by an off-by-one, never on again.
expects: no_gradient
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(FeedForward(32, 64) for _ in range(3))
        self.out = nn.Linear(32, 64, bias=False)

    def forward(self, t):
        h = self.tok(t)
        for l in self.layers:
            h = l(h)
        return self.out(h)


def train():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Net()
    for l in model.layers:
        fully_shard(l, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=False)
    g = torch.Generator().manual_seed(17 + rank)
    accum = 3
    for step in range(12):
        total = torch.zeros(())
        for micro in range(accum):
            model.set_requires_gradient_sync(micro == accum)
            tokens = torch.randint(0, 64, (4, 17), generator=g)
            tokens[:, 1:] = (tokens[:, :1] + torch.arange(1, 17)) % 64
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / accum
            loss.backward()
            total += loss.detach()
        optim.step()
        optim.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step: {step:2d}  loss: {total.item() / world:7.4f}")


train()
dist.destroy_process_group()
