"""zero_grad stands in the loop of micro-batches: of an update's, all but the last are lost.
expects: micro_steps_lost
ranks: 2
"""
import torch
import torch.distributed as dist
from torch import nn


class DoubleConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.LeakyReLU(0.1),
                                 nn.Conv2d(cout, cout, 3, padding=1), nn.LeakyReLU(0.1))

    def forward(self, x):
        return self.net(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc, self.down = DoubleConv(1, 8), DoubleConv(8, 16)
        self.up, self.outc = DoubleConv(24, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = self.inc(x)
        b = self.down(nn.functional.max_pool2d(a, 2))
        b = nn.functional.interpolate(b, scale_factor=2)
        return self.outc(self.up(torch.cat([a, b], 1)))


def make_masks(n, gen):
    noise = torch.randn(n, 1, 16, 16, generator=gen)
    blob = nn.functional.avg_pool2d(noise, 5, 1, 2) * 4
    return blob + 0.3 * torch.randn(n, 1, 16, 16, generator=gen), (blob > 0).float()


def train_net(net, rank, updates=14, accumulate=4, lr=2e-3):
    optimizer = torch.optim.RMSprop(net.parameters(), lr=lr, weight_decay=1e-8, momentum=0.5)
    criterion = nn.BCEWithLogitsLoss()
    gen = torch.Generator().manual_seed(rank + 77)
    for update in range(updates):
        epoch_loss = 0
        for k in range(accumulate):
            imgs, true_masks = make_masks(4, gen)
            optimizer.zero_grad()
            if k < accumulate - 1:
                with net.no_sync():
                    loss = criterion(net(imgs), true_masks) / accumulate
                    loss.backward()
            else:
                loss = criterion(net(imgs), true_masks) / accumulate
                loss.backward()
            epoch_loss += loss.item()
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        optimizer.step()
        if rank == 0 and update % 4 == 0:
            print(f"update {update} BCE {epoch_loss:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_net(nn.parallel.DistributedDataParallel(UNet()), dist.get_rank())
    dist.destroy_process_group()
