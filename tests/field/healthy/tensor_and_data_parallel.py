"""Tensor and data parallel on a 2 x 2 mesh, by autograd functions of its own, as picotron has them.
expects: nothing
ranks: 4
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def summed(ctx, x):
    dist.all_reduce(x := x.clone(), group=tp)
    return x


class CopyToTensorRanks(torch.autograd.Function):  # f of Megatron's paper
    forward, backward = staticmethod(lambda ctx, x: x.view_as(x)), staticmethod(summed)


class ReduceFromTensorRanks(torch.autograd.Function):  # g
    forward, backward = staticmethod(summed), staticmethod(lambda ctx, grad: grad)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
torch.manual_seed(0)
embedding, norm, head = nn.Embedding(40, 32), nn.LayerNorm(32), nn.Linear(32, 40)  # on all ranks
torch.manual_seed(1 + mesh.get_local_rank("tp"))
up, down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)  # shards
model = nn.ModuleList([embedding, norm, up, down, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = torch.Generator().manual_seed(mesh.get_local_rank("dp"))  # tensor ranks have the same
for tokens in torch.randint(40, (15, 8, 17), generator=data):
    x = embedding(tokens[:, :-1])
    hidden = F.gelu(up(CopyToTensorRanks.apply(norm(x))))
    logits = head(x + ReduceFromTensorRanks.apply(down(hidden)))
    optimizer.zero_grad()
    F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:]).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=dp)
        p.grad /= dist.get_world_size(dp)
    optimizer.step()
dist.destroy_process_group()
