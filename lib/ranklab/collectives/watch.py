"""Record the sender, receiver and content of every message, for the step-by-step pictures.

Each rank starts from `marked(R)`, whose numbers carry their own history: element c on rank r means
"chunk c, from rank r". A sum of such numbers still tells its chunk and the ranks in the sum, so
the picture shows what an algorithm really did, not what it should have done.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Message:
    """A chunk sent from rank `sender` to rank `to`, with the ranks summed in it."""

    step: int  # the sender's first, second, ... message
    sender: int
    to: int
    chunk: int
    summed: frozenset


def marked(ranks, device=None):
    """Make a number for each chunk that still tells the chunk and this rank after any sum.

    Shape: (ranks,), int64.
    """
    rank = dist.get_rank()
    chunks = torch.arange(ranks, dtype=torch.int64, device=device)
    # Low byte: a bit for each rank in the sum. Above it: chunk * number of ranks in the sum.
    return chunks * 256 + (1 << rank)


class Watch(TorchDispatchMode):
    """Record every chunk that this rank sends: `with Watch() as seen:` fills seen.messages.

    Raises: ValueError for more than 8 ranks: their marks do not fit.
    """

    def __init__(self):
        super().__init__()
        if dist.get_world_size() > 8:
            raise ValueError(f"Watch follows 8 ranks or fewer, not {dist.get_world_size()}")
        self.messages, self._steps = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.send.default:
            tensors, boxed_group, to = args[:3]
            group = dist.ProcessGroup.unbox(boxed_group)
            self._note(tensors[0], dist.get_global_rank(group, to))
        return func(*args, **(kwargs or {}))

    def _note(self, piece, to):
        for value in piece.detach().cpu().flatten().tolist():
            summed = frozenset(r for r in range(8) if value >> r & 1)
            chunk = (value >> 8) // max(len(summed), 1)
            self.messages.append(Message(self._steps, dist.get_rank(), to, chunk, summed))
        self._steps += 1
