"""Send tokens to the ranks of their experts, and back: two all-to-alls."""

from typing import NamedTuple

import torch
import torch.distributed as dist


class Sent(NamedTuple):
    """What a dispatch sent and received; combine_tokens needs it for the way back."""

    order: torch.Tensor  # (m,) indices into chosen.flatten(), in the order in which rows were sent
    to: list  # rows sent to each rank of the group
    came: list  # rows that came from each rank
    by_expert: torch.Tensor  # (n,) the order that sorts received rows by expert
    counts: torch.Tensor  # (E/R,) rows for each expert of this rank; a list will do


def dispatch_tokens(x, chosen, n_experts, group=None):
    """Send the rows of x to their experts' ranks; return (rows, Sent), the rows for this rank.

    Rank r has experts r E/R to (r+1) E/R - 1. The rows are sorted by expert, then by the rank that
    they come from, then by their order on that rank. A row that chose several experts of this rank
    comes once for each of them.
    First the ranks exchange how many rows each expert gets; `to` and `came` are sums of these.
    In Sent, order and by_expert are tensors, to and came lists, and counts a tensor or a list.
    The arguments are not modified.
    Shape: x (N, C); chosen (N, k), -1 for none; rows (n, C), in the dtype of x.
    Cost: an all-to-all of E counts, and one of at most k N rows, which backward repeats.
    Raises: ValueError if R does not divide E.
    Lab: 11
    """
    R, k, flat = dist.get_world_size(group), chosen.shape[1], chosen.flatten()
    if n_experts % R:
        raise ValueError(f"{R} ranks must divide the {n_experts} experts")
    order = flat.argsort(stable=True)[(flat < 0).sum():]  # -1 sorts first: dropped
    counts = flat[order].bincount(minlength=n_experts)  # (E,) rows for each expert
    received = torch.empty_like(counts)  # (R E/R,): from each rank, for each expert here
    dist.all_to_all_single(received, counts, group=group)
    to, came = (c.view(R, -1).sum(1).tolist() for c in (counts, received))
    rows = AllToAll.apply(x[order // k], to, came, group)
    expert = torch.arange(n_experts // R, device=x.device).repeat(R).repeat_interleave(received)
    by_expert = expert.argsort(stable=True)
    return rows[by_expert], Sent(order, to, came, by_expert, received.view(R, -1).sum(0))


def combine_tokens(rows, sent, weights, group=None):
    """Send `rows`, the experts' outputs, back; return each token's weighted sum, (N, C) in float32.

    A token without an expert gets zeros.
    Shape: rows (n, C), in the order of dispatch_tokens; weights (N, k).
    Cost: an all-to-all of the rows in forward, and one in backward.
    Lab: 11
    """
    k = weights.shape[1]
    arrivals = rows[sent.by_expert.argsort()]  # in the order they came
    outputs = AllToAll.apply(arrivals, sent.came, sent.to, group)  # in the order they were sent
    weighted = outputs * weights.flatten()[sent.order, None]
    out = torch.zeros(len(weights), rows.shape[1], device=rows.device)
    return out.index_add(0, sent.order // k, weighted.float())


class AllToAll(torch.autograd.Function):
    """Send rows of x to all ranks, to[r] to rank r; receive came[r] from rank r, in rank order."""

    @staticmethod
    def forward(ctx, x, to, came, group):
        ctx.to, ctx.came, ctx.group = to, came, group
        return all_to_all_rows(x, to, came, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_to_all_rows(gradient, ctx.came, ctx.to, ctx.group), None, None, None


def all_to_all_rows(x, to, came, group=None):
    """Exchange unequal numbers of rows, as AllToAll does, but without a gradient."""
    out = x.new_empty(sum(came), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), came, to, group=group)
    return out
