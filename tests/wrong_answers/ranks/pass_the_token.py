"""Lab 00: what goes wrong when a token goes around a ring."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.ranks import pass_the_token

MAKES = "torch.zeros(1, dtype=torch.int64, device=device())"
THEN_SENDS = "previous_rank)\n        dist.send(token + 1"  # the other ranks, after receiving

WRONG = [
    mutant(pass_the_token, THEN_SENDS, THEN_SENDS.replace("dist", "if rank < size - 1: dist"),
           says=r"the last rank\s+sends to rank 0"),
    mutant(pass_the_token, "(rank + 1) % size", "rank + 1", says=r"\(rank \+ 1\) % size"),
    mutant(pass_the_token, "if rank == 0", "if rank < 0", says="rank 0 sends first"),
    mutant(pass_the_token, "if rank == 0", "if rank % 2 == 0",
           says="rank 2 sends before it has received"),
    mutant(pass_the_token, "next_rank, previous_rank =", "previous_rank, next_rank =",
           says="other way round"),
    mutant(pass_the_token, "if rank == 0", "for _ in range(2 if rank == 0 else 0)",
           "else:", "for _ in range(2 if rank else 0):", says="The token went round twice"),
    mutant(pass_the_token, THEN_SENDS,
           "previous_rank)\n        token += 1\n        dist.send(token",
           says="before the rank adds its own 1"),
    mutant(pass_the_token, "if rank == 0:", "if rank == 0:\n        token += 1",
           says="All see 1 too many"),
    mutant(pass_the_token, THEN_SENDS, "previous_rank)\n        dist.send(token",
           says="Each rank adds 1"),
    mutant(pass_the_token, "else:\n        dist.recv", "else:\n        token = dist.recv",
           says="returns the sender's rank"),
    mutant(pass_the_token, THEN_SENDS, THEN_SENDS.replace("dist.send", "dist.kept = dist.isend"),
           says="never waited for"),
    mutant(pass_the_token, "torch.int64", "torch.int32", says="the token has 8"),
    mutant(pass_the_token, "group=None", "group=None, kept=torch.zeros(1, dtype=torch.int64)",
           MAKES, "kept", says="a second call: rank 1 of 3 returned"),
    mutant(pass_the_token, "dist.get_rank(group), dist.get_world_size(group)",
           "dist.get_rank(), dist.get_world_size()", says="A group counts its ranks"),
    mutant(pass_the_token, "token.item()", "token", says="Return the number"),
]


def pass_the_token__by_a_collective(group=None):
    """to its neighbours only"""
    ones = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(ones, group=group)
    return dist.get_rank(group) or ones.item()
