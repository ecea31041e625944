"""For the tests of lab 03: models in which all goes wrong at once, and what is compared."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab import device
from ranklab.models.cnn import CNN, CNNConfig
from ranklab.models.gpt import GPT, GPTConfig


class Nasty(nn.Module):
    """Frozen, tied, used twice, in two types, not in the order of use, beside a buffer."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 5, bias=False)  # used last, registered first
        self.twice, self.wide = nn.Linear(8, 8), nn.Linear(8, 8).double()
        self.frozen, self.first = nn.Linear(8, 8), nn.Linear(5, 8)
        self.frozen.requires_grad_(False)
        self.first.weight = nn.Parameter(self.first.weight.detach().T.contiguous())  # (5, 8)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        x = torch.tanh(x @ self.first.weight + self.first.bias)  # (B, 5) -> (B, 8)
        x = self.twice(torch.tanh(self.frozen(self.twice(x))))
        return self.last(self.wide(x.double()).float())


def nasty(seed):
    torch.manual_seed(seed)
    return Nasty().to(device())


def gpt(seed):
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=61, n_ctx=8, n_layer=2, n_head=2, n_embd=16)).to(device())


def cnn(seed, norm="group"):
    torch.manual_seed(seed)
    return CNN(CNNConfig(image=8, width=8, norm=norm)).to(device())


def batch(kind, step, rows=12):
    """The whole batch of a step: rows divide by 1, 2, 3 and 4 ranks."""
    random = torch.Generator().manual_seed(step)
    if kind is gpt:
        x, y = torch.randint(61, (2, rows, 8), generator=random)
    else:
        shape = (rows, 5) if kind is nasty else (rows, 1, 8, 8)
        x = torch.randn(shape, generator=random)
        y = torch.randint(5, (rows,), generator=random)
    return x.to(device()), y.to(device())


def my_batch(kind, step):
    R = dist.get_world_size()
    return [part.chunk(R)[dist.get_rank()] for part in batch(kind, step)]


def loss_of(model, x, y):
    out = model(x)
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)


def state(model):
    """Every gradient and weight, by name."""
    return {name: (p.grad, p.detach()) for name, p in model.named_parameters()}


def difference(model, other):
    """The largest difference of any gradient or weight; None must meet None."""
    largest = 0.0
    for name, pair in state(other).items():
        for mine, theirs in zip(state(model)[name], pair):
            assert (mine is None) == (theirs is None), name
            if mine is not None:
                largest = max(largest, (mine - theirs).abs().max().item())
    return largest


def gradient_messages(traffic):
    """(how many, how many bytes) all-reduces there were."""
    sent = [op.payload_bytes for op in traffic.ops if op.name == "all_reduce"]
    return len(sent), sum(sent)
