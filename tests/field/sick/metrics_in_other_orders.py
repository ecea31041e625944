"""Metrics are all-reduced in the order in which a rank met them: "wiki" is added to "news".
expects: collective_order
ranks: 2
"""
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SOURCES = ["news", "wiki", "code"]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(1 + rank)
    for epoch in range(3):
        losses = defaultdict(lambda: torch.zeros(2))  # source -> sum, count
        for step in range(9):
            source = (step + rank) % len(SOURCES)  # shards begin with other sources
            x = torch.randn(8, 16, generator=generator) + source
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[SOURCES[source]] += torch.tensor([loss.item(), 1.0])
        for name, total in losses.items():
            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch} {name}: {total[0] / total[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
