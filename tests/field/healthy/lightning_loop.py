"""A loop in Lightning's form, by hand: forward and backward run inside optimizer.step(closure).
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LitClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5))

    def forward(self, batch):  # DDP calls forward, so the step is what forward is
        return self.training_step(batch)

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def fit(module, loader, epochs):
    model, optimizer = DDP(module), module.configure_optimizers()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            def closure():
                optimizer.zero_grad()
                (loss := model(batch)).backward()
                return loss
            optimizer.step(closure)


dist.init_process_group("gloo")
x = torch.randn(320, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x[:, :5].argmax(1))
fit(LitClassifier(), DataLoader(data, 16, sampler=DistributedSampler(data)), epochs=2)
dist.destroy_process_group()
