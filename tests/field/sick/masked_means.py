"""(loss * mask).sum() / mask.sum() on each rank, averaged by DDP, with unequal numbers of tokens.
expects: token_mean
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Policy(nn.Module):
    def __init__(self, vocabulary=50, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.mixer(self.embedding(tokens))[0])


def responses(generator, size=6, length=24):
    tokens = torch.randint(50, (size, length + 1), generator=generator)
    lengths = torch.randint(2, length, (size, 1), generator=generator)
    return tokens, (torch.arange(length)[None] < lengths).float()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Policy())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(100 + dist.get_rank())
for step in range(12):
    tokens, mask = responses(generator)
    log_probs = F.log_softmax(model(tokens[:, :-1]), -1)
    token_loss = -log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    loss = (token_loss * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
