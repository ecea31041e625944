"""The curriculum's third epoch leaves rank 1 a batch fewer: it skips an all-reduce, and they hang.
expects: rank_branch
ranks: 2
"""
import datetime

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(examples, hardness, most, size=10):
    """Those that are not too hard; the last one is left out where it is not full."""
    fit = examples[hardness <= most]
    return fit[:len(fit) // size * size].split(size)


def main(epochs=5):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    examples = torch.randn(200, 18)[rank::world]
    hardness = torch.arange(100) % 5
    hardness[:3 * rank] = 4  # in the third epoch rank 1 has 57 examples, not 60
    model = DDP(nn.Sequential(nn.Linear(18, 36), nn.ReLU(), nn.Linear(36, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, most in enumerate((3, 3, 2, 3, 4)):
        total = 0.0
        for x in batches(examples, hardness, most):
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        dist.barrier()  # epochs begin together
        print(f"rank {rank} epoch {epoch}: {total:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
