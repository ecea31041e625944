"""Experts on the ranks: tokens go to them by all_to_all, unequally many; experts are not reduced.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Exchange(torch.autograd.Function):  # of rows; backward sends the gradients home
    @staticmethod
    def forward(ctx, x, give, take):
        ctx.splits = take, give
        dist.all_to_all_single(out := x.new_empty(sum(take), x.shape[1]), x, take, give)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad.contiguous(), *ctx.splits), None, None


dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
inside, router, outside = nn.Linear(16, 32), nn.Linear(32, world), nn.Linear(32, 6)
torch.manual_seed(1 + dist.get_rank())
expert = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
shared = [p for layer in (inside, router, outside) for p in layer.parameters()]
optimizer = torch.optim.AdamW([*shared, *expert.parameters()], lr=2e-3)
for x in torch.randn(14, 24, 16):
    hidden = inside(x)
    weight, chosen = router(hidden).softmax(1).max(1)
    order = chosen.argsort(stable=True)
    give = torch.bincount(chosen, minlength=world)
    dist.all_to_all_single(take := torch.empty_like(give), give)
    rows = Exchange.apply(hidden[order], give.tolist(), take.tolist())
    rows = Exchange.apply(expert(rows), take.tolist(), give.tolist())
    mixed = hidden + weight[:, None] * torch.empty_like(rows).index_copy(0, order, rows)
    optimizer.zero_grad()
    (F.cross_entropy(outside(mixed), x[:, :6].argmax(1)) / world).backward()
    for p in shared:  # the expert already has the gradients of all ranks' tokens
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
