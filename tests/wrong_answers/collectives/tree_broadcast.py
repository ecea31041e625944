"""Lab 02, tree_broadcast: mistakes that a good student would really make."""

import torch.distributed as dist
from mutants import mutant

from ranklab.collectives import tree_broadcast

SENDS, RECEIVES = "place < have and place + have < R", "have <= place < 2 * have"

WRONG = [
    mutant(tree_broadcast, SENDS, "place == 0", RECEIVES, "place == have", "*= 2", "+= 1",
           says="A rank that has the value can pass it on"),
    mutant(tree_broadcast, SENDS, "place + 1 == have", "(rank + have) % R", "(rank + 1) % R",
           RECEIVES, "place == have", "(rank - have) % R", "(rank - 1) % R", "*= 2", "+= 1",
           says="from rank to rank like a bucket"),
    mutant(tree_broadcast, "(rank - src) % R", "rank", says="Count places from src"),
    mutant(tree_broadcast, SENDS, "place < have", says="no power of two"),
    mutant(tree_broadcast, "while have < R", "while 2 * have <= R", says="enough rounds"),
    mutant(tree_broadcast, "(rank + have) % R", "place + have",
           "(rank - have) % R", "place - have", says="turn a place back into a rank"),
    mutant(tree_broadcast, "(rank - src)", "(rank - (dist.get_group_rank(group, src) if group "
           "else src))", says="are ranks inside the group"),
    mutant(tree_broadcast, f"if {SENDS}", "if R > 1", f"elif {RECEIVES}", "if R > 1",
           says="only one of the two may send first"),
    *(mutant(tree_broadcast, "dist.send(out,", f"dist.send(out.{wide}(),",
             "dist.recv(out,", f"wide = out.{wide}()\n            dist.recv(wide,",
             "(rank - have) % R)", "(rank - have) % R)\n            out.copy_(wide)", says=says)
      for wide, says in (("double", "in its own type"), ("float", "rounded to float32"))),
]


def tree_broadcast__uses_the_backend(x, src=0, group=None):
    """backend's own broadcast"""
    out = x.contiguous().clone()
    dist.broadcast(out, src, group=group)
    return out
