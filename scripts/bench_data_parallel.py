"""OverlappedDataParallel against torch's DDP: the ratio of their step times, for `make bench`."""

import copy
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ranklab.data_parallel import OverlappedDataParallel
from ranklab.engine import device, launch
from ranklab.models.cnn import CNN, CNNConfig
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects.clock import wait_for_all

CAP = 2**18  # bytes: several buckets also in small models
MODELS = {"CNN": lambda: CNN(CNNConfig(in_channels=3, image=32, width=32)),
          "GPT": lambda: GPT(GPTConfig(n_layer=4, n_embd=128))}


def bench(ranks=(2, 4), models=tuple(MODELS), steps=40):
    """Return {(model, ranks): our step time over torch's}, the median of interleaved steps."""
    return {(model, R): launch(_ours_over_torch, model, steps, ranks=R, timeout=300)[0]
            for model in models for R in ranks}


def _ours_over_torch(name, steps):
    torch.manual_seed(dist.get_rank())
    model = MODELS[name]().to(device())
    theirs = copy.deepcopy(model)
    pair = [OverlappedDataParallel(model, CAP), TorchDDP(theirs, bucket_cap_mb=CAP / 2**20)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in pair]
    batch, ratios = _batch(name), []
    for number in range(steps + 5):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):  # what is second finds warmer caches
            seconds[which] = _step(pair[which], optimizers[which], *batch)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[5:])  # the first ones allocate, and torch rebuilds its buckets


def _batch(name):
    if name == "GPT":
        return torch.randint(256, (2, 4, 64), device=device()).unbind()
    return torch.randn(8, 3, 32, 32, device=device()), torch.randint(10, (8,), device=device())


def _step(model, optimizer, x, y):
    """Return the seconds of one step, until the slowest rank is done."""
    wait_for_all()
    start = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    optimizer.step()
    wait_for_all()
    return time.perf_counter() - start


if __name__ == "__main__":
    for (model, R), ratio in bench().items():
        print(f"a step of {model} with OverlappedDataParallel, {R} ranks: {ratio:.2f} of torch "
              "DDP's time (aim: 1.10 or less)")
