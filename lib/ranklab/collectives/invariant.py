"""All-reduce in one fixed order of additions: the same bits on 1, 2, 4, ... ranks."""

import torch
import torch.distributed as dist

from ranklab.collectives.wire import sendrecv


def invariant_all_reduce(contributions, group=None):
    """Sum the contributions of all ranks in one tree, so that the bits do not depend on R.

    contributions: this rank's part (m, ...) of n = m R tensors, for example the gradients of n
        micro-batches; rank r holds numbers r m to (r + 1) m - 1. m >= 1 is the same on all ranks.
    Tree: the sum of n tensors is the sum of the first n // 2 plus the sum of the others. Each sum
        is rounded to the contributions' dtype.
    Shape: (m, ...) -> (...), a new tensor; the contributions are unchanged.
    Raises: ValueError if R is not a power of two, before anything is sent: the tree would have to
        be cut inside a rank's part.
    Cost: sends 2(R-1)/R of one contribution's bytes, as the ring does, in 2 log2 R messages.
    Paper: Thakur, Rabenseifner & Gropp 2005, "recursive halving and doubling"
    Lab: 02
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if R & (R - 1):
        raise ValueError(f"the tree needs 1, 2, 4, 8, ... ranks, not {R}")
    total = contributions.new_empty(contributions.shape[1:]).copy_(tree_sum(contributions))
    piece, swaps = total.view(-1), []
    for k in range(R.bit_length() - 1):  # neighbours first: their contributions are neighbours
        partner = rank ^ 2**k
        halves = piece.tensor_split(2)
        piece, other = halves if rank < partner else halves[::-1]
        piece += sendrecv(other, partner, torch.empty_like(piece), partner, group)
        swaps.append((partner, piece, other))
    for partner, finished, other in reversed(swaps):
        sendrecv(finished, partner, other, partner, group)
    return total


def tree_sum(contributions):
    """Sum the rows in the tree of invariant_all_reduce, in this process; one row is a view."""
    half = len(contributions) // 2
    if not half:
        return contributions[0]
    return tree_sum(contributions[:half]) + tree_sum(contributions[half:])
