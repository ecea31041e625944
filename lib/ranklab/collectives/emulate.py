"""Slow links on one machine: a sender sleeps for as long as its message would take.

This is an emulation, not a simulation: real ranks send real tensors, and sleeping ranks do overlap,
even on two cores. Only the waiting is artificial. The ranks of a node share its one link to other
nodes, so a sender holds the node's lock while it sleeps.
"""

import time
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ranklab.meter.ops import read_ops


class EmulatedLinks(TorchDispatchMode):
    """Make each message of this rank take at least alpha + n * beta seconds inside the block.

    A collective takes as long as its ring (meter/costs.py) over the link to the next rank of its
    group; the op itself then waits for the slowest rank. An asynchronous op sleeps when it is
    called. `fast` is the Link inside a node of `per_node` ranks, `slow` the Link between nodes;
    `folder` is a folder that all ranks of this machine can access, for the nodes' locks.
    """

    def __init__(self, fast, slow, per_node, folder):
        super().__init__()
        self.fast, self.slow, self.per_node = fast, slow, per_node
        self.rank = dist.get_rank()
        self.lock_file = f"{folder}/node{self.rank // per_node}.lock"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for op in read_ops(func, args, kwargs or {}):
            if op.messages:
                self._wait(op)
        return func(*args, **(kwargs or {}))

    def _wait(self, op):
        to = op.peer
        if to is None:
            to = op.group[(op.group.index(self.rank) + 1) % len(op.group)]
        is_near = to // self.per_node == self.rank // self.per_node
        link = self.fast if is_near else self.slow
        with nullcontext() if is_near else _locked(self.lock_file):
            time.sleep(op.messages * link.alpha + op.sent_bytes * link.beta)


@contextmanager
def _locked(path):
    import fcntl  # missing on Windows, where launch itself reports that

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
