"""Ring attention: keys and values go round, and each rank's queries meet them block by block.

    ring_attention       attention over all ranks' keys, with its gradient
        ring_forward     R blocks, R - 1 hops; the next block travels while this one is computed
        ring_backward    once more round; the gradients of a block travel with it, then home
"""

import torch
import torch.distributed as dist

from ranklab.collectives.wire import start_sendrecv
from ranklab.context_parallel.block import block_attention, block_gradients, online_softmax_merge


class Hop:
    """A tensor on its way to the next rank of the ring, while the previous rank's comes."""

    def __init__(self, x, group=None):
        rank, R = dist.get_rank(group), dist.get_world_size(group)
        self.sent, self.into = x.contiguous(), torch.empty_like(x).contiguous()
        self.works = start_sendrecv(self.sent, (rank + 1) % R, self.into, (rank - 1) % R, group)

    def wait(self):
        """What has come."""
        for work in self.works:
            work.wait()
        return self.into


def ring_forward(q, k, v, visible, group=None):
    """(out, lse) of this rank's queries over the keys of all ranks, float32.

    shape    q (B, H, T/R, D); k, v (B, KV, T/R, D): heads of q may share one of k and v
    visible  [the Visible of this rank's queries and the keys of rank 0, 1, ...]
    cost     R - 1 messages of k's and v's bytes
    paper    Liu et al. 2023, Ring Attention (arXiv 2310.01889)
    lab      10
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), device=q.device)
    block = torch.stack([k, v])
    for step in range(R):
        hop = Hop(block, group) if step < R - 1 else None  # while this block is computed
        seen = block_attention(q, *block, visible[(rank - step) % R])
        out, lse = online_softmax_merge(out, lse, *seen)
        block = hop and hop.wait()
    return out, lse


def ring_backward(grad_out, q, k, v, out, lse, visible, group=None):
    """(dq, dk, dv) of this rank's q, k and v, float32; out and lse are ring_forward's.

    cost   R - 1 messages of k's and v's bytes, and R (of one rank: none) of their gradients'
    lab    10
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    dq, block, coming = 0, torch.stack([k, v]), None
    for step in range(R):
        hop = Hop(block, group) if step < R - 1 else None
        mine = block_gradients(grad_out, q, *block, out, lse, visible[(rank - step) % R])
        dq, gradients = dq + mine[0], torch.stack(mine[1:])
        if coming:  # what the ranks before have found for this block
            gradients += coming.wait()
        coming = Hop(gradients, group) if R > 1 else None
        block = hop and hop.wait()
    dk, dv = coming.wait() if coming else gradients  # the last hop brought my block's home
    return dq, dk, dv


class RingFunction(torch.autograd.Function):
    """forward and backward are ring_forward and ring_backward, or a learner's own."""

    @staticmethod
    def forward(ctx, q, k, v, visible, group, forward, backward):
        out, lse = forward(q, k, v, visible, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visible, ctx.group, ctx.back = visible, group, backward
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        kept = ctx.saved_tensors
        gradients = ctx.back(grad_out, *kept, ctx.visible, ctx.group)
        typed = [g.to(x.dtype) for g, x in zip(gradients, kept)]
        return *typed, None, None, None, None


def ring_attention(q, k, v, visible, group=None, forward=ring_forward, backward=ring_backward):
    """This rank's queries over the keys of all ranks, in q's type; its gradient is known.

    visible  causal_blocks(positions, rank of the group, begins)
    cost     that of ring_forward and ring_backward
    lab      10
    """
    return RingFunction.apply(q, k, v, visible, group, forward, backward)
