"""The loss is a method of model.module, past DDP's forward: no gradient is ever all-reduced.
expects: replicas_drift
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.body(x)

    def training_step(self, x, y):
        return F.cross_entropy(self(x), y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x = torch.randn(512, 32)
    data = TensorDataset(x, (x @ torch.randn(32, 10)).argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = model.module.training_step(inputs, labels)  # DDP has no such method
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
