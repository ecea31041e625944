"""Four recorded situations: real runs of torch's DDP, one healthy and three slow.

    healthy              images are ready, the link is fast, all ranks have the same work
    loader-bound         images arrive one by one from an emulated file server
    communication-bound  gradients go through an emulated slow link
    straggler            the last rank's batch is three times as large

The device is emulated as well, on the CPU even if there are GPUs: each layer really computes, and
then sleeps as long as a large layer would take. So ranks don't compete for the cores of this
machine, and a trace shows only the cause that was built in.
"""

import time
from contextlib import closing

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ranklab.ddp.slow_link import SlowLink
from ranklab.engine import launch
from ranklab.meter import Timeline, mark

SITUATIONS = ("healthy", "loader-bound", "communication-bound", "straggler")
SIDE, LAYERS, BATCH, WARM_UP = 12, 4, 8, 2
COMPUTE = 4e-4  # seconds of a layer's forward for one image; backward takes twice that
FETCH = 1e-2  # seconds until the file server has sent an image
BANDWIDTH = 3e6  # bytes/s of the slow link; a step has 0.34 MB of gradients
MORE_WORK = 3  # times: the straggler's batch


class Photos(Dataset):
    """Small grey images; the file server sends each in `fetch` seconds."""

    def __init__(self, n, fetch):
        self.pixels = torch.rand(n, SIDE * SIDE, generator=torch.Generator().manual_seed(0))
        self.fetch = fetch

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        time.sleep(self.fetch)
        return self.pixels[i]


class LargeLayer(nn.Linear):
    """A linear layer that sleeps COMPUTE seconds an image in forward, and twice that in backward.
    """

    def forward(self, x):
        return _Sleep.apply(super().forward(x), COMPUTE * len(x)).relu()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        with mark("compute"):
            time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        with mark("compute"):
            time.sleep(2 * ctx.seconds)
        return gradient, None


def record(names=SITUATIONS, ranks=2, steps=5):
    """Record a training run in each of these situations, all in one launch.

    Returns: {situation: [Timeline of rank 0, of rank 1, ...]}.
    Raises: ValueError for a name that is not in SITUATIONS.
    """
    if unknown := [name for name in names if name not in SITUATIONS]:
        raise ValueError(f"situation {unknown[0]!r} is not one of {', '.join(SITUATIONS)}")
    results = launch(_record, names, steps, ranks=ranks, timeout=60)
    return {name: [timelines[name] for timelines in results] for name in names}


def _record(names, steps):
    group = dist.new_group(backend="gloo")  # NCCL, if it is the default, does not support the CPU
    return {name: run(name, steps, group) for name in names}


def run(situation, steps, group=None):
    """Do `steps` training steps in this situation; return the Timeline of this rank.

    Collective: call it on every rank.
    group: a gloo group
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    is_straggler = situation == "straggler" and rank == R - 1
    batch = BATCH * (MORE_WORK if is_straggler else 1)
    photos = Photos(batch, FETCH if situation == "loader-bound" else 0)
    torch.manual_seed(0)
    width = SIDE * SIDE
    layers = [LargeLayer(width, width) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.07)  # a layer each
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with closing(SlowLink(BANDWIDTH, group)) as link:
        if situation == "communication-bound":
            model.register_comm_hook(link, SlowLink.hook)
        _train(model, optimizer, photos, WARM_UP)  # buckets are rebuilt, connections opened
        dist.barrier(group)
        with Timeline() as timeline:
            _train(model, optimizer, photos, steps)
    return timeline


def _train(model, optimizer, photos, steps):
    indices = list(range(len(photos)))
    for images in DataLoader(photos, len(photos), sampler=indices * steps):
        targets = torch.zeros(len(images), dtype=torch.long)
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
