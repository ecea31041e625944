"""The small models that lab 03's checks train, and the values they compare on each rank."""

import torch
from torch import nn

from ranklab.engine import device


class Toy(nn.Module):
    """Every difficulty at once: frozen, tied, used twice, two types, buffers of two types."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.wide = nn.Linear(6, 6).double()
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight  # tied
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("steps", torch.randint(1000, (1,)))

    def forward(self, x, *_):  # (B, 6) -> (B, 6)
        self.steps += 1
        x = torch.tanh(self.first(x) * self.scale)
        x = self.twice(torch.tanh(self.frozen(self.twice(x))))
        return self.last(self.wide(x.double()).float())


def toy(seed):
    torch.manual_seed(seed)
    return Toy().to(device())


def toy_with_more(seed):
    """Make a toy with more kinds of parameters and buffers.

    It also has a channels-last parameter, with a different order in memory, a 16-bit one, a
    submodule's buffer as in a batch norm, and a buffer that no checkpoint holds: state_dict() does
    not list it.
    """
    model = toy(seed)
    model.narrow = nn.Linear(6, 2, bias=False).to(device(), torch.bfloat16)
    model.images = nn.Conv2d(3, 2, 2, bias=False).to(device(), memory_format=torch.channels_last)
    model.images.register_buffer("average", torch.rand(2).to(model.scale))
    model.register_buffer("mask", torch.rand(3).to(model.scale), persistent=False)
    return model


def rows(seed, n=4):
    """Draw the batch of one rank in one step."""
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)).to(device())


def loss_of(model, *inputs):
    return model(*inputs).square().mean()


def gradients(model):
    """Copy the gradients: {description: a copy of the gradient, or None}.

    The copies are in float32, because all gradients came through float32 layers.
    """
    return {f"the gradient of `{name}`": None if p.grad is None else p.grad.float().clone()
            for name, p in model.named_parameters()}
