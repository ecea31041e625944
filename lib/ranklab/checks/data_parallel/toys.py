"""The small models that lab 03's checks train, and what they look at on each rank."""

import copy

import torch
from torch import nn

from ranklab.checks.trial import is_near
from ranklab.engine import device

HAND_ON = "Hand `group` on to every collective, with group=group."


class Toy(nn.Module):
    """All that goes wrong at once: frozen, tied, used twice, two types, buffers of two types."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.wide = nn.Linear(6, 6).double()
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight  # tied
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("steps", torch.randint(1000, (1,)))

    def forward(self, x):  # (B, 6) -> (B, 6)
        self.steps += 1
        x = torch.tanh(self.first(x) * self.scale)
        x = self.twice(torch.tanh(self.frozen(self.twice(x))))
        return self.last(self.wide(x.double()).float())


class Layers(nn.Module):
    """Linear layers in the given order, equal on all ranks; each is called by `call`.

    events  gets ("layer", its number) when the backward of a layer begins
    """

    def __init__(self, order, events=None, call=lambda layer, x: layer(x)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in set(order))
        self.order, self.call = order, call
        for number, layer in enumerate(self.layers if events is not None else ()):
            layer.register_full_backward_pre_hook(lambda *_, n=number: events.append(("layer", n)))

    def forward(self, x):
        for number in self.order:
            x = torch.tanh(self.call(self.layers[number], x))
        return x


LAYER_BYTES = 4 * (6 * 6 + 6)  # of one of Layers: a bucket


def toy(seed):
    torch.manual_seed(seed)
    return Toy().to(device())


def toy_with_more(seed):
    """Also with a parameter that is channels-last, in another order in memory, and with a buffer
    that no checkpoint holds: state_dict() does not list it.
    """
    model = toy(seed)
    images = torch.rand(2, 3, 2, 2).to(model.scale)
    model.images = nn.Parameter(images.contiguous(memory_format=torch.channels_last))
    model.register_buffer("mask", torch.rand(3).to(model.scale), persistent=False)
    return model


def rows(seed, n=4):
    """The batch of one rank in one step."""
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)).to(device())


def loss_of(model, *inputs):
    return model(*inputs).square().mean()


def mean_gradients(model, batches, ranks=None):
    """{name: the gradient of the summed losses over `ranks`}, in one process; `model` unchanged.

    ranks  as many as batches, if not given
    """
    model = copy.deepcopy(model)
    model.zero_grad()
    for inputs in batches:
        (loss_of(model, *inputs) / (ranks or len(batches))).backward()
    return gradients(model)


def gradients(model):
    """{name: the gradient on the CPU, or None}; in float32, since all came through such layers."""
    return {name: None if p.grad is None else p.grad.detach().cpu().float().clone()
            for name, p in model.named_parameters()}


def weights(model):
    """{name: the parameter's value on the CPU}."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def buffers(model):
    return {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}


def off(got, right):
    """The names of the tensors that are not right; those that should be None are passed over."""
    return [name for name, tensor in right.items()
            if tensor is not None and not is_near(got[name], tensor)]
