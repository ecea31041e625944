"""Gradient checkpointing: forward runs again in backward, dropout too, with the same masks.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(16, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList([Block(32) for _ in range(3)])

    def forward(self, x):
        x = self.inside(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outside(x)


dist.init_process_group("gloo")
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())  # from here on ranks draw different masks and data
for step in range(12):
    x = torch.randn(24, 16)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
dist.destroy_process_group()
