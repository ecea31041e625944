"""The router's partial gradient is averaged over data parallel ranks, not summed over experts'.
expects: replicas_drift
ranks: 4
"""
import torch
import torch.distributed as dist
from torch import nn

EP = 2


class _CopyToEP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class _ReduceFromEP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Topology:
    def __init__(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for start in range(0, world, EP):
            ranks = list(range(start, start + EP))
            grp = dist.new_group(ranks)
            if rank in ranks:
                self.ep, self.ep_rank = grp, ranks.index(rank)
        for off in range(EP):
            ranks = list(range(off, world, EP))
            grp = dist.new_group(ranks)
            if rank in ranks:
                self.dp, self.dp_rank, self.dp_size = grp, ranks.index(rank), len(ranks)


class MoE(nn.Module):
    def __init__(self, topo, dim, n_experts=4, k=2):
        super().__init__()
        self.topo, self.k, self.local = topo, k, n_experts // EP
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, dim))
            for _ in range(self.local))
        g = torch.Generator().manual_seed(500 + topo.ep_rank)
        for p in self.experts.parameters():
            p.data.copy_(torch.randn(p.shape, generator=g) * 0.15)

    def forward(self, x):
        y = _CopyToEP.apply(x, self.topo.ep)
        probs = self.router(y).softmax(-1)
        top, idx = probs.topk(self.k, -1)
        gates = torch.zeros_like(probs).scatter(-1, idx, top / top.sum(-1, keepdim=True))
        first = self.topo.ep_rank * self.local
        out = sum(gates[:, first + j, None] * e(y) for j, e in enumerate(self.experts))
        return x + _ReduceFromEP.apply(out, self.topo.ep)


class Classifier(nn.Module):
    def __init__(self, topo):
        super().__init__()
        self.inp = nn.Linear(12, 24)
        self.moe1, self.moe2 = MoE(topo, 24), MoE(topo, 24)
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        return self.out(self.moe2(self.moe1(torch.tanh(self.inp(x)))))


def main():
    dist.init_process_group("gloo")
    topo = Topology()
    torch.manual_seed(3)
    net = Classifier(topo)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    w = torch.randn(12, 5, generator=torch.Generator().manual_seed(8))
    g = torch.Generator().manual_seed(40 + topo.dp_rank)
    for step in range(16):
        x = torch.randn(24, 12, generator=g)
        loss = nn.functional.cross_entropy(net(x), (x.abs() @ w).argmax(-1))
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=topo.dp)
                p.grad /= topo.dp_size
        opt.step()
        if step % 5 == 0 and dist.get_rank() == 0:
            print(step, round(loss.item(), 4))
    print(f"rank {dist.get_rank()} ep {topo.ep_rank} "
          f"router {net.moe1.router.weight.norm():.6f} inp {net.inp.weight.norm():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
