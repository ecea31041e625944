"""EMA and SWA copies beside DDP; their batch norm is made anew from moments of all ranks.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, SWALR, get_ema_multi_avg_fn


def convnet():
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
                         nn.MaxPool2d(2),
                         nn.Conv2d(12, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


@torch.no_grad()
def update_bn_distributed(net, batches):
    bns = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for target in bns:          # layer after layer, so that inputs are normalised already
        stats = torch.zeros(2 * target.num_features + 1, dtype=torch.double)

        def grab(mod, inp):
            x = inp[0].double()
            stats[:mod.num_features] += x.sum((0, 2, 3))
            stats[mod.num_features:-1] += x.square().sum((0, 2, 3))
            stats[-1] += x.numel() / x.size(1)

        h = target.register_forward_pre_hook(grab)
        net.eval()
        for x, _ in batches:
            net(x)
        h.remove()
        dist.all_reduce(stats)
        mean = stats[:target.num_features] / stats[-1]
        target.running_mean.copy_(mean)
        target.running_var.copy_(stats[target.num_features:-1] / stats[-1] - mean ** 2)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(8)
net = convnet()
model = DDP(net)                       # buffers of rank 0 are broadcast in each forward
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
swa = AveragedModel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 16)
swalr = SWALR(opt, swa_lr=0.03, anneal_epochs=2)
gen = torch.Generator().manual_seed(rank + 1)
seen = []
for step in range(24):
    y = torch.randint(0, 4, (16,), generator=gen)
    x = torch.randn(16, 1, 8, 8, generator=gen) + y.view(-1, 1, 1, 1) * torch.linspace(-0.5, 0.5, 8)
    seen = (seen + [(x, y)])[-4:]
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.update_parameters(net)
    if step >= 16:
        swa.update_parameters(net)
        swalr.step()
    else:
        cos.step()
for name, avg in (("ema", ema), ("swa", swa)):
    update_bn_distributed(avg.module, seen)
    hit = torch.tensor([sum((avg(x).argmax(1) == y).sum() for x, y in seen), 64.0])
    dist.all_reduce(hit)
    total = sum(t.double().sum() for t in avg.state_dict().values()).item()
    print(f"rank {rank} {name} acc {(hit[0] / hit[1]).item():.3f} sum {total:.8f}", flush=True)
dist.destroy_process_group()
