"""Two heads take turns, and DDP does not know of find_unused_parameters: it dies in step 1.
expects: unused_parameters
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 40), nn.ReLU())
        self.captions, self.boxes = nn.Linear(40, 9), nn.Linear(40, 4)

    def forward(self, x, task):
        hidden = self.trunk(x)
        if task == "captions":
            return self.captions(hidden)
        return self.boxes(hidden)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(TwoHeads())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10):
    x = torch.randn(8, 20)
    if step % 2 == 0:
        loss = F.cross_entropy(model(x, "captions"), x[:, :9].argmax(1))
    else:
        loss = F.smooth_l1_loss(model(x, "boxes"), x[:, :4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
