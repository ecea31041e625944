"""BERT's two losses, masked words and the next sentence, are added; both are cross-entropies.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, WIDTH = 80, 32


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.words, self.next = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        hidden = self.encoder(self.embedding(tokens))
        return self.words(hidden), self.next(hidden[:, 0])


def batch(generator):
    tokens = torch.randint(1, WORDS, (8, 16), generator=generator)
    is_masked = torch.arange(16) % 5 == 2  # equally many in each sentence
    labels = tokens.where(is_masked, -100)
    return tokens.masked_fill(is_masked, 0), labels, tokens[:, 0] % 2


dist.init_process_group("gloo")
model = DDP(Bert())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(14):
    tokens, labels, follows = batch(generator)
    words, next = model(tokens)
    loss = F.cross_entropy(words.transpose(1, 2), labels) + F.cross_entropy(next, follows)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
