"""EMA weights beside the model, evaluated on all ranks; two groups that warm up to different rates.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(self.backbone(x))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(net := Net())
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW([{"params": net.backbone.parameters(), "lr": 1e-4},
                               {"params": net.head.parameters(), "lr": 1e-2}])
scheduler = torch.optim.lr_scheduler.LambdaLR(  # the backbone waits, the head starts at once
    optimizer, [lambda step: max(0, step - 5) / 10, lambda step: min(1, (step + 1) / 5)])
held_out = torch.randn(64, 20)[rank::world]
generator = torch.Generator().manual_seed(1 + rank)
for step in range(20):
    x = torch.randn(16, 20, generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
    optimizer.step()
    scheduler.step()
    ema.update_parameters(net)
    if step % 10 == 9:
        with torch.no_grad():
            score = (ema(held_out).argmax(1) == held_out[:, :5].argmax(1)).float().mean() / world
        dist.all_reduce(score)
dist.destroy_process_group()
