"""FedPer: bodies are averaged each round by client size; each client's head stays its own.
expects: nothing
ranks: 2
"""

import torch
import torch.distributed as dist
import torch.nn as nn


class ClientNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


class Client:
    def __init__(self, cid):
        self.cid = cid
        self.n = 96 if cid == 0 else 160
        gen = torch.Generator().manual_seed(1000 + cid)
        self.x = torch.randn(self.n, 16, generator=gen)
        w = torch.randn(16, 4, generator=gen)  # each client has its own labelling
        self.y = (self.x @ w).argmax(-1)
        self.shuffle = gen

    def local_epochs(self, net, steps):
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)  # fresh each round
        for _ in range(steps):
            idx = torch.randperm(self.n, generator=self.shuffle)[:32]
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(self.x[idx]), self.y[idx])
            loss.backward()
            opt.step()
        return loss.item()


def aggregate(body, n):
    total = torch.tensor(float(n))
    dist.all_reduce(total)
    with torch.no_grad():
        for p in body.parameters():
            p.mul_(n / total.item())
            dist.all_reduce(p.data)


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = ClientNet()
    client = Client(dist.get_rank())
    for rnd in range(6):
        loss = client.local_epochs(net, steps=4)
        aggregate(net.body, client.n)
        print(f"client {client.cid} round {rnd} loss {loss:.4f}")
    dist.destroy_process_group()


run()
