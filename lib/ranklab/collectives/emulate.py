"""Slow links on one machine: senders that sleep as long as the message would take.

An emulation, not a simulation: real ranks send real tensors, and sleeping ranks do overlap, also
on two cores. Only the waiting is invented. The ranks of a node share its one link to the outside,
so a sender holds the node's lock while it sleeps.
"""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class EmulatedLinks(TorchDispatchMode):
    """Inside the block every send of this rank takes at least alpha + n * beta seconds of its link.

    `fast` is the Link inside a node of `per_node` ranks, `slow` the one between nodes; `folder`
    is a folder that all ranks of this machine see, for the nodes' locks.
    """

    def __init__(self, fast, slow, per_node, folder):
        super().__init__()
        self.fast, self.slow, self.per_node = fast, slow, per_node
        self.node = dist.get_rank() // per_node
        self.lock_file = f"{folder}/node{self.node}.lock"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.send.default:
            tensors, boxed_group, to = args[:3]
            to = dist.get_global_rank(dist.ProcessGroup.unbox(boxed_group), to)
            self._wait(tensors[0].nbytes, to)
        return func(*args, **(kwargs or {}))

    def _wait(self, nbytes, to):
        if to // self.per_node == self.node:
            time.sleep(self.fast.alpha + nbytes * self.fast.beta)
            return
        with _locked(self.lock_file):
            time.sleep(self.slow.alpha + nbytes * self.slow.beta)


@contextmanager
def _locked(path):
    import fcntl  # not on Windows, where launch is to say so itself

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
