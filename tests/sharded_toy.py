"""A small model with all that sharding may stumble over, for the tests of labs 06 and 07."""

import functools

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ranklab import device

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Toy(nn.Module):
    """Tied, of sizes that nothing divides; one block is used twice, another one twice in a row.

    blocks     four; what is no tensor among their results has the hidden state as ["x"]
    """

    def __init__(self, blocks):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 7), nn.LayerNorm(7)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):  # (B, T) -> (B, T, V)
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[3]):
            x = hidden(block, x)
        return self.head(self.norm(hidden(self.blocks[0], x)))


def hidden(block, x):
    found = block(x)
    return found if torch.is_tensor(found) else found["x"]


def tokens(seed):
    return torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(seed)).to(device())


def loss_of(model, seed):
    x = tokens(seed)
    return cross_entropy(model(x).flatten(0, 1), x.flatten())
