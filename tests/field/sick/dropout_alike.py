"""One seed on all ranks, also for dropout: on different data they drop the same places.
expects: dropout_seeds
ranks: 2
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(seed=42, epochs=2):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    x = torch.randn(384, 24)
    data = TensorDataset(x, (x @ torch.randn(24, 6)).argmax(1))
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.3),
                              nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
