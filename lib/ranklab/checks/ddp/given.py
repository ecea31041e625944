"""Torch's DDP around a model whose gradients are known: what the checks of hooks run on."""

import functools
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranklab.engine import device
from ranklab.meter import Traffic

SHAPES = ((12, 10), (8,), (1,), (5, 3, 3), (45,))
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)  # 219: an odd number


class Given(nn.Module):
    """A model whose gradient is the flat tensor that it is given; one parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, gradient):
        parts = gradient.split([p.numel() for p in self.weights])
        return sum((p.flatten() * part).sum() for p, part in zip(self.weights, parts))


@dataclass
class Step:
    """What a rank ended with."""

    gradient: torch.Tensor  # flat, on the CPU
    bytes: int  # of all ranks together, as they would go round a ring
    calls: dict
    buckets: int  # times that DDP called the hook
    waited: bool  # the hook returned only when something was done
    shared: int  # messages that lay in the memory of another one


def gradients_of(rank, step, kind):
    """The gradients of a rank: "normal"; "large" ones, whose sum float16 can't hold; or "uneven":
    rank 0 has larger ones than float16 can hold, and the others have none."""
    if kind == "uneven":
        return torch.full((COUNT,), 0.0 if rank else 100_000.0)
    if kind == "large":
        return torch.full((COUNT,), 40_000.0)
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_of(ranks, step, kind):
    """The right gradients, in one process; `ranks` are those of the group."""
    return sum(gradients_of(rank, step, kind) for rank in ranks) / len(ranks)


def in_ddp(model, group=None):
    """`model` in torch's DDP, which from its second step on has several buckets of Given, two of
    them of one size.
    """
    return DistributedDataParallel(model.to(device()), process_group=group,
                                   bucket_cap_mb=180 / 2**20)


def steps_in_ddp(state, hook, kinds, group=None):
    """[Step of each of `kinds`] of one model in DDP with this hook."""
    model = in_ddp(Given(), group)
    waits, buckets, sent, seen = [], [], [], []
    model.register_comm_hook(state, _watched(hook, waits, buckets, sent))
    for step, kind in enumerate(kinds):
        mine = gradients_of(dist.get_rank(), step, kind).to(device())
        model.zero_grad()
        for noted in (waits, buckets, sent):
            noted.clear()
        with Traffic() as traffic:
            model(mine).backward()
        ops = [op for op in traffic.ops if op.name != "broadcast"]  # DDP's own, in its second step
        gradient = torch.cat([p.grad.flatten() for p in model.module.weights]).cpu()
        calls = Counter(op.name for op in ops)
        shared = len(sent) - len({x.data_ptr() for x in sent})
        seen.append(Step(gradient, sum(op.sent_bytes for op in ops), calls, len(buckets),
                         bool(waits), shared))
    return seen


def _watched(hook, waits, buckets, sent):
    """The hook; `waits` gets an entry where it waits before it returns, for a transfer or a future.
    Other threads may wait: they run what comes after the transfer. `buckets` gets one a call, and
    `sent` keeps each all-reduced tensor alive, so that its memory is not given to another one."""
    all_reduce = dist.all_reduce

    def kept(tensor, *args, **kwargs):
        sent.append(tensor)
        return all_reduce(tensor, *args, **kwargs)

    @functools.wraps(hook)  # DDP reads the signature
    def watched(state, bucket):
        buckets.append(bucket.index())
        with (_noted(dist.Work, waits), _noted(torch._C.Future, waits),
              _replaced(dist, "all_reduce", kept)):
            return hook(state, bucket)

    return watched


@contextmanager
def _noted(kind, waits):
    """Inside, this thread's calls of kind.wait on what is not done are noted in `waits`."""
    wait, thread = kind.wait, get_ident()
    done = dist.Work.is_completed if kind is dist.Work else kind.done

    def noted(self, *args, **kwargs):
        if get_ident() == thread and not done(self):
            waits.append(kind)
        return wait(self, *args, **kwargs)

    with _replaced(kind, "wait", noted):
        yield


@contextmanager
def _replaced(owner, name, value):
    """Inside, owner.name is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
