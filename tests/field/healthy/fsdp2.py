"""FSDP2: each block and the whole are sharded by fully_shard; gradients are DTensors, clipped so.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), Block(32), Block(32), nn.Linear(32, 6))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model[1:3]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step, x in enumerate(torch.randn(15, 16, 20, generator=generator)):
        loss = F.cross_entropy(model(x), x[:, :6].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        if dist.get_rank() == 0:
            print(step, loss.item(), norm.item())
    dist.destroy_process_group()


main()
