"""Shared by the checks of lab 10: the inputs of attention, a rank's part of them, and the
attention of one process.

Inputs are a function of the turn, so that every rank can make the whole sequence.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab.engine import device

B, H, KV, T, D = 2, 4, 2, 24, 4
# Roundings of exp(score - lse): an error of half an eps in a score of 290, in the products that it
# is the sum of, in lse or in the difference is 290 such errors in the result.
OF_SCORES = 4 * 290
KEPT = ("Something is left over from an earlier call: make new buffers inside the function on "
        "every call.")
IN_GROUPS = ("It was right on all ranks. Here there are groups: some have ranks that are not 0 .. "
             "n-1, and some have only one rank.")


def inputs(turn, dtype=torch.float32, heads=(H, KV), scale=1):
    """Return q, k, v and a gradient of the result, of the whole sequence; scores are multiplied
    by `scale`.
    """
    generator = torch.Generator().manual_seed(turn)
    tensors = [torch.randn(B, n, T, D, generator=generator).to(device(), dtype)
               for n in (heads[0], heads[1], heads[1], heads[0])]
    return [tensors[0] * scale, *tensors[1:]]


def as_in_a_model(x):
    """Return a copy of x (B, H, T, D) that lies in memory as (B, T, H, D): a model transposes."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def gathered(x, group):
    """Return the x (B, n, T/R, D) of all ranks, in their order: (B, n, T, D)."""
    parts = [x.new_empty(x.shape) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=2)


def attention(q, k, v, positions):
    """Return (out, lse), computed in float64, as float32: causal, of the queries at `positions`."""
    q, k, v = (x.double() for x in (q, k, v))
    sees = torch.arange(T, device=q.device) <= positions.to(q.device)[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * D**-0.5
    return out.float(), scores.masked_fill(~sees, float("-inf")).logsumexp(-1).float()


def gradients(grad_out, q, k, v):
    """Return [dq, dk, dv] of the whole sequence, computed in float64 by autograd, as float32."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():  # also inside of a backward
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [x.float() for x in torch.autograd.grad(out, (q, k, v), grad_out.double())]
