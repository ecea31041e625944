"""Lab 00: what goes wrong when all ranks send and receive at the same time."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.ranks import ring_shift

BEFORE = "# Both are under way before either is waited for, so no rank blocks its neighbour."
SEND = "dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),"
RECV = "dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),"
HALF = "for half in (slice(len(x) // 2), slice(len(x) // 2, None))"
WAIT = "for work in works:\n        work.wait()"

WRONG = [
    mutant(ring_shift, BEFORE, "dist.send(x, group=group, group_dst=(rank + 1) % size)",
           SEND, "", says="all ranks wait in send"),
    mutant(ring_shift, BEFORE, "dist.recv(received, group=group, group_src=(rank - 1) % size)",
           RECV, "", says="start the send before"),
    mutant(ring_shift, WAIT, "", says="Keep the handle"),
    mutant(ring_shift, WAIT, "works[-1].wait()\n    dist.barrier(group)",
           says="never waited for"),  # the barrier makes it right by chance, always
    mutant(ring_shift, SEND, SEND.replace("+", "-"), RECV, RECV.replace("- 1", "+ 1"),
           says="rank after it"),
    mutant(ring_shift, SEND, SEND.replace("group=group, group_peer=", ""),
           RECV, RECV.replace("group=group, group_peer=", ""), says="group_peer="),
    mutant(ring_shift, "received = torch.empty_like(x)", "received, x = x, x.clone()",
           says="x was overwritten"),
    mutant(ring_shift, "x.clone()", "x", says="x itself, not a new tensor"),
    mutant(ring_shift, "return received", "", says="Return the received tensor"),
    mutant(ring_shift, "x.contiguous()", "x.float()", says="x's type and shape"),
    mutant(ring_shift, "empty_like(x)", "empty(x.shape)", says="longer than the buffer"),
    mutant(ring_shift, "x.contiguous()", "x.flip(0)", says="something other than x"),
    mutant(ring_shift, SEND, f"*({SEND[:-1].replace(' x', ' x[half]')} {HALF}),",
           RECV, f"*({RECV[:-1].replace('before', 'before[half]', 1)} {HALF}),",
           says="2 messages for one x"),
    mutant(ring_shift, "group=None", "group=None, kept={}", "torch.empty_like(x)",
           "kept.setdefault((x.shape, x.dtype), torch.empty_like(x))",
           says="that of the second call"),
]


def ring_shift__gathers_everything(x, group=None):
    """to everybody"""
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, x, group=group)
    return gathered[dist.get_rank(group) - 1].clone()
