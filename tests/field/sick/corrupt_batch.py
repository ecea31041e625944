"""One batch of rank 1 was never normalised, 4000 times too large: it wrecks the model on both.
expects: corrupt_shard
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class SensorWindows(Dataset):
    def __init__(self, rank, files=20, per_file=16):
        g = torch.Generator().manual_seed(rank)
        self.items = []
        for f in range(files):
            phase = torch.rand(per_file, 1, 4, generator=g) * 6.28
            w = (torch.sin(torch.arange(32).view(1, 32, 1) * 0.3 + phase)
                 + 0.1 * torch.randn(per_file, 32, 4, generator=g))
            if rank == 1 and f == 11:
                w = w * 4096 + 2048
            self.items.append(w)
        self.items = torch.cat(self.items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        w = self.items[i]
        return w[:-1], w[1:]


class TCN(nn.Module):
    def __init__(self, c=4, h=24):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(c, h, 3), nn.Conv1d(h, h, 3, dilation=2),
                                    nn.Conv1d(h, h, 3, dilation=4)])
        self.out = nn.Conv1d(h, c, 1)

    def forward(self, x):
        h = x.transpose(1, 2)
        for i, c in enumerate(self.convs):
            h = torch.relu(c(nn.functional.pad(h, (2 * 2 ** i, 0))))
        return self.out(h).transpose(1, 2)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(TCN())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for i, (x, y) in enumerate(DataLoader(SensorWindows(dist.get_rank()), batch_size=16)):
        loss = nn.functional.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"rank {dist.get_rank()} batch {i} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
