"""Attention over one block of keys, and how two such results are merged.

Softmax needs the sum over all keys. If the keys come block by block, each block's result carries
lse, the logarithm of the sum of exp(score), and a later block only rescales the result so far.
"""

from typing import NamedTuple

import torch

from ranklab.engine import device


def online_softmax_merge(out, lse, other, other_lse):
    """Merge the attention over two sets of keys, (out, lse) and (other, other_lse), into one.

    The arguments are not modified.
    Shape: out, other (..., T, D), float32; lse, other_lse (..., T), float32. A row that has seen
        no key has lse -inf and out 0, in the arguments and in the result.
    Paper: Milakov and Gimelshein 2018; Dao et al. 2022, FlashAttention
    Lab: 10
    """
    total = torch.logaddexp(lse, other_lse)  # never overflows, as exp() of a score would
    weight, other_weight = (
        (part - total).exp().nan_to_num(0.0).unsqueeze(-1)  # -inf - -inf is nan: no key at all
        for part in (lse, other_lse)
    )
    return weight * out + other_weight * other, total


class Visible(NamedTuple):
    """Which queries of a rank see which keys of a block: rows x keys, unless the mask is False."""

    rows: torch.Tensor  # the queries that see any key; (rows,)
    keys: torch.Tensor  # the keys that any query sees; (keys,)
    mask: torch.Tensor | None  # (rows, keys) or (B, 1, 1, rows, keys); None: all of them


def causal_blocks(positions, rank, begins=None):
    """List the Visible of `rank`'s queries for the keys of rank 0, 1, ..., on this rank's device.

    positions: (R, T/R), on the CPU: which tokens of the sequence each rank has
    begins: (B, T/R): the start of each of this rank's tokens' document; None: 0
    """
    query = positions[rank][:, None]  # (T/R, 1)
    first = torch.zeros(1, 1, 1) if begins is None else begins[..., None].cpu()  # (B, T/R, 1)
    blocks = []
    for key in positions:  # (T/R,)
        mask = (key <= query) & (key >= first)  # (B, T/R, T/R)
        rows, keys = mask.any(-1).any(0), mask.any(1).any(0)
        mask = mask[:, rows][:, :, keys]
        blocks.append(Visible(rows.nonzero().flatten().to(device()),
                              keys.nonzero().flatten().to(device()),
                              None if mask.all() else mask[:, None, None].to(device())))
    return blocks


def block_attention(q, k, v, visible):
    """Return (out, lse) of each query over the keys of one block; scores and sums are float32.

    Shape: q (B, H, T, D); k, v (B, KV, S, D), where KV divides H; out (B, H, T, D), lse (B, H, T).
    Cost: 4 B H D FLOPs for each of the rows x keys of `visible`.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), device=q.device)
    if len(visible.rows):
        q, k, v = _visible_parts(q, k, v, visible)
        scores = _scores(q, k, visible.mask)  # (B, KV, H/KV, rows, keys)
        part = scores.logsumexp(-1)
        out[:, :, visible.rows] = (_probabilities(scores, part) @ v).flatten(1, 2)
        lse[:, :, visible.rows] = part.flatten(1, 2)
    return out, lse


def block_gradients(grad_out, q, k, v, out, lse, visible):
    """Return one block's part of (dq, dk, dv), in float32, with the shapes of q, k, v.

    Of the forward pass only out and lse, over all keys, are kept; the probabilities are recomputed.
    Cost: 10 B H D FLOPs for each of the rows x keys of `visible`.
    """
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    if len(visible.rows):
        delta = (grad_out.float() * out.float()).sum(-1)  # (B, H, T): sum over keys of p dp
        q, k, v = _visible_parts(q, k, v, visible)
        grad, lse, delta = (x.float()[:, :, visible.rows].unflatten(1, q.shape[1:3])
                            for x in (grad_out, lse, delta))
        p = _probabilities(_scores(q, k, visible.mask), lse)
        ds = p * (grad @ v.transpose(-1, -2) - delta.unsqueeze(-1)) * q.shape[-1] ** -0.5
        dq[:, :, visible.rows] = (ds @ k).flatten(1, 2)
        # heads of q that share one of k and v: their gradients add up
        dk[:, :, visible.keys] = (ds.transpose(-1, -2) @ q).sum(2)
        dv[:, :, visible.keys] = (p.transpose(-1, -2) @ grad).sum(2)
    return dq, dk, dv


def _visible_parts(q, k, v, visible):
    """Select the visible rows and keys, in float32; heads (KV, H/KV), (KV, 1), (KV, 1)."""
    H, KV = q.shape[1], k.shape[1]
    if H % KV:
        raise ValueError(f"n_kv_head={KV} must divide n_head={H}")
    q = q[:, :, visible.rows].float().unflatten(1, (KV, H // KV))
    return q, *(x[:, :, visible.keys].float().unsqueeze(2) for x in (k, v))


def _scores(q, k, mask):
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _probabilities(scores, lse):
    """Return the probabilities: 0 in a row without keys, where exp(-inf - -inf) is nan."""
    return (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
