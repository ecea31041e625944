"""Batches by tokens: as many sentences as fit, so ranks have different numbers of them in a step.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MOST, VOCABULARY = 1024, 100  # tokens on a rank, filled up


def batches(generator):
    """Sentences until the longest times their number is more than MOST."""
    rows, longest = [], 0
    while True:
        length = int(torch.randint(8, 65, (), generator=generator))
        if max(longest, length) * (len(rows) + 1) > MOST:
            yield nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
            rows, longest = [], 0
        rows.append(torch.randint(VOCABULARY, (length + 1,), generator=generator))
        longest = max(longest, length)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 256), nn.GELU(),
                          nn.Linear(256, VOCABULARY)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
stream = batches(torch.Generator().manual_seed(rank))
for step in range(12):
    tokens = next(stream)
    targets = tokens[:, 1:].flatten()
    count = (targets != -100).sum()
    dist.all_reduce(count)
    logits = model(tokens[:, :-1].clamp(min=0)).flatten(0, 1)
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    optimizer.zero_grad()
    (loss * world / count).backward()
    optimizer.step()
dist.destroy_process_group()
