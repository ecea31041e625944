"""One data-parallel step by Horovod's API on torch.distributed, as lab 05 builds it.

python labs/jobs/torch_step.py            # four ranks on this machine
torchrun --nproc-per-node 4 labs/jobs/torch_step.py
"""

import tiny_step
import torch

import ranklab.horovod as hvd
from ranklab.engine import is_main_process, launch


def step():
    hvd.init()
    mine = slice(hvd.rank(), None, hvd.size())
    x, y = (torch.from_numpy(each[mine]) for each in tiny_step.data())
    w1, w2 = (torch.from_numpy(each).requires_grad_() for each in tiny_step.weights())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w1, w2], lr=tiny_step.LR))

    def loss():
        return torch.nn.functional.cross_entropy(torch.tanh(x @ w1) @ w2, y)

    before = loss()
    before.backward()
    optimizer.step()
    return [hvd.allreduce(each.detach()).item() for each in (before, loss())]  # of all examples


if __name__ == "__main__":
    ranks = launch(step)
    if is_main_process():
        tiny_step.report(f"torch, {len(ranks)} ranks", *ranks[0])
