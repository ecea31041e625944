"""The small models that lab 06's checks train, and the observations during training."""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ranklab.checks.handles import HeldWork
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.zero.units import in_backward

# A large eps: by the default a gradient of 1e-9, which is rounding, would move a weight by lr.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
VERBS = ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor", "all_gather_single",
         "all_gather_into_tensor")


class Block(nn.Module):
    """Half of number 1 is frozen; half of number 2 is in float64.

    Its output is nested, as a reentrant checkpoint's may not be: a tensor without gradient, an
    unused one, and the one that goes on; in blocks of odd number in a dict, and that one first.
    begins  is called when it begins to compute: ("forward", its number), ("backward", ...)
    """

    def __init__(self, number):
        super().__init__()
        self.number, self.up, self.down = number, nn.Linear(5, 4), nn.Linear(4, 5)
        self.begins, self.nests = lambda phase, number: None, True
        if number == 1:
            self.up.requires_grad_(False)
        if number == 2:
            self.down.double()

    def forward(self, x):
        self.begins("forward once more" if in_backward() else "forward", self.number)
        y = self.down(torch.tanh(self.up(x)).to(self.down.weight.dtype)).to(x.dtype)
        if y.requires_grad:
            y.register_hook(lambda _: self.begins("backward", self.number))
        if not self.nests:
            return y.detach(), x + y
        if self.number % 2:
            return {"on": x + y, "beside": (2 * y, y.detach())}
        return y.detach(), [2 * y, x + y]


class Toy(nn.Module):
    """Blocks, and an embedding that is also the head. No number of ranks above 1 divides all.

    order  of the blocks; None: one of the first two, chosen by the first token
    """

    def __init__(self, recompute=None, order=(0, 1, 2, 3)):
        super().__init__()
        self.recompute, self.order, self.embedding = recompute, order, nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(number) for number in range(4))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):  # (B, T) -> (B, T, V)
        x = self.embedding(tokens)
        for number in self.order or [tokens[0, 0] % 2]:
            block = self.blocks[number]
            block.nests = not (self.recompute and x.requires_grad)
            if block.nests:
                outputs = block(x)
                x = outputs["on"] if number % 2 else outputs[1][1]
            else:
                _, x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


def seeded(new_model, seed):
    torch.manual_seed(seed)
    return new_model().to(device())


def tokens_of(seed):
    return torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(seed)).to(device())


def loss_on(model, tokens):
    return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def loss_of(model, seed):
    return loss_on(model, tokens_of(seed))


def is_there(tensor):
    """Return whether the tensor's memory is allocated; False if it was freed."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def storages(tensors):
    """Return the addresses at which the memory of each tensor begins."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def must_be_there(tensors, message):
    if not all(map(is_there, tensors)):
        raise RuntimeError(message)


class Watch(contextlib.ExitStack):
    """Record, inside `with`, the messages of `wrapped`.

    A message's result is there once somebody has waited for it, and no memory that the message
    needs may be freed before.
    most: the largest number in transit at a time
    once: (R-1)/R of the `ranks`
    A subclass returns the observations from of_forward(), of_backward() and of_step().
    """

    message_begins = forward_ends = lambda *_: None
    of_forward = of_backward = of_step = lambda _: {}

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped, self.handles, self.most, self.traffic = wrapped, [], 0, Traffic()
        self.ranks = dist.get_world_size(wrapped.group)
        self.once = 1 - 1 / self.ranks

    def __enter__(self):
        self.enter_context(self.traffic)
        self.enter_context(mock.patch.multiple(dist, **{
            verb: functools.partial(self._call, getattr(dist, verb)) for verb in VERBS}))
        return super().__enter__()

    def _call(self, collective, out, *args, **kwargs):
        group = kwargs.get("group", args[1] if len(args) > 1 else None)
        if group is not self.wrapped.group:
            raise RuntimeError("a message leaves the group")
        tensors = [x for x in (out, *args) if isinstance(x, torch.Tensor)]
        must_be_there(tensors, "a message begins with memory that was freed")
        if any(x.dtype != out.dtype for x in tensors):  # gloo would end the process
            raise RuntimeError(f"a message of {tensors[-1].dtype} arrives in {out.dtype}")
        self.message_begins()
        if not kwargs.get("async_op", False):
            return collective(out, *args, **kwargs)

        def arrives():
            must_be_there(tensors, "memory was freed while its message was on its way")
            tensors.clear()  # from now on it may be

        result = out.detach().clone()
        work = collective(result, *args, **kwargs)
        self.handles.append(HeldWork(work, out, result, arrives))
        self.most = max(self.most, self.missing())
        return self.handles[-1]

    def missing(self):
        """Count the messages that nobody has waited for."""
        return sum(not handle.is_here for handle in self.handles)
