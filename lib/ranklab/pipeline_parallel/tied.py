"""tied_embedding_sync: one matrix on two ranks, the embedding of one stage and another one's head.
"""

import torch
import torch.distributed as dist


def tied_embedding_sync(copies, other, group=None):
    """Each of `copies` has in .grad the sum of its gradients here and on the rank `other`.

    Both ranks call it, after all backwards of a step. They had the same weights, they get the same
    bits, and so they have the same weights after the step.
    copies  parameters that the rank `other` of the group holds, too, in the same order; none on a
            rank that has neither end, whatever `other` is there
    cost    each of the two sends one message for each copy: its own gradient
    paper   Narayanan et al. 2021, Megatron-LM, has a group of the two and an all-reduce
    lab     12
    """
    for parameter in copies:
        mine = parameter.grad.contiguous()
        theirs = torch.empty_like(mine)
        both = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, mine, group=group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=other)])
        for work in both:
            work.wait()
        parameter.grad = mine + theirs
