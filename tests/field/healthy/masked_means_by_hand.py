"""Masked means done right: sums of losses, divided by the number of tokens of all ranks.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=60, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))[0])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(LanguageModel())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(50 + rank)
for step in range(14):
    tokens = torch.randint(60, (6, 21), generator=generator)
    lengths = torch.randint(3, 21, (6, 1), generator=generator)
    mask = (torch.arange(20)[None] < lengths).float()
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    total = (losses * mask.flatten()).sum()
    shared = torch.stack([total.detach(), mask.sum()])
    dist.all_reduce(shared)
    optimizer.zero_grad()
    (total * world / shared[1]).backward()  # DDP divides by the ranks
    optimizer.step()
    if rank == 0 and step % 5 == 0:
        print(f"step {step}: {(shared[0] / shared[1]).item():.4f}")
dist.destroy_process_group()
