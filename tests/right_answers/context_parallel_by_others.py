"""Lab 10: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import torch
import torch.distributed as dist
from ranklab.context_parallel import Hop, Trade, block_attention, block_gradients, refuse_uneven


def attention_memory__formula(tokens, n_head, n_kv_head, head_size, ranks=1, element=2,
                              keeps_scores=False):
    """A formula of this rank's tokens."""
    if tokens % ranks:
        raise ValueError(f"{ranks} ranks do not divide {tokens} tokens")
    if keeps_scores and ranks > 1:
        raise ValueError("scores are kept on one rank only")
    if keeps_scores:
        return element * tokens * (head_size * (n_head + 2 * n_kv_head) + n_head * tokens)
    return tokens // ranks * (element * head_size * 2 * (n_head + n_kv_head) + 4 * n_head)


def attention_memory__meta(tokens, n_head, n_kv_head, head_size, ranks=1, element=2,
                           keeps_scores=False):
    """Counts tensors without storage."""
    if tokens % ranks != 0 or (keeps_scores and ranks != 1):
        raise ValueError(f"{tokens} tokens on {ranks} ranks, keeps_scores={keeps_scores}")
    T = tokens // ranks
    kept = [torch.empty(heads, T, head_size, device="meta")
            for heads in (n_head, n_kv_head, n_kv_head)]
    if keeps_scores:
        kept.append(torch.empty(n_head, T, T, device="meta"))
        rest = 0
    else:
        kept.append(torch.empty(n_head, T, head_size, device="meta"))
        rest = torch.empty(n_head, T, dtype=torch.float32, device="meta").nbytes
    return element * sum(x.numel() for x in kept) + rest


def online_softmax_merge__logaddexp(out, lse, other, other_lse):
    """logaddexp, and weights exp(lse - total) with 0 for rows that saw nothing."""
    total = torch.logaddexp(lse, other_lse)
    a, b = (torch.where(x == -torch.inf, 0.0, (x - total).exp())[..., None]
            for x in (lse, other_lse))
    return a * out + b * other, total


def online_softmax_merge__max(out, lse, other, other_lse):
    """The larger lse of each row is taken out first, as in FlashAttention."""
    top = torch.maximum(lse, other_lse)
    top0 = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    a, b = (lse - top0).exp(), (other_lse - top0).exp()
    total = a + b
    safe = torch.where(total == 0, torch.ones_like(total), total)
    return (a[..., None] * out + b[..., None] * other) / safe[..., None], top0 + total.log()


def _merge(out, lse, other, other_lse):
    total = torch.logaddexp(lse, other_lse)
    a, b = (torch.where(x == -torch.inf, 0.0, (x - total).exp())[..., None]
            for x in (lse, other_lse))
    return a * out + b * other, total


def ring_attention__hops(q, k, v, visible, group=None):
    """Hop and merge in each step, as the text suggests."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    block, found = torch.stack([k, v]), None
    for step in range(R):
        hop = Hop(block, group) if step < R - 1 else None
        seen = block_attention(q, block[0], block[1], visible[(rank - step) % R])
        found = seen if found is None else _merge(*found, *seen)
        if hop:
            block = hop.wait()
    return found


class _Pass:
    """x to the rank `to` steps on, from the one as many steps before; waits in wait()."""

    def __init__(self, x, group, by=1):
        rank, R = dist.get_rank(group), dist.get_world_size(group)
        world = dist.group.WORLD if group is None else group
        self.sent = x.contiguous()
        self.got = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, self.sent, dist.get_global_rank(world, (rank + by) % R), group),
            dist.P2POp(dist.irecv, self.got, dist.get_global_rank(world, (rank - by) % R), group)])

    def wait(self):
        for work in self.works:
            work.wait()
        return self.got


def ring_attention__at_the_end(q, k, v, visible, group=None):
    """isend and irecv of my own; all results are kept, and put together once at the end."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    block, outs, lses = torch.cat([k, v], -1).contiguous(), [], []
    for step in range(R):
        on_its_way = _Pass(block, group) if step + 1 < R else None
        k_, v_ = block.split([k.shape[-1], v.shape[-1]], -1)
        out, lse = block_attention(q, k_, v_, visible[(rank - step) % R])
        outs.append(out)
        lses.append(lse)
        if on_its_way is not None:
            block = on_its_way.wait()
    lses = torch.stack(lses)
    lse = lses.logsumexp(0)
    weights = (lses - torch.where(lse.isneginf(), 0.0, lse)).exp()
    return (weights[..., None] * torch.stack(outs)).sum(0), lse


def ring_attention_backward__hops(grad_out, q, k, v, out, lse, visible, group=None):
    """Blocks and their gradients go round together, the gradients one hop further."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    block = torch.stack([k, v])
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    grads = torch.zeros(block.shape, dtype=torch.float32, device=q.device)
    for step in range(R):
        part = block_gradients(grad_out, q, block[0], block[1], out, lse,
                               visible[(rank - step) % R])
        dq = dq + part[0]
        grads = grads + torch.stack(part[1:])
        if step < R - 1:
            block = Hop(block, group).wait()
        if R > 1:
            grads = Hop(grads, group).wait()
    return dq, grads[0], grads[1]


def ring_attention_backward__own_part_at_home(grad_out, q, k, v, out, lse, visible, group=None):
    """A rank's own part stays at home, so the gradients set out one step later: R - 1 messages of
    them.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    block, grads = torch.stack([k, v]), None
    dq, *own = block_gradients(grad_out, q, k, v, out, lse, visible[rank])
    for step in range(1, R):
        block = Hop(block, group).wait()
        if grads is not None:
            grads = Hop(grads, group).wait()
        dq_, *kv = block_gradients(grad_out, q, block[0], block[1], out, lse,
                                   visible[(rank - step) % R])
        dq = dq + dq_
        grads = torch.stack(kv) if grads is None else grads + torch.stack(kv)
    if grads is not None:
        own = torch.stack(own) + Hop(grads, group).wait()
    return dq, own[0], own[1]


def zigzag_shard__flip(tokens, ranks):
    """2R rows, of which the second half is turned over and put beside the first."""
    refuse_uneven(tokens, 2 * ranks)
    parts = torch.arange(tokens).view(2 * ranks, tokens // (2 * ranks))
    return torch.cat([parts[:ranks], parts[ranks:].flip(0)], 1)


def zigzag_shard__ranges(tokens, ranks):
    """Two Python ranges for each rank."""
    refuse_uneven(tokens, 2 * ranks)
    n = tokens // (2 * ranks)
    return torch.tensor([[*range(r * n, r * n + n), *range(tokens - (r + 1) * n, tokens - r * n)]
                         for r in range(ranks)])


def ulysses_attention__trade(q, k, v, attend, group=None):
    """Four trades, as the text suggests."""
    R = dist.get_world_size(group)
    if q.shape[1] % R or k.shape[1] % R:
        raise ValueError(f"{R} ranks do not divide {q.shape[1]} and {k.shape[1]} heads")
    q, k, v = (Trade.apply(x, 1, 2, group) for x in (q, k, v))
    return Trade.apply(attend(q, k, v), 2, 1, group)


def ulysses_attention__packed(q, k, v, attend, group=None):
    """q, k and v travel in one all-to-all, each rank's heads side by side."""
    R = dist.get_world_size(group)
    H, KV = q.shape[1], k.shape[1]
    if H % R or KV % R:
        raise ValueError(f"{R} ranks do not divide {H} and {KV} heads")
    packed = torch.cat([x.unflatten(1, (R, -1)) for x in (q, k, v)], 2).flatten(1, 2)
    q, k, v = Trade.apply(packed, 1, 2, group).split([H // R, KV // R, KV // R], 1)
    return Trade.apply(attend(q, k, v), 2, 1, group)
