"""Lab 11: traffic that is counted wrongly, plans by which some rank waits, scans that forget."""

import torch
from mutants import mutant

from ranklab.expert_parallel import chunked_scan, moe_traffic, place_experts

REFUSES = ("    if E % R:\n        raise ValueError(f\"{R} ranks must divide the {E} experts\")\n")
TURNED = "2 * row_bytes * (rows + rows.T)"
FILL = ("    for _ in range(ranks * slots - n_experts):\n"
        "        copies[(loads / copies).argmax()] += 1\n")

WRONG = [mutant(answer, *edits, says=says, called=called) for answer, *edits, says, called in (
    (moe_traffic, "    rows = rows - torch.diag(rows.diag())\n", "", "what stays", "own_rows"),
    (moe_traffic, TURNED, "row_bytes * (rows + rows.T)", "forward alone", "forward_alone"),
    (moe_traffic, TURNED, "row_bytes * rows", "the way there alone", "there_alone"),
    (moe_traffic, TURNED, "4 * row_bytes * rows", "four times", "not_turned"),
    (moe_traffic, TURNED, "2 * (rows + rows.T)", "rows, not bytes", "rows"),
    (moe_traffic, TURNED, "2 * row_bytes * rows.T", "what ranks get", "received"),
    (moe_traffic, "counts.unflatten(1, (R, -1)).sum(-1)", "counts.unflatten(1, (-1, R)).sum(1)",
     " is ", "experts_in_turns"),
    (moe_traffic, "counts.unflatten(1, (R, -1)).sum(-1)",
     "counts.view(R * R, -1).sum(-1).view(R, R)", "view size", "needs_contiguous"),
    (moe_traffic, REFUSES, "", "ValueError|Error", "not_refused"),
    (place_experts, FILL, "    copies[: ranks * slots - n_experts] += 1\n", "the fullest rank",
     "copies_of_the_first"),
    (place_experts, "(loads / copies).argmax()", "loads.argmax()", "the fullest rank",
     "copies_of_one"),
    (place_experts, "key=lambda e: -share[e]", "key=lambda e: share[e]", "the fullest rank",
     "lightest_first"),
    (place_experts, "slack=0.08 *", "slack=9.0 *", "the fullest rank", "together_alone"),
    (chunked_scan, "    if rank > 0:\n", "    if False:\n", "this part alone|does not end|is ",
     "alone"),
    (chunked_scan, "h + decay * state[:, None]", "h + state[:, None]", "without its decay",
     "no_decay"),
    (chunked_scan, "a.cumprod(dim=1)", "a", "decayed once", "one_step"),
    (chunked_scan, "a.cumprod(dim=1)", "a.cumprod(dim=1) / a", "one step of decay too few",
     "one_too_few"),
    (chunked_scan, "torch.empty_like(h[:, -1])", "torch.empty(h[:, -1].shape, device=h.device)",
     "bytes of a message|h is", "state_in_float32"),
    (chunked_scan, "group_src=rank - 1", "src=rank - 1", "Pass `group` on|Error|does not end",
     "global_ranks"),
    (chunked_scan, "if rank < R - 1:", "if rank < R:", "Error|does not end|killed",
     "the_last_sends"),
)]  # fmt: skip


def chunked_scan__gathers_all(a, b, group=None):
    """bytes in|calls"""
    import torch.distributed as dist

    from ranklab.expert_parallel import scan

    R, rank = dist.get_world_size(group), dist.get_rank(group)
    both = [None] * R
    dist.all_gather_object(both, (a, b), group=group)
    whole = scan(*(torch.cat(part, 1) for part in zip(*both)))
    before = sum(x.shape[1] for x, _ in both[:rank])
    return whole[:, before : before + a.shape[1]]


def chunked_scan__by_logarithms(a, b, group=None):
    """h is|nan"""
    import torch.distributed as dist

    from ranklab.expert_parallel import scan

    R, rank = dist.get_world_size(group), dist.get_rank(group)
    h, decay = scan(a, b), a.log().cumsum(1).exp()
    if rank > 0:
        dist.recv(before := torch.empty_like(h[:, 0]), group=group, group_src=rank - 1)
        h = h + decay * before[:, None]
    if rank < R - 1:
        dist.send(h[:, -1].contiguous(), group=group, group_dst=rank + 1)
    return h


def chunked_scan__sends_every_step(a, b, group=None):
    """bytes in|does not end|is """
    import torch.distributed as dist

    from ranklab.expert_parallel import scan

    R, rank = dist.get_world_size(group), dist.get_rank(group)
    h = scan(a, b)
    if rank > 0:
        before = torch.empty_like(h)
        dist.recv(before, group=group, group_src=rank - 1)
        h = h + a.cumprod(1) * before[:, -1:]
    if rank < R - 1:
        dist.send(h.contiguous(), group=group, group_dst=rank + 1)
    return h


def place_experts__in_order(chosen, n_experts, ranks, slots, per_node):
    """the fullest rank"""
    if ranks * slots < n_experts:
        raise ValueError("slots")
    order = [*range(n_experts), *range(ranks * slots - n_experts)]
    return [order[r * slots : (r + 1) * slots] for r in range(ranks)]


def place_experts__leaves_one_out(chosen, n_experts, ranks, slots, per_node):
    """stand nowhere"""
    if ranks * slots < n_experts:
        raise ValueError("slots")
    order = chosen.flatten().bincount(minlength=n_experts).argsort(descending=True).tolist()
    order = [*order[:-1], *order][: ranks * slots]
    order[-1] = order[0]
    order = [e if e != n_experts - 1 else order[0] for e in order]
    return [order[r::ranks] for r in range(ranks)]


def place_experts__a_tensor(chosen, n_experts, ranks, slots, per_node):
    """not 8 lists of"""
    if ranks * slots < n_experts:
        raise ValueError("slots")
    return torch.arange(ranks * slots).view(ranks, slots) % n_experts


def place_experts__whole_nodes_apart(chosen, n_experts, ranks, slots, per_node):
    """other nodes"""
    if ranks * slots < n_experts:
        raise ValueError("slots")
    loads = chosen.flatten().bincount(minlength=n_experts).double()
    copies = torch.ones(n_experts, dtype=torch.long)
    for _ in range(ranks * slots - n_experts):
        copies[(loads / copies).argmax()] += 1
    share, plan, load = loads / copies, [[] for _ in range(ranks)], [0.0] * ranks
    for e in share.argsort(descending=True).tolist():
        for _ in range(copies[e]):  # copies of one stand on one node, if they can
            node = min(range(ranks // per_node), key=lambda n: (
                all(len(p) >= slots for p in plan[n * per_node : (n + 1) * per_node]),
                -sum(e in p for p in plan[n * per_node : (n + 1) * per_node]),
                sum(load[n * per_node : (n + 1) * per_node])))
            free = [r for r in range(node * per_node, (node + 1) * per_node)
                    if len(plan[r]) < slots]
            r = min(free, key=lambda r: load[r])
            plan[r].append(e)
            load[r] += share[e].item()
    return plan


def chunked_scan__waits_at_once(a, b, group=None):
    """operations run after"""
    import torch.distributed as dist

    from ranklab.expert_parallel import scan

    rank, R = dist.get_rank(group), dist.get_world_size(group)
    before = torch.zeros_like(b[:, 0])
    if rank:
        dist.irecv(before, group=group, group_src=rank - 1).wait()
    h = scan(a, b) + a.cumprod(1) * before[:, None]
    if rank < R - 1:
        dist.send(h[:, -1].contiguous(), group=group, group_dst=rank + 1)
    return h


def chunked_scan__state_in_the_first(a, b, group=None):
    """operations run after"""
    import torch.distributed as dist

    from ranklab.expert_parallel import scan

    rank, R = dist.get_rank(group), dist.get_world_size(group)
    b = b.clone()
    if rank:
        state = torch.empty_like(b[:, 0])
        dist.irecv(state, group=group, group_src=rank - 1).wait()
        b[:, 0] += a[:, 0] * state
    h = scan(a, b)
    if rank + 1 < R:
        dist.isend(h[:, -1].clone(), group=group, group_dst=rank + 1).wait()
    return h
