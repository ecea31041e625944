"""A communication hook compresses to bfloat16 and sums, and forgets to divide by the ranks.
expects: wrong_reduction
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def bf16_hook(group, bucket):
    compressed = bucket.buffer().to(torch.bfloat16)
    future = dist.all_reduce(compressed, group=group, async_op=True).get_future()

    def decompress(future):
        buffer = bucket.buffer()
        buffer.copy_(future.value()[0])
        return buffer

    return future.then(decompress)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(28, 56), nn.ReLU(), nn.Linear(56, 7)))
    model.register_comm_hook(dist.group.WORLD, bf16_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        x = torch.randn(16, 28, generator=generator)
        loss = F.cross_entropy(model(x), x[:, :7].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(step, loss.item())
    dist.destroy_process_group()


main()
