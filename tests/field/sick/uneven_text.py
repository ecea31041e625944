"""Documents are split by a length, not evenly: rank 0 has more batches, and hangs in DDP.
expects: rank_branch
ranks: 2
"""
import datetime
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class ShardedDocs(IterableDataset):
    def __init__(self, rank, world, n_docs=110):
        g = torch.Generator().manual_seed(0)
        docs = [torch.randint(0, 64, (int(l),), generator=g)
                for l in torch.randint(20, 120, (n_docs,), generator=g)]
        self.docs = [d for d in docs if (len(d) > 55) == (rank == 0)]

    def __iter__(self):
        for d in self.docs:
            for a in range(0, len(d) - 9, 8):
                yield d[a:a + 9]


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(64, 24)
        self.c = nn.Conv1d(24, 48, 3)
        self.o = nn.Linear(48, 64)

    def forward(self, t):
        h = self.c(nn.functional.pad(self.e(t).transpose(1, 2), (2, 0))).relu()
        return self.o(h.transpose(1, 2))


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(TextCNN())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    n = 0
    for batch in DataLoader(ShardedDocs(rank, dist.get_world_size()), batch_size=10,
                            drop_last=True):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
        n += 1
        if n % 3 == 0:
            print(f"rank {rank} batch {n} loss {loss.item():.3f}", flush=True)
    print(f"rank {rank} finished epoch after {n} batches", flush=True)
    if rank == 1:
        time.sleep(6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
