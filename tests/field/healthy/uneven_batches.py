"""Ranks have different numbers of batches; join() answers for those that are done.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def main(epochs=2):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(12, 16, generator=generator) for _ in range(8 + 3 * rank)]
    for epoch in range(epochs):
        with Join([model]):
            for x in batches:
                loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        # A rank that was done has not stepped; join gave it the weights of the last one.
        print(f"rank {rank} epoch {epoch}: {len(batches)} batches, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
