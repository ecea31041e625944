"""Lab 11: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranklab.expert_parallel import AllToAll, Sent, expert_slots, scan


def top_k_route__stable_sort(logits, k, renormalize=True, bias=None):
    """Stable descending sort of the scores, softmax of the gathered logits."""
    E = logits.shape[-1]
    if not 1 <= k <= E:
        raise ValueError(f"k={k} must be between 1 and E={E}")
    wide = logits.float()
    scores = logits.detach() if bias is None else wide.detach().softmax(-1) + bias.detach()
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    if renormalize:
        weights = wide.gather(-1, chosen).softmax(-1)
    else:
        weights = wide.softmax(-1).gather(-1, chosen)
    return chosen, weights


def top_k_route__count_better(logits, k, renormalize=True, bias=None):
    """Place of an expert = number of better ones, counted pairwise; all in float64."""
    E = logits.shape[-1]
    if k < 1 or k > E:
        raise ValueError(f"k={k} is not in 1..{E}")
    wide = logits.double()
    log_p = torch.log_softmax(wide, -1)
    with torch.no_grad():
        s = wide if bias is None else log_p.exp() + bias.double()
        this, other = s.unsqueeze(-1), s.unsqueeze(-2)
        i = torch.arange(E, device=logits.device)
        earlier = i.unsqueeze(0) < i.unsqueeze(1)
        place = ((other > this) | ((other == this) & earlier)).sum(-1)
        chosen = place.argsort(-1)[..., :k]
    mine = log_p.gather(-1, chosen)
    weights = mine.softmax(-1) if renormalize else mine.exp()
    return chosen, weights.float()


def capacity__cumsum(chosen, n_experts, factor):
    """One-hot and a running count, second choices behind all first ones."""
    T, k = chosen.shape[-2:]
    room = expert_slots(T, n_experts, k, factor)
    line = chosen.transpose(-1, -2).flatten(-2)  # (..., k T)
    hot = F.one_hot(line, n_experts)
    place = (hot.cumsum(-2) * hot).sum(-1)
    line = torch.where(place <= room, line, torch.full_like(line, -1))
    return line.unflatten(-1, (k, T)).transpose(-1, -2).contiguous()


def capacity__python_loop(chosen, n_experts, factor):
    """Plain Python counters for each sequence."""
    T, k = chosen.shape[-2:]
    room = expert_slots(T, n_experts, k, factor)
    out = chosen.detach().clone(memory_format=torch.contiguous_format)
    for sequence in out.view(-1, T, k):
        numbers = sequence.tolist()
        taken = [0] * n_experts
        for j in range(k):
            for t in range(T):
                e = numbers[t][j]
                if taken[e] == room:
                    numbers[t][j] = -1
                else:
                    taken[e] += 1
        sequence.copy_(torch.tensor(numbers, dtype=out.dtype, device=out.device))
    return out


def dispatch_tokens__sorts(x, chosen, n_experts, group=None):
    """Stable argsorts and repeat_interleave of the expert labels."""
    R, k, flat = dist.get_world_size(group), chosen.shape[1], chosen.flatten()
    if n_experts % R:
        raise ValueError(f"{R} ranks do not divide {n_experts} experts")
    each = n_experts // R
    order = flat.argsort(stable=True)
    order = order[int((flat < 0).sum()):]
    counts = torch.bincount(flat[order], minlength=n_experts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    to, came = counts.view(R, each).sum(1).tolist(), theirs.view(R, each).sum(1).tolist()
    arrived = AllToAll.apply(x[order // k], to, came, group)
    labels = torch.arange(each, device=x.device).repeat(R).repeat_interleave(theirs)
    by_expert = labels.argsort(stable=True)
    return arrived[by_expert], Sent(order, to, came, by_expert, theirs.view(R, each).sum(0))


def dispatch_tokens__loops(x, chosen, n_experts, group=None):
    """Places of each expert by nonzero; the order on arrival from offsets, by loops; lists."""
    R, k, flat = dist.get_world_size(group), chosen.shape[1], chosen.flatten()
    if n_experts % R != 0:
        raise ValueError("R must divide E")
    each = n_experts // R
    places = [torch.nonzero(flat == e).flatten() for e in range(n_experts)]
    order = torch.cat(places)
    mine = torch.tensor([len(p) for p in places], dtype=torch.int32, device=x.device)
    got = torch.zeros_like(mine)
    dist.all_to_all_single(got, mine, [each] * R, [each] * R, group=group)
    to = [sum(len(p) for p in places[r * each:(r + 1) * each]) for r in range(R)]
    table = got.view(R, each).tolist()
    came = [sum(line) for line in table]
    rows = x.index_select(0, torch.div(order, k, rounding_mode="floor"))
    rows = AllToAll.apply(rows, to, came, group)
    start, at = [], 0
    for line in table:
        start.append([])
        for n in line:
            start[-1].append(at)
            at += n
    by_expert = [i for e in range(each) for r in range(R)
                 for i in range(start[r][e], start[r][e] + table[r][e])]
    by_expert = torch.tensor(by_expert, dtype=torch.int64, device=x.device)
    counts = [sum(line[e] for line in table) for e in range(each)]
    return rows.index_select(0, by_expert), Sent(order, to, came, by_expert, counts)


def combine_tokens__index_add(rows, sent, weights, group=None):
    """Unsort by a new tensor, travel back, index_add in float32."""
    back = torch.zeros_like(rows).index_copy(0, sent.by_expert, rows)
    back = AllToAll.apply(back, sent.came, sent.to, group)
    N, k = weights.shape
    back = back.float() * weights.float().flatten()[sent.order].unsqueeze(1)
    out = torch.zeros(N, rows.shape[1], dtype=torch.float32, device=rows.device)
    return out.index_add(0, sent.order // k, back)


def combine_tokens__table(rows, sent, weights, group=None):
    """Inverse permutation by argsort, a table (N, k, C) in float64, einsum over k."""
    back = AllToAll.apply(rows[sent.by_expert.argsort()], sent.came, sent.to, group)
    N, k = weights.shape
    table = torch.zeros(N * k, rows.shape[1], dtype=torch.float64, device=rows.device)
    table = table.index_put((sent.order,), back.double())
    table = table.view(N, k, -1) if N else table.view(0, k, rows.shape[1])
    return torch.einsum("nkc,nk->nc", table,
                        weights.double()).float()


def load_balance_loss__one_hot(logits, chosen):
    """One-hot mean times mean probability."""
    E = logits.shape[-1]
    f = F.one_hot(chosen, E).float().mean((-3, -2))
    P = logits.float().softmax(-1).mean(-2)
    return E * (f * P).sum(-1)


def load_balance_loss__gather(logits, chosen):
    """Mean over all choices of the chosen expert's P: the counts never appear; float64."""
    E = logits.shape[-1]
    P = torch.softmax(logits.double(), -1).mean(-2)
    return (P.gather(-1, chosen.flatten(-2)).mean(-1) * E).float()


def expert_gradients__one_by_one(shared, experts, own, group=None):
    """One all-reduce for each gradient, divided before."""
    R = dist.get_world_size(group)
    for parameters, where in ((shared, group), (experts, own)):
        for p in parameters:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            grad = (grad.detach() / R).contiguous()
            dist.all_reduce(grad, group=where)
            p.grad = grad


def expert_gradients__flat(shared, experts, own, group=None):
    """One flat message for each type and device, divided after the sum, written in place."""
    R = dist.get_world_size(group)
    for where, parameters in ((own, list(experts)), (group, list(shared))):
        kinds = {}
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            kinds.setdefault((p.grad.dtype, p.grad.device), []).append(p.grad)
        for grads in kinds.values():
            flat = torch.cat([g.reshape(-1) for g in grads])
            dist.all_reduce(flat, group=where)
            flat /= R
            for g, part in zip(grads, flat.split([g.numel() for g in grads])):
                g.copy_(part.view(g.shape))


def moe_traffic__transpose(counts, row_bytes):
    """Sum over each rank's experts, plus the transpose, twice."""
    R, E = counts.shape
    if E % R:
        raise ValueError(f"R={R} must divide E={E}")
    rows = counts.long().reshape(R, R, E // R).sum(2)
    rows = rows - torch.diag(rows.diagonal())
    return 2 * row_bytes * (rows + rows.T)


def moe_traffic__loops(counts, row_bytes):
    """Four messages for each pair and expert, by loops."""
    R, E = counts.shape
    if E % R != 0:
        raise ValueError("R must divide E")
    table, out = counts.tolist(), [[0] * R for _ in range(R)]
    for r in range(R):
        for e in range(E):
            s = e // (E // R)
            if s != r:
                n = int(table[r][e]) * row_bytes
                out[r][s] += n  # dispatch
                out[s][r] += n  # combine
                out[r][s] += n  # backward of combine
                out[s][r] += n  # backward of dispatch
    return torch.tensor(out, dtype=torch.int64, device=counts.device)


def chunked_scan__cumprod(a, b, group=None):
    """Given scan and cumprod, then a blocking recv; the state goes on before the rest."""
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    h, product = scan(a, b), a.cumprod(1)
    if rank:
        state = torch.empty_like(a[:, 0], memory_format=torch.contiguous_format)
        dist.recv(state, group=group, group_src=rank - 1)
        h = h + product * state.unsqueeze(1)
    if rank < R - 1:
        dist.send(h[:, -1].contiguous(), group=group, group_dst=rank + 1)
    return h


def chunked_scan__doubling(a, b, group=None):
    """irecv posted first; a scan by doubling in float64; last state first, then the rest."""
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    B, T, C = b.shape
    state = torch.zeros(B, C, dtype=b.dtype, device=b.device)
    work = dist.irecv(state, group=group, group_src=rank - 1) if rank > 0 else None
    A, h = a.double(), b.double()
    step = 1
    while step < T:
        h = torch.cat([h[:, :step], h[:, step:] + A[:, step:] * h[:, :-step]], 1)
        A = torch.cat([A[:, :step], A[:, step:] * A[:, :-step]], 1)
        step *= 2
    if work is not None:
        work.wait()
    state = state.double()
    sending = None
    if rank + 1 < R:
        last = (h[:, -1] + A[:, -1] * state).to(b.dtype)
        sending = dist.isend(last, group=group, group_dst=rank + 1)
    out = (h + A * state[:, None]).to(b.dtype)
    if sending is not None:
        sending.wait()
    return out
