"""Lab 02, ring_reduce_scatter: mistakes that a good student would really make."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.collectives import ring_reduce_scatter, sendrecv

EXCHANGE = "sendrecv(partial, (rank + 1) % R, buffer, (rank - 1) % R, group)"
ADD, RETURN = "buffer.add_(chunks[i])", "return partial"

WRONG = [
    mutant(ring_reduce_scatter, "range(1, R)", "range(1, R - 1)", RETURN, "return partial.clone()",
           says="Are there R-1 steps"),
    mutant(ring_reduce_scatter, "chunks[rank - 1]", "chunks[rank]", "(rank - 1 - step)",
           "(rank - step)", says="indices are shifted"),
    mutant(ring_reduce_scatter, ADD, "buffer", says="passed on without your own share"),
    mutant(ring_reduce_scatter, ADD, "buffer.add_(chunks[(i + 1) % R])",
           says="mixes shares of different chunks"),
    mutant(ring_reduce_scatter, ADD, "chunks[i].add_(buffer)", says="x itself is changed"),
    mutant(ring_reduce_scatter, ADD, "buffer + chunks[i]", says="makes a new tensor elsewhere"),
    mutant(ring_reduce_scatter, EXCHANGE, EXCHANGE.replace(", group", ""),
           says="sendrecv.+, group"),
    mutant(ring_reduce_scatter, EXCHANGE, "for a, b in zip(partial.tensor_split(2), "
           "buffer.tensor_split(2)):\n"
           "            sendrecv(a, (rank + 1) % R, b, (rank - 1) % R, group)",
           says="Send one message in each step"),
    mutant(ring_reduce_scatter, "out.view(-1).tensor_split(R)", "out.view(R, -1)",
           says="that of `out`"),
    mutant(ring_reduce_scatter, RETURN, f"if out is not None:\n        return out\n    {RETURN}",
           says=r"of shape \(48,\), not \(12,\)"),
    mutant(ring_reduce_scatter, RETURN, f"if out is None:\n        {RETURN}",
           says="the result is None"),
    mutant(ring_reduce_scatter, "sums[0].copy_(partial) if sums else partial", "partial",
           says="rank 0 of 1.*`out` is as it was.*On one rank copy x there"),
    mutant(ring_reduce_scatter, "if R == 1:", "if False:", says="x itself, not a new tensor"),
]


def ring_reduce_scatter__whole_tensor(x, group=None, out=None):
    """whole tensor each time"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    passing, total = x.flatten(), x.flatten().clone()
    for _ in range(R - 1):
        arriving = torch.empty_like(passing)
        passing = sendrecv(passing, (rank + 1) % R, arriving, (rank - 1) % R, group)
        total += passing
    return total.tensor_split(R)[rank]
