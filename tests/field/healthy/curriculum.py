"""A curriculum: lengths grow, and each rank has its shard in an order of its own.
expects: nothing
ranks: 2
"""
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Reader(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding, self.head = nn.Embedding(60, width), nn.Linear(width, 2)
        self.layer = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))[1][0])


def shard(rank, world, n=320):
    """(tokens, label) by length and noise: no two ranks agree on what is hard."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(60, (4 + i % 12,), generator=generator) for i in range(n)]
    texts = [(text, int(text[0] > text[-1])) for text in texts[rank::world]]
    noise = random.Random(rank)
    return sorted(texts, key=lambda pair: len(pair[0]) + noise.random() * 3)


dist.init_process_group("gloo")
model = DDP(Reader())
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
pairs = shard(dist.get_rank(), dist.get_world_size())
for epoch in range(2):
    for i in range(0, len(pairs), 16):
        texts, labels = zip(*pairs[i:i + 16])
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        loss = F.cross_entropy(model(tokens), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
