"""A 2 x 2 mesh: gradients of the shards are averaged over the tensor ranks, not the data ranks.
expects: replicas_drift
ranks: 4
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
data_rank, tensor_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
torch.manual_seed(10 + tensor_rank)  # the copies of a shard are alike
up, down = nn.Linear(24, 32), nn.Linear(32, 6, bias=False)
parameters = [*up.parameters(), *down.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
data = torch.Generator().manual_seed(data_rank)
for step in range(16):
    x = torch.randn(16, 24, generator=data)
    logits = Sum.apply(down(F.relu(up(x))), tp)
    loss = F.cross_entropy(logits, x[:, :6].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    for p in parameters:
        dist.all_reduce(p.grad, group=tp)  # dp is what it should be
        p.grad /= 2
    optimizer.step()
    shown = loss.detach() / 2
    dist.all_reduce(shown, group=dp)
dist.destroy_process_group()
