"""Ring attention: keys and values go around a ring; each rank's queries attend block by block.

    ring_attention           R blocks, R - 1 hops: the next block travels during the computation
    ring_attention_backward  around again; a block's gradients travel with it, and back to its rank
    context_attention        both, as one function for autograd

If you differentiate ring_attention itself, autograd gives k and v only this rank's part of their
gradients. The messages come from lab 02 (collectives).
"""

import torch
import torch.distributed as dist

from ranklab.collectives.wire import start_sendrecv
from ranklab.context_parallel.block import block_attention, block_gradients, online_softmax_merge


class Hop:
    """Send a tensor to the next rank of the ring while receiving one from the previous rank."""

    def __init__(self, x, group=None):
        rank, R = dist.get_rank(group), dist.get_world_size(group)
        self.source, self.buffer = x.contiguous(), torch.empty_like(x).contiguous()
        self.works = start_sendrecv(self.source, (rank + 1) % R, self.buffer, (rank - 1) % R, group)

    def wait(self):
        """Wait for the tensor from the previous rank, and return it."""
        for work in self.works:
            work.wait()
        return self.buffer


def ring_attention(q, k, v, visible, group=None):
    """Return (out, lse) of this rank's queries over the keys of all ranks.

    Both are accumulated in float32 and returned in it, whatever the dtype of q. The next block
    travels while this one is computed, even if this rank sees none of it. No argument is modified.
    visible: [what this rank's queries see of the keys of rank 0, 1, ...]; see causal_blocks.
    Shape: q (B, H, T/R, D); k, v (B, KV, T/R, D): heads of q may share a head of k and v. They may
        be transposed views, as in a model.
    Cost: R - 1 messages, each with the bytes of k and v.
    Paper: Liu et al. 2023, Ring Attention (arXiv 2310.01889)
    Lab: 10
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), device=q.device)
    block = torch.stack([k, v])
    for step in range(R):
        hop = Hop(block, group) if step < R - 1 else None  # while this block is computed
        part = block_attention(q, *block, visible[(rank - step) % R])
        out, lse = online_softmax_merge(out, lse, *part)
        block = hop and hop.wait()
    return out, lse


def ring_attention_backward(grad_out, q, k, v, out, lse, visible, group=None):
    """Return (dq, dk, dv), the gradients of q, k and v; out and lse come from ring_attention.

    All three are accumulated in float32 and returned in it, whatever the dtype of q. No argument is
    modified. Here blocks need not travel during a computation.
    Cost: R - 1 messages with the bytes of k and v, and R with the bytes of their gradients (none
        on one rank).
    Lab: 10
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    dq, block, grad_hop = 0, torch.stack([k, v]), None
    for step in range(R):
        hop = Hop(block, group) if step < R - 1 else None
        grads = block_gradients(grad_out, q, *block, out, lse, visible[(rank - step) % R])
        dq, gradients = dq + grads[0], torch.stack(grads[1:])
        if grad_hop:  # what previous ranks have found for this block
            gradients += grad_hop.wait()
        grad_hop = Hop(gradients, group) if R > 1 else None
        block = hop and hop.wait()
    dk, dv = grad_hop.wait() if grad_hop else gradients  # the last hop brought my block's home
    return dq, dk, dv


class ContextAttention(torch.autograd.Function):
    """Run ring_attention in forward and ring_attention_backward in backward, or a learner's own."""

    @staticmethod
    def forward(ctx, q, k, v, visible, group, forward, backward):
        out, lse = forward(q, k, v, visible, group)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)  # no scores: backward computes them again
        ctx.visible, ctx.group, ctx.backward_of = visible, group, backward
        return out

    @staticmethod
    def backward(ctx, grad_out):
        tensors = ctx.saved_tensors
        gradients = ctx.backward_of(grad_out, *tensors, ctx.visible, ctx.group)
        typed = [gradient.to(x.dtype) for gradient, x in zip(gradients, tensors)]
        return *typed, None, None, None, None


def context_attention(q, k, v, visible, group=None, forward=ring_attention,
                      backward=ring_attention_backward):
    """Attend with this rank's queries to the keys of all ranks, in q's type; differentiable.

    visible: causal_blocks(positions, rank in the group, begins).
    Shape: q (B, H, T/R, D); k, v (B, KV, T/R, D); the result has q's shape.
    Cost: as ring_attention and ring_attention_backward. Backward keeps q, k, v, the result, and a
        float32 for each of its rows.
    Lab: 10
    """
    return ContextAttention.apply(q, k, v, visible, group, forward, backward)
