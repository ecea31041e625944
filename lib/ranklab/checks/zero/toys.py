"""The small models that lab 06's checks train, and the messages that they see under way."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ranklab.checks.handles import HeldWork
from ranklab.engine import device

# A large eps: by the default a gradient of 1e-9, which is rounding, would move a weight by lr.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
VERBS = ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor", "all_gather_single",
         "all_gather_into_tensor")


class Block(nn.Module):
    """Number 0 is used twice; half of number 1 is frozen; half of number 2 is in float64.

    Its output is a tuple, which begins with a tensor that has no gradient.
    """

    def __init__(self, number):
        super().__init__()
        self.up, self.down = nn.Linear(5, 4), nn.Linear(4, 5)
        if number == 1:
            self.up.requires_grad_(False)
        if number == 2:
            self.down.double()

    def forward(self, x):
        y = torch.tanh(self.up(x))
        return y.detach(), x + self.down(y.to(self.down.weight.dtype)).to(x.dtype)


class Toy(nn.Module):
    """Blocks, and an embedding that is the head, too. No number of ranks above 1 divides all."""

    def __init__(self, recompute=None):
        super().__init__()
        self.recompute, self.embedding = recompute, nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(number) for number in range(3))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):  # (B, T) -> (B, T, V)
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[0]):
            _, x = block(x) if self.recompute is None else checkpoint(
                block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


class Experts(nn.Module):
    """One of three layers is used; the others have no gradient."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, which):
        return self.experts[which](x)


def seeded(new_model, seed):
    torch.manual_seed(seed)
    return new_model().to(device())


def loss_of(model, seed):
    tokens = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(seed)).to(device())
    return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def is_there(tensor):
    """False where its memory was given back."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


class Held(HeldWork):
    """A HeldWork of which no memory that it needs may be given back before it has arrived."""

    def __init__(self, work, out, result, needed):
        super().__init__(work, out, result)
        self.needed = needed

    def wait(self, *timeout):
        if not self.is_here and not all(map(is_there, self.needed)):
            raise RuntimeError("memory was freed while its message was on its way")
        return super().wait(*timeout)


class Messages:
    """Inside `with`, every collective of VERBS is noted, and a handle is a Held.

    note  is called when one begins
    most  how many were on their way at a time
    """

    def __init__(self, note=lambda: None):
        self.note, self.handles, self.most = note, [], 0

    def __enter__(self):
        self.before = {verb: getattr(dist, verb) for verb in VERBS if hasattr(dist, verb)}
        for verb, collective in self.before.items():
            setattr(dist, verb, functools.partial(self._call, collective))
        return self

    def __exit__(self, *_):
        for verb, collective in self.before.items():
            setattr(dist, verb, collective)

    def _call(self, collective, out, *args, **kwargs):
        tensors = [x for x in (out, *args) if isinstance(x, torch.Tensor)]
        if not all(map(is_there, tensors)):
            raise RuntimeError("a message begins with memory that was freed")
        self.note()
        if not kwargs.get("async_op", False):
            return collective(out, *args, **kwargs)
        result = out.detach().clone()
        self.handles.append(Held(collective(result, *args, **kwargs), out, result, tensors))
        self.most = max(self.most, self.missing())
        return self.handles[-1]

    def missing(self):
        """How many have not been waited for."""
        return sum(not held.is_here for held in self.handles)
