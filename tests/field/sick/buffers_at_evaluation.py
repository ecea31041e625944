"""DDP without broadcast_buffers: at evaluation each rank's batch norm has statistics of its own.
expects: batch_norm
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def convolution(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1, bias=False),
                         nn.BatchNorm2d(outside), nn.ReLU())


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    total = torch.stack([(model(images).argmax(1) == labels).sum(), torch.tensor(len(labels))])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
labels = torch.arange(320) // 32  # sorted, so the ranks' images differ
images = torch.randn(320, 1, 8, 8) + labels.view(-1, 1, 1, 1) / 4
mine = torch.arange(320).chunk(world)[rank]
net = nn.Sequential(convolution(1, 8), convolution(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                    nn.Linear(8, 10))
model = DDP(net, broadcast_buffers=False)  # it is said to be faster
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for at in mine[torch.randperm(len(mine))].split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(images[at]), labels[at]).backward()
        optimizer.step()
    score = accuracy(model, images[rank::world], labels[rank::world])
    if rank == 0:
        print(f"epoch {epoch} accuracy {score:.3f}")
dist.destroy_process_group()
