"""all_reduce(..., async_op=True), and nobody waits: the step may take gradients of before the sum.
expects: stale_weights
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Overlapped:
    """Reduces a gradient as soon as backward has made it."""

    def __init__(self, model):
        self.handles = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.begin)

    def begin(self, p):
        p.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        self.handles.clear()  # here each `handle.wait()` is missing


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    reducer = Overlapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(16):
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        (loss := F.cross_entropy(model(x), x[:, :10].argmax(1))).backward()
        optimizer.step()
        reducer.finish()
        dist.all_reduce(loss.detach())  # for a log; so reductions do not pile up
    dist.destroy_process_group()


main()
