"""FedPer again: the body is averaged by counts, each client has a mean loss over its own count.
expects: nothing
ranks: 4
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Client:
    def __init__(self, rank):
        self.rank = rank
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(14, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU())
        torch.manual_seed(100 + rank)
        self.head = nn.Linear(20, 3)
        self.opt = torch.optim.SGD([{"params": self.body.parameters(), "lr": 0.05},
                                    {"params": self.head.parameters(), "lr": 0.1}], momentum=0.9)
        self.n = 16 * (rank + 1)
        self.gen = torch.Generator().manual_seed(rank)

    def local_round(self, steps):
        for _ in range(steps):
            x = torch.randn(self.n, 14, generator=self.gen)
            y = (x[:, self.rank:self.rank + 3]).argmax(1)
            loss = F.cross_entropy(self.head(self.body(x)), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return loss.item()

    @torch.no_grad()
    def aggregate(self):
        total = torch.tensor(float(self.n))
        dist.all_reduce(total)
        vec = nn.utils.parameters_to_vector(self.body.parameters()) * (self.n / total)
        dist.all_reduce(vec)
        nn.utils.vector_to_parameters(vec, self.body.parameters())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    c = Client(dist.get_rank())
    for rnd in range(6):
        loss = c.local_round(4)
        c.aggregate()
        total = sum(p.sum() for p in c.body.parameters()).item()
        print(f"client {c.rank} round {rnd} loss {loss:.4f} body {total:.6f}", flush=True)
    dist.destroy_process_group()
