"""All-to-all of pieces of different lengths: MPI's Alltoallv."""

import torch
import torch.distributed as dist

from ranklab.collectives import verbs
from ranklab.collectives.wire import sendrecv


def all_to_all_v(pieces, group=None):
    """Send pieces[j] to rank j of the group; return the pieces from all ranks, in rank order.

    Pieces are 1-D tensors of one dtype and device, each of any length, including 0; no other rank
    knows the lengths. The results are new tensors, and `pieces` stay unchanged.
    Cost: first R-1 messages of 8 bytes for the lengths; then each piece is sent once, straight to
        its rank, unless it is empty.
    Lab: 02
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.tensor([[len(piece)] for piece in pieces], device=pieces[0].device)  # (R, 1)
    source_lengths = verbs.all_to_all(lengths, group).flatten().tolist()
    received = [pieces[0].new_empty(n) for n in source_lengths]
    received[rank].copy_(pieces[rank])
    for shift in range(1, R):  # in each round all send equally far, so that no rank is crowded
        to, source = (rank + shift) % R, (rank - shift) % R
        sendrecv(pieces[to].contiguous(), to, received[source], source, group)
    return received
