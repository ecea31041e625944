"""Lab 11: right answers of another kind."""

import torch
import torch.distributed as dist

from ranklab.expert_parallel import Sent, scan
from ranklab.expert_parallel.dispatch import AllToAll, dispatch_tokens
from ranklab.expert_parallel.place import chosen_together


def top_k_route__one_after_the_other(logits, k, renormalize=True, bias=None):
    if k < 1 or k > logits.shape[-1]:
        raise ValueError(f"k={k}")
    P = torch.softmax(logits.to(torch.float32), -1)
    left = (logits.float() if bias is None else P + bias).detach().clone()
    chosen = []
    for _ in range(k):
        chosen.append((left == left.max(-1, keepdim=True).values).int().argmax(-1))
        left.scatter_(-1, chosen[-1][..., None], float("-inf"))
    chosen = torch.stack(chosen, -1)
    if renormalize:
        return chosen, torch.softmax(logits.float().gather(-1, chosen), -1)
    return chosen, torch.take_along_dim(P, chosen, -1)


def capacity__by_loops(chosen, n_experts, factor):
    T, k = chosen.shape[-2:]
    room, out = -(-T * k * factor // n_experts), chosen.clone().reshape(-1, T, k)
    for sequence in out:
        taken = torch.zeros(n_experts)
        for j in range(k):
            for t in range(T):
                e = sequence[t, j].item()
                taken[e] += 1
                if taken[e] > room:
                    sequence[t, j] = -1
    return out.view(chosen.shape)


def load_balance_loss__by_bincount(logits, chosen):
    *batch, T, E = logits.shape
    P = torch.softmax(logits.float(), -1)
    flat = chosen.reshape(-1, T * chosen.shape[-1])
    f = torch.stack([row.bincount(minlength=E) for row in flat]) / flat.shape[1]
    return (E * f.view(*batch, 1, E) * P / T).sum((-2, -1))


def dispatch_tokens__rank_by_rank(x, chosen, n_experts, group=None):
    R, k = dist.get_world_size(group), chosen.shape[1]
    if n_experts % R:
        raise ValueError(f"{n_experts} experts, {R} ranks")
    each = n_experts // R
    order = torch.tensor([t * k + j for e in range(n_experts)
                          for t, j in (chosen == e).nonzero().tolist()], device=x.device).long()
    mine = torch.stack([(chosen == e).sum() for e in range(n_experts)]).view(R, each)
    theirs = torch.zeros_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    to, came = mine.sum(1).tolist(), theirs.sum(1).tolist()
    arrived = AllToAll.apply(x.index_select(0, torch.div(order, k, rounding_mode="floor")), to,
                             came, group)
    starts = [0, *theirs.flatten().cumsum(0).tolist()]
    by_expert = torch.cat([torch.arange(starts[r * each + e], starts[r * each + e + 1],
                                        device=x.device) for e in range(each) for r in range(R)])
    return arrived[by_expert], Sent(order, to, came, by_expert, theirs.sum(0))


def combine_tokens__by_choice(rows, sent, weights, group=None):
    back = torch.zeros_like(rows).index_copy(0, sent.by_expert, rows)
    home = AllToAll.apply(back, sent.came, sent.to, group).float()
    every = home.new_zeros(weights.numel(), rows.shape[1]).index_copy(0, sent.order, home)
    return (every.view(*weights.shape, rows.shape[1]) * weights[..., None]).sum(1)


def expert_gradients__sums_first(shared, experts, own, group=None):
    works = []
    for group_of, parameters in ((own, experts), (group, shared)):
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            works.append((p, dist.all_reduce(p.grad, group=group_of, async_op=True)))
    for p, work in works:
        work.wait()
        p.grad.div_(dist.get_world_size(group))


def moe_traffic__by_loops(counts, row_bytes):
    R, E = counts.shape
    if E % R:
        raise ValueError(f"{E} experts, {R} ranks")
    out = torch.zeros(R, R, dtype=torch.long)
    for r in range(R):
        for e in range(E):
            s = e // (E // R)
            if r != s:
                out[r, s] += 2 * int(counts[r, e]) * row_bytes
                out[s, r] += 2 * int(counts[r, e]) * row_bytes
    return out


def place_experts__swaps(chosen, n_experts, ranks, slots, per_node):
    """Packed by load first; then experts of two nodes of nearly equal load change places."""
    if ranks * slots < n_experts:
        raise ValueError(f"{slots} slots")
    loads = chosen.flatten().bincount(minlength=n_experts).tolist()
    copies = [1] * n_experts
    for _ in range(ranks * slots - n_experts):
        copies[max(range(n_experts), key=lambda e: loads[e] / copies[e])] += 1
    share, together = [a / b for a, b in zip(loads, copies)], chosen_together(chosen, n_experts)
    plan, load = [[] for _ in range(ranks)], [0.0] * ranks
    for e in sorted((e for e in range(n_experts) for _ in range(copies[e])),
                    key=lambda e: -share[e]):
        r = min((r for r in range(ranks) if len(plan[r]) < slots),
                key=lambda r: (e in plan[r], load[r]))
        plan[r].append(e)
        load[r] += share[e]

    def meets(e, rank, without):
        node = rank // per_node * per_node
        return sum(together[e, o].item() for other in plan[node : node + per_node] for o in other
                   if o not in (e, without))

    most = 1.06 * sum(load) / ranks
    for _ in range(3):
        for a in range(ranks):
            for b in range(ranks):
                for i in range(slots):
                    for j in range(slots):
                        x, y = plan[a][i], plan[b][j]
                        more = share[y] - share[x]
                        if a // per_node == b // per_node or x in plan[b] or y in plan[a] or max(
                                load[a] + more, load[b] - more) > max(most, load[a], load[b]):
                            continue
                        if meets(x, b, y) + meets(y, a, x) > meets(x, a, y) + meets(y, b, x):
                            plan[a][i], plan[b][j] = y, x
                            load[a], load[b] = load[a] + more, load[b] - more
    return plan


def chunked_scan__products_by_hand(a, b, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    h = scan(a, b)
    share = [a[:, 0]]
    for t in range(1, a.shape[1]):
        share.append(share[-1] * a[:, t])
    share = torch.stack(share, 1)
    if rank:
        state = torch.empty_like(b[:, 0])
        dist.irecv(state, group=group, group_src=rank - 1).wait()
        h += share * state.unsqueeze(1)
    if rank + 1 < R:
        dist.isend(h[:, -1].clone(), group=group, group_dst=rank + 1).wait()
    return h


def chunked_scan__receives_first_waits_last(a, b, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    before = torch.zeros_like(b[:, 0])
    work = dist.irecv(before, group=group, group_src=rank - 1) if rank else None
    h, decay = scan(a, b), a.cumprod(1)
    if work:
        work.wait()
        h = h + decay * before[:, None]
    if rank < R - 1:
        dist.send(h[:, -1].contiguous(), group=group, group_dst=rank + 1)
    return h


def load_balance_loss__float64(logits, chosen):
    *batch, T, E = logits.shape
    P = torch.softmax(logits.double(), -1).mean(-2)
    f = torch.nn.functional.one_hot(chosen, E).sum((-3, -2)) / (T * chosen.shape[-1])
    return (E * (f.double() * P).sum(-1)).float()


def load_balance_loss__log_softmax(logits, chosen):
    *batch, T, E = logits.shape
    P = torch.log_softmax(logits.float(), -1).exp().mean(-2)
    f = torch.nn.functional.one_hot(chosen, E).sum((-3, -2)) / (T * chosen.shape[-1])
    return E * (f * P).sum(-1)


def top_k_route__float64(logits, k, renormalize=True, bias=None):
    if k < 1 or k > logits.shape[-1]:
        raise ValueError(f"k={k}")
    logits = logits.double()
    P = logits.softmax(-1)
    scores = logits if bias is None else logits.float().softmax(-1) + bias
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
    w = logits.gather(-1, chosen).softmax(-1) if renormalize else P.gather(-1, chosen)
    return chosen, w.float()


def dispatch_once__masks_and_loops(x, chosen, n_experts, inside, across):
    """A mask of nodes, lists of tokens, and a table of counts for the second hop."""
    M, L, k = dist.get_world_size(across), dist.get_world_size(inside), chosen.shape[1]
    if n_experts % (M * L):
        raise ValueError(f"{n_experts} experts, {M} x {L} ranks")
    each, per_rank, m = n_experts // M, n_experts // (M * L), dist.get_rank(across)
    nodes = [((chosen >= n * each) & (chosen < (n + 1) * each)).any(1).nonzero()[:, 0]
             for n in range(M)]
    to = [len(tokens) for tokens in nodes]
    came = torch.zeros(M, dtype=torch.long, device=x.device)
    dist.all_to_all_single(came, torch.tensor(to, device=x.device), group=across)
    order = torch.cat(nodes)
    rows = AllToAll.apply(x[order], to, came.tolist(), across)
    choices = torch.zeros(len(rows), k, dtype=torch.long, device=x.device)
    dist.all_to_all_single(choices, chosen[order], came.tolist(), to, group=across)
    places = [(choices == e).any(1).nonzero()[:, 0] for e in range(m * each, (m + 1) * each)]
    counts = torch.tensor([len(place) for place in places], device=x.device)
    theirs = torch.zeros_like(counts)
    dist.all_to_all_single(theirs, counts, group=inside)
    theirs = theirs.view(L, per_rank)
    rows = AllToAll.apply(rows[torch.cat(places)], counts.view(L, per_rank).sum(1).tolist(),
                          theirs.sum(1).tolist(), inside)
    parts = rows.split(theirs.flatten().tolist())
    return (torch.cat([parts[rank * per_rank + e] for e in range(per_rank) for rank in range(L)]),
            theirs.sum(0).tolist())


def dispatch_once__by_one_bit_each(x, chosen, n_experts, inside, across):
    """With the rows go the bits of a node's experts, in one whole number a row."""
    M, L = dist.get_world_size(across), dist.get_world_size(inside)
    if n_experts % (M * L):
        raise ValueError(f"{n_experts} experts, {M} x {L} ranks")
    each = n_experts // M
    hot = torch.zeros(len(x), n_experts + 1, dtype=torch.long, device=x.device)
    hot = hot.scatter(1, chosen.where(chosen >= 0, n_experts), 1)[:, :-1].view(len(x), M, each)
    bits = (hot << torch.arange(each, device=x.device)).sum(2)  # (N, M)
    nodes = torch.arange(M, device=x.device).where(bits > 0, -1)
    rows, sent = dispatch_tokens(x, nodes, M, across)
    mine = AllToAll.apply(bits.flatten()[sent.order], sent.to, sent.came, across)
    numbers = torch.arange(each, device=x.device)
    here = numbers.where((mine[:, None] >> numbers) & 1 > 0, -1)
    rows, sent = dispatch_tokens(rows, here, each, inside)
    return rows, sent.counts


def mxfp8_all_to_all__one_message(x, to, came, group=None):
    """Scales by torch's own 8-bit type, and one all-to-all of 33 bytes for 32 numbers."""
    if x.shape[1] % 32:
        raise ValueError(f"{x.shape[1]} numbers a row")
    blocks = x.double().reshape(len(x), -1, 32)
    scale = torch.exp2((blocks.abs().amax(2) / 448).clamp(min=2.0**-126).log2().ceil()).float()
    numbers = (blocks.float() / scale[..., None]).to(torch.float8_e4m3fn)
    wire = torch.cat([numbers.view(torch.uint8),
                      scale.to(torch.float8_e8m0fnu).view(torch.uint8)[..., None]], 2)
    wire = AllToAll.apply(wire, to, came, group)
    scale = wire[..., 32].contiguous().view(torch.float8_e8m0fnu).float()
    numbers = wire[..., :32].contiguous().view(torch.float8_e4m3fn).float()
    return (numbers * scale[..., None]).flatten(1).to(x.dtype)


def mxfp8_all_to_all__block_by_block(x, to, came, group=None):
    """Loops over blocks; the scale is doubled until the block fits."""
    n, C = x.shape
    if C % 32:
        raise ValueError(f"32 does not divide {C}")
    numbers = torch.zeros(n, C, dtype=torch.uint8, device=x.device)
    scales = torch.zeros(n, C // 32, dtype=torch.uint8, device=x.device)
    for i in range(n):
        for b in range(C // 32):
            block = x[i, 32 * b:32 * b + 32].double()
            largest, power = block.abs().max().item(), -100
            while largest > 448 * 2.0**power:
                power += 1
            numbers[i, 32 * b:32 * b + 32] = (block * 2.0**-power).float().to(
                torch.float8_e4m3fn).view(torch.uint8)
            scales[i, b] = power + 127
    sizes = list(came), list(to)
    got = [torch.zeros(sum(came), each.shape[1], dtype=torch.uint8, device=x.device)
           for each in (numbers, scales)]
    for space, each in zip(got, (numbers, scales)):
        dist.all_to_all_single(space, each, *sizes, group=group)
    exponent = (got[1].double() - 127).repeat_interleave(32, 1)
    return (got[0].view(torch.float8_e4m3fn).double() * 2.0**exponent).to(x.dtype)
