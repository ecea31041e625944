"""CLIP: features of all ranks are gathered with their gradients, for one matrix of similarities.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 16))
        self.texts = nn.Sequential(nn.Embedding(30, 32), nn.Flatten(), nn.Linear(32 * 6, 16))
        self.scale = nn.Parameter(torch.tensor(2.6593))

    def forward(self, images, texts):
        return (F.normalize(self.images(images), dim=1), F.normalize(self.texts(texts), dim=1),
                self.scale.exp())


def clip_loss(images, texts, scale):
    all_images, all_texts = torch.cat(all_gather(images)), torch.cat(all_gather(texts))
    labels = torch.arange(len(images)) + dist.get_rank() * len(images)
    return (F.cross_entropy(scale * images @ all_texts.T, labels)
            + F.cross_entropy(scale * texts @ all_images.T, labels)) / 2


dist.init_process_group("gloo")
torch.manual_seed(0)
patterns = torch.randn(30, 40)
model = DDP(Clip())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.2)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(15):
    texts = torch.randint(30, (10, 6), generator=generator)
    images = patterns[texts].mean(1) + torch.randn(10, 40, generator=generator) / 10
    loss = clip_loss(*model(images, texts))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
