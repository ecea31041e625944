"""Lab 12: what goes wrong when two ranks hold one matrix."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.pipeline_parallel import tied_embedding_sync

SUM = "parameter.grad = local + remote"
WAIT = "        for work in works:\n            work.wait()\n"
MINE = "parameter.grad.contiguous()"
END = f"        {SUM}\n"


def _wrong(*edits, says, **named):
    return mutant(tied_embedding_sync, *edits, says=says, **named)


WRONG = [
    _wrong(SUM, "parameter.grad = (local + remote) / 2", says="add, no mean"),
    _wrong(SUM, "if dist.get_rank(group) < other:\n            parameter.grad = local + remote",
           says="its own as it was", called="one_side_adds"),
    _wrong(WAIT, "", says="and wait for both"),
    _wrong(WAIT, "        works[-1].wait()\n", says="and wait for both", called="waits_for_one"),
    _wrong(SUM, "parameter.grad = remote", says="that of the other end"),
    _wrong("group_peer=other),", "peer=other),", "group_peer=other)])", "peer=other)])",
           says="`other` counts in the group"),
    _wrong(MINE, "parameter.grad.float().contiguous()", says="has the type of the gradients"),
    _wrong(MINE, "parameter.grad", says="may have any strides"),
    _wrong("    for parameter in copies:\n", "    dist.barrier(group=group)\n    for parameter in "
           "copies:\n", says="calls barrier.*has to wait"),
    _wrong(SUM,
           "local += remote\n        works = [dist.isend(local, group=group, group_dst=other), "
           "dist.irecv(remote, group=group, group_src=other)]\n        [w.wait() for w in works]"
           "\n        parameter.grad = local", says="sends 6 messages", called="sent_twice"),
    _wrong(SUM, "local += remote", says="its own as it was", called="added_to_a_copy"),
    _wrong("in copies:", "in copies[:1]:", says="gradient 1 of the copies is its own"),
    _wrong("        works = dist",
           "        works = [dist.isend(local, group=group, group_dst=other), "
           "dist.irecv(remote, group=group, group_src=other)]\n        if False: dist",
           WAIT, "        works[1].wait()\n", says="and wait for both", called="its_own_is_lost"),
    _wrong("works = dist", "if other is None: other = 0\n        works = dist", "in copies:",
           "in copies or [torch.nn.Parameter(torch.zeros(1))]:", says="nothing is sent there",
           called="all_ranks_take_part"),
    _wrong(SUM, "parameter.grad = local + remote.bfloat16().to(local.dtype)", says="element|bits"),
]


def tied_embedding_sync__all_reduce_over_the_group(copies, other, group=None):
    """Only the two ranks that hold a copy"""
    for parameter in copies:
        total = parameter.grad.contiguous()
        dist.all_reduce(total, group=group)
        parameter.grad = total


def tied_embedding_sync__both_send_first(copies, other, group=None):
    """if both send first, both wait"""
    for parameter in copies:
        mine = parameter.grad.contiguous()
        theirs = torch.empty_like(mine)
        dist.send(mine, group=group, group_dst=other)
        dist.recv(theirs, group=group, group_src=other)
        parameter.grad = mine + theirs


def tied_embedding_sync__the_sum_is_sent_back(copies, other, group=None):
    """Send the gradient that backward has left"""
    for parameter in copies:
        mine = parameter.grad.contiguous()
        theirs = torch.empty_like(mine)
        if dist.get_rank(group) < other:
            dist.send(mine, group=group, group_dst=other)
            dist.recv(theirs, group=group, group_src=other)
        else:
            dist.recv(theirs, group=group, group_src=other)
            mine = mine + theirs
            dist.send(mine, group=group, group_dst=other)
            parameter.grad = mine
            continue
        parameter.grad = mine + theirs
