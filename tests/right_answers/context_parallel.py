"""Lab 10: right answers of another kind."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as autograd_collectives
import torch.nn.functional as F

from ranklab.basics.targets import IGNORE
from ranklab.context_parallel import block_attention, block_gradients
from ranklab.context_parallel.ring import Hop
from ranklab.context_parallel.ulysses import Trade


def online_softmax_merge__by_the_largest(out, lse, other, other_lse):
    largest = torch.maximum(lse, other_lse).clamp(min=-1e30)
    a, b = (lse - largest).exp(), (other_lse - largest).exp()
    total = a + b
    weights = [(x / total.clamp(min=1e-30)).unsqueeze(-1) for x in (a, b)]
    log = torch.where(total > 0, largest + total.clamp(min=1e-30).log(), float("-inf"))
    return weights[0] * out + weights[1] * other, log


def ring_attention__own_block_first(q, k, v, visible, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    block = torch.stack([k, v])
    parts = []
    for step in range(R):
        if step < R - 1:
            hop = Hop(block, group)
        parts.append(block_attention(q, block[0], block[1], visible[rank - step]))
        if step < R - 1:
            block = hop.wait()
    lse = torch.logsumexp(torch.stack([log for _, log in parts]), 0)
    out = sum((log - lse).exp().nan_to_num(0)[..., None] * part for part, log in parts)
    return out, lse


def ring_attention_backward__gradients_first(grad_out, q, k, v, out, lse, visible, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    block, dq, dkv = torch.stack([k, v]), torch.zeros_like(q), None
    for step in range(R):
        last = step == R - 1
        coming = None if last else Hop(block, group)
        part = block_gradients(grad_out, q, block[0], block[1], out, lse, visible[rank - step])
        dq = dq + part[0]
        here = torch.stack([part[1], part[2]])
        dkv = here if dkv is None else here + dkv.wait()
        block = block if last else coming.wait()
        if R > 1:
            dkv = Hop(dkv, group)
    dkv = dkv.wait() if R > 1 else dkv
    return dq, dkv[0], dkv[1]


def zigzag_shard__by_parts(tokens, ranks):
    if tokens % (2 * ranks):
        raise ValueError(f"{2 * ranks} parts do not divide {tokens}")
    parts = torch.arange(tokens).chunk(2 * ranks)
    return torch.stack([torch.cat([parts[r], parts[-1 - r]]) for r in range(ranks)])


def ulysses_attention__by_torchs_function(q, k, v, attend, group=None):
    R = dist.get_world_size(group)
    if q.shape[1] % R or k.shape[1] % R:
        raise ValueError(f"{R} ranks, {q.shape[1]} and {k.shape[1]} heads")

    def traded(x, cut, join):
        parts = torch.stack(x.chunk(R, cut)).contiguous()
        came = autograd_collectives.all_to_all_single(torch.empty_like(parts), parts, group=group)
        return torch.cat([*came], join)

    return traded(attend(traded(q, 1, 2), traded(k, 1, 2), traded(v, 1, 2)).contiguous(), 2, 1)


def attention_memory__term_by_term(tokens, n_head, n_kv_head, head_size, ranks=1, element=2,
                                   keeps_scores=False):
    if tokens % ranks or (keeps_scores and ranks != 1):
        raise ValueError(f"{tokens} tokens on {ranks} ranks")
    t = tokens / ranks
    q = out = n_head * head_size * t * element
    k = v = n_kv_head * head_size * t * element
    if keeps_scores:
        return q + k + v + n_head * t * t * element
    return q + k + v + out + 4 * n_head * t


def shard_documents__fine_zigzag(lengths, ranks):
    """Every document in zigzag, and what is left over where there is room."""
    if sum(lengths) % ranks:
        raise ValueError(f"{sum(lengths)} tokens on {ranks} ranks")
    rows, rest, where = [[] for _ in range(ranks)], [], 0
    for n in lengths:
        part = n // (2 * ranks)
        for r in range(ranks):
            rows[r] += range(where + r * part, where + (r + 1) * part)
            mirrored = 2 * ranks - 1 - r
            rows[r] += range(where + mirrored * part, where + (mirrored + 1) * part)
        rest += range(where + 2 * ranks * part, where + n)
        where += n
    for token in rest:
        min(rows, key=len).append(token)
    return torch.tensor([sorted(row) for row in rows])


def ring_attention_backward__blocks_first(grad_out, q, k, v, out, lse, visible, group=None):
    """Waits for each block before it computes with the one that it has."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    blocks, dq, travels = [torch.stack([k, v])], 0, None
    for step in range(R):
        if step < R - 1:
            blocks.append(Hop(blocks[-1], group).wait())
        found, dk, dv = block_gradients(grad_out, q, *blocks[step], out, lse, visible[rank - step])
        dq, part = dq + found, torch.stack([dk, dv])
        travels = part if travels is None else part + travels
        if R > 1:
            travels = Hop(travels, group).wait()
    return dq, travels[0], travels[1]


def ulysses_attention__one_trade(q, k, v, attend, group=None):
    """q, k and v go in one all-to-all: each rank's heads of all three lie together."""
    R = dist.get_world_size(group)
    if q.shape[1] % R or k.shape[1] % R:
        raise ValueError(f"{R} ranks, {q.shape[1]} and {k.shape[1]} heads")
    heads = [x.shape[1] // R for x in (q, k, v)]
    mine = [torch.cat([x.chunk(R, 1)[r] for x in (q, k, v)], 1) for r in range(R)]
    q, k, v = Trade.apply(torch.cat(mine, 1), 1, 2, group).split(heads, 1)
    return Trade.apply(attend(q, k, v), 2, 1, group)


def tiled_logits_loss__autograd_in_each_tile(hidden, weight, targets, tile, reduction="mean"):
    if tile <= 0 or reduction not in {"mean", "sum"}:
        raise ValueError(f"tile={tile}, reduction={reduction}")
    y, is_on = targets.reshape(-1), torch.is_grad_enabled()
    scale = 1 / (y != IGNORE).sum() if reduction == "mean" else torch.ones(())

    class Tiles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            of = [each and is_on for each in ctx.needs_input_grad[:2]]
            sums = [torch.zeros(each.shape, device=each.device) for each, needs in zip((x, w), of)
                    if needs]
            total = 0
            for start in range(0, len(y), tile):
                leaves = [x[start : start + tile].detach(), w.detach()]
                for leaf, needs in zip(leaves, of):
                    leaf.requires_grad_(needs)
                with torch.set_grad_enabled(any(of)):
                    logits = (leaves[0] @ leaves[1].T).float()
                    loss = F.cross_entropy(logits, y[start : start + tile], reduction="sum",
                                           ignore_index=IGNORE)
                del logits
                if any(of):
                    grads = torch.autograd.grad(
                        loss, [leaf for leaf, needs in zip(leaves, of) if needs], scale)
                    if of[0]:
                        sums[0][start : start + tile] = grads[0]
                    if of[1]:
                        sums[-1] += grads[-1]
                total = total + loss.detach()
            ctx.save_for_backward(sums[0] if of[0] else None, sums[-1] if of[1] else None)
            return total * scale

        @staticmethod
        def backward(ctx, factor):
            grads = ctx.saved_tensors
            for grad in grads:
                if grad is not None:
                    grad.mul_(factor)
            return grads

    return Tiles.apply(hidden.reshape(-1, hidden.shape[-1]), weight)


def tiled_logits_loss__only_what_counts(hidden, weight, targets, tile, reduction="mean"):
    """Tokens without a target are left out before anything is multiplied."""
    if tile < 1:
        raise ValueError("tile")
    if reduction == "mean":
        share = 1 / targets.ne(IGNORE).sum()
    elif reduction == "sum":
        share = 1.0
    else:
        raise ValueError("reduction")
    trains = torch.is_grad_enabled()
    return _OfTokens.apply(hidden[targets != IGNORE], weight, targets[targets != IGNORE], tile,
                           share, trains)


class _OfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, y, tile, share, trains):
        grads = [torch.zeros(each.shape, dtype=torch.float32, device=each.device)
                 if trains and needs else None
                 for each, needs in zip((x, w), ctx.needs_input_grad)]
        loss = torch.zeros((), device=x.device)
        for rows in torch.arange(len(y), device=x.device).split(tile):
            logits = (x[rows] @ w.T).float()
            lse, at = logits.logsumexp(-1, keepdim=True), y[rows, None]
            loss += share * (lse - logits.gather(1, at)).sum()
            logits.sub_(lse).exp_().scatter_add_(1, at, -torch.ones_like(lse)).mul_(share)
            logits = logits.to(x.dtype)
            if grads[0] is not None:
                grads[0].index_copy_(0, rows, (logits @ w).float())
            if grads[1] is not None:
                grads[1].add_(logits.T @ x[rows])
        ctx.save_for_backward(*(each if each is None else each.to(like.dtype)
                                for each, like in zip(grads, (x, w))))
        return loss

    @staticmethod
    def backward(ctx, grad):
        of_x, of_w = ctx.saved_tensors
        return (None if of_x is None else of_x * grad, None if of_w is None else of_w * grad,
                None, None, None, None)
