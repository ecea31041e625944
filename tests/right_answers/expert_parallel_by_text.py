"""Lab 11: right answers that were written from the lab's text alone."""

import math
import random

import numpy as np
import torch
import torch.distributed as dist

from ranklab.expert_parallel import AllToAll, chosen_together


def copies_of(loads, slots):
    """How many of all slots each expert gets: the next one goes to the fullest copy."""
    copies = np.ones(len(loads), dtype=int)
    for _ in range(slots - len(loads)):
        copies[(loads / copies).argmax()] += 1
    return copies


def packed(entries, share, ranks, slots):
    """Entries over ranks of `slots` places: heaviest first, then swaps while the fullest falls."""
    rows = [[] for _ in range(ranks)]
    for expert in sorted(entries, key=lambda expert: -share[expert]):
        free = [row for row in rows if len(row) < slots]
        min(free, key=lambda row: (sum(share[e] for e in row), row.count(expert))).append(expert)
    for _ in range(200):
        loads = np.array([sum(share[e] for e in row) for row in rows])
        full, best = loads.argmax(), None
        for other in range(ranks):
            for i, a in enumerate(rows[full]):
                for j, b in enumerate(rows[other]):
                    moved = share[a] - share[b]
                    worst = max(loads[full] - moved, loads[other] + moved)
                    if moved > 0 and worst < loads[full] - 1e-9 and (
                            best is None or worst < best[0]):
                        best = worst, other, i, j
        if best is None:
            return rows
        _, other, i, j = best
        rows[full][i], rows[other][j] = rows[other][j], rows[full][i]
    return rows


def nodes_reached(chosen, has, ranks, per_node):
    """How many other nodes the tokens reach; has (nodes, E): is there a copy on the node?"""
    node = np.arange(len(chosen)) % ranks // per_node
    target = np.where(has[node[:, None], chosen], node[:, None], has.argmax(0)[chosen])
    reached = np.zeros((len(chosen), len(has)), dtype=bool)
    np.put_along_axis(reached, target, True, axis=1)
    return int(reached.sum() - reached[np.arange(len(chosen)), node].sum())


def place_experts__annealing(chosen, n_experts, ranks, slots, per_node):
    """Simulated annealing over swaps between nodes, by counting on the trace; then packed."""
    if ranks * slots < n_experts:
        raise ValueError(f"{ranks} x {slots} slots are too few for {n_experts} experts")
    picks, rng = np.asarray(chosen), random.Random(0)
    loads = np.bincount(picks.ravel(), minlength=n_experts).astype(float)
    copies = copies_of(loads, ranks * slots)
    share, nodes = loads / copies, ranks // per_node
    seats = [[] for _ in range(nodes)]
    for expert in np.argsort(-share, kind="stable"):
        for _ in range(copies[expert]):
            free = [seat for seat in seats if len(seat) < per_node * slots]
            min(free, key=lambda seat: (seat.count(expert), sum(share[seat]))).append(int(expert))
    sample = picks[:6000 // ranks * ranks] if len(picks) > 6000 else picks

    def cost(seats):
        has = np.zeros((nodes, n_experts), dtype=bool)
        for node, seat in enumerate(seats):
            has[node, seat] = True
        over = max(share[seat].sum() for seat in seats) * nodes / max(loads.sum(), 1) - 1.02
        return nodes_reached(sample, has, ranks, per_node) / len(sample) + 20 * max(over, 0)

    now = best = cost(seats)
    kept = [list(seat) for seat in seats]
    turns = 2500 if nodes > 1 and len(sample) else 0
    for turn in range(turns):
        heat = 0.02 * (1 - turn / turns) ** 2 + 1e-5
        (a, i), (b, j) = ((n, rng.randrange(len(seats[n]))) for n in rng.sample(range(nodes), 2))
        if seats[a][i] == seats[b][j]:
            continue
        seats[a][i], seats[b][j] = seats[b][j], seats[a][i]
        new = cost(seats)
        if new < now or rng.random() < math.exp((now - new) / heat):
            now = new
            if now < best:
                best, kept = now, [list(seat) for seat in seats]
        else:
            seats[a][i], seats[b][j] = seats[b][j], seats[a][i]
    return [row for seat in kept for row in packed(seat, share, per_node, slots)]


def place_experts__growing(chosen, n_experts, ranks, slots, per_node):
    """Nodes grow one by one around a heavy expert, by who is chosen with whom, up to their load."""
    if ranks * slots < n_experts:
        raise ValueError(f"{ranks} x {slots} slots are too few for {n_experts} experts")
    picks = torch.as_tensor(chosen)
    together = np.array(chosen_together(picks, n_experts), dtype=float)
    np.fill_diagonal(together, 0)
    loads = np.bincount(picks.flatten().numpy(), minlength=n_experts).astype(float)
    copies = copies_of(loads, ranks * slots)
    share, nodes, seats = loads / copies, ranks // per_node, []
    left = copies.copy()
    for node in range(nodes):
        room = per_node * slots
        total, seat = (left * share).sum() / (nodes - node), []
        need = left - (nodes - 1 - node)  # so many copies that a node must take one
        while len(seat) < room:
            here = sum(share[seat])
            bond = together[:, seat].sum(1) if seat else loads
            # what comes must leave places of about the mean load for the rest
            rest = (total - here) / (room - len(seat))
            fit = -np.abs(share - rest) / (share.max() + 1e-9)
            weight = 0.15 + 0.85 * (len(seat) / room) ** 2
            score = (1 - weight) * bond / (bond.max() + 1e-9) + weight * fit
            score[np.isin(np.arange(n_experts), seat)] -= 5
            score += (need > 0) * 0.5 * (copies > 1)
            score[left == 0] = -np.inf
            expert = int(score.argmax())
            seat.append(expert)
            left[expert] -= 1
            need[expert] -= 1
        seats.append(seat)
    # Refine: the best swap of two nodes, by the trace, while their loads stay near the mean.
    trace, mean = picks.numpy(), loads.sum() / nodes
    has = np.array([np.isin(np.arange(n_experts), seat) for seat in seats])
    for _ in range(60):
        full = max(range(nodes), key=lambda n: sum(share[seats[n]]))
        excess = sum(share[seats[full]])
        if nodes == 1 or excess <= 1.03 * mean:
            break
        swaps = []
        for n in set(range(nodes)) - {full}:
            for i, a in enumerate(seats[full]):
                for j, b in enumerate(seats[n]):
                    moved = share[a] - share[b]
                    worst = max(excess - moved, sum(share[seats[n]]) + moved)
                    if moved > 0 and worst < excess - 1e-9:
                        swaps.append((worst, n, i, j))
        if not swaps:
            break
        aim = max(1.03 * mean, min(swaps)[0])
        swaps = sorted(swaps, key=lambda swap: max(swap[0], aim))[:40]
        costs = []
        for worst, n, i, j in swaps:
            trial = [list(seat) for seat in seats]
            trial[full][i], trial[n][j] = trial[n][j], trial[full][i]
            has = np.array([np.isin(np.arange(n_experts), seat) for seat in trial])
            costs.append((max(worst, aim), nodes_reached(trace, has, ranks, per_node), n, i, j))
        _, _, n, i, j = min(costs)
        seats[full][i], seats[n][j] = seats[n][j], seats[full][i]
    return [row for seat in seats for row in packed(seat, share, per_node, slots)]


def place_experts__spectrum(chosen, n_experts, ranks, slots, per_node):
    """Recursive bisection by the Fiedler vector of who is chosen with whom; then pair swaps."""
    if ranks * slots < n_experts:
        raise ValueError(f"{ranks} x {slots} slots are too few for {n_experts} experts")
    picks = torch.as_tensor(chosen)
    together = np.array(chosen_together(picks, n_experts), dtype=float)
    loads = np.bincount(picks.flatten().numpy(), minlength=n_experts).astype(float)
    copies = copies_of(loads, ranks * slots)
    share, nodes = loads / copies, ranks // per_node
    expert_of = np.repeat(np.arange(n_experts), copies)
    close = together[expert_of][:, expert_of] / np.outer(copies, copies)[expert_of][:, expert_of]
    close[expert_of[:, None] == expert_of] = 0
    seats = [np.arange(len(expert_of))]

    def halves(part, first, second):
        near = close[np.ix_(part, part)]
        laplace = np.diag(near.sum(1)) - near
        order = part[np.argsort(np.linalg.eigh(laplace)[1][:, 1 if len(part) > 1 else 0])]
        cut = len(part) * first // (first + second)
        return order[:cut], order[cut:]

    def split(part, count):
        if count == 1:
            return [part]
        one, two = halves(part, count // 2, count - count // 2)
        return split(one, count // 2) + split(two, count - count // 2)

    seats = split(seats[0], nodes)
    weight, mean = share[expert_of], loads.sum() / nodes
    home = np.empty(len(expert_of), dtype=int)
    for node, part in enumerate(seats):
        home[part] = node

    def strain(totals):
        return 30 * mean * np.clip(totals / mean - 1.02, 0, None) ** 1.5 if mean else totals * 0

    for _ in range(8 * len(home)):  # the swap with the largest gain, loads and copies in mind
        member = np.eye(nodes)[home]
        bond = close @ member
        totals = member.T @ weight
        twins = (expert_of[:, None] == expert_of) @ member
        bond = bond - close.sum() / len(home) * twins
        stay = bond[np.arange(len(home)), home] + close.sum() / len(home)
        gain = (bond[:, home] - stay[:, None]) + (bond[:, home] - stay[:, None]).T - 2 * close
        moved = weight[:, None] - weight[None]
        gain -= (strain(totals[home][:, None] - moved) + strain(totals[home][None] + moved)
                 - strain(totals)[home][:, None] - strain(totals)[home][None])
        gain[home[:, None] == home] = 0
        i, j = np.unravel_index(gain.argmax(), gain.shape)
        if gain[i, j] <= 1e-6:
            break
        home[i], home[j] = home[j], home[i]
    return [row for node in range(nodes)
            for row in packed(expert_of[home == node].tolist(), share, per_node, slots)]


def dispatch_once__pairs(x, chosen, n_experts, inside, across):
    """Pairs (token, node), then pairs (row, expert), as lists; experts travel with both hops."""
    nodes, ranks = dist.get_world_size(across), dist.get_world_size(inside)
    if n_experts % (nodes * ranks):
        raise ValueError(f"{nodes} x {ranks} ranks, {n_experts} experts")
    of_node, of_rank = n_experts // nodes, n_experts // (nodes * ranks)

    def exchange(rows, labels, targets, group):
        """Send row i and its label to targets[i], which is sorted."""
        size = dist.get_world_size(group)
        to = [targets.count(r) for r in range(size)]
        came = torch.empty(size, dtype=torch.int64, device=x.device)
        dist.all_to_all_single(came, torch.tensor(to, device=x.device), group=group)
        came = came.tolist()
        return [AllToAll.apply(each, to, came, group) for each in (rows, labels)]

    wanted = chosen.tolist()
    pairs = sorted({(e // of_node, token) for token, experts in enumerate(wanted)
                    for e in experts if e >= 0})
    tokens = torch.tensor([token for _, token in pairs], dtype=torch.int64, device=x.device)
    rows, labels = exchange(x[tokens], chosen[tokens], [node for node, _ in pairs], across)
    first = dist.get_rank(across) * of_node
    pairs = sorted((e - first, row) for row, experts in enumerate(labels.tolist())
                   for e in experts if first <= e < first + of_node)
    places = torch.tensor([row for _, row in pairs], dtype=torch.int64, device=x.device)
    experts = torch.tensor([[e] for e, _ in pairs], dtype=torch.int64, device=x.device)
    rows, labels = exchange(rows[places], experts.view(-1, 1), [e // of_rank for e, _ in pairs],
                            inside)
    labels = labels[:, 0] % of_rank
    return rows[labels.argsort()], labels.bincount(minlength=of_rank)


def mxfp8_all_to_all__bits_of_a_float(x, to, came, group=None):
    """The exponent is read from the bits of largest / 448; any bit behind it rounds it up."""
    n, C = x.shape
    if C % 32:
        raise ValueError(f"rows of {C} numbers have no whole blocks of 32")
    blocks = x.float().reshape(-1, 32)
    bits = (blocks.abs().max(dim=1).values / 448).view(torch.int32)
    byte = (bits >> 23) + ((bits & 0x7FFFFF) > 0)
    byte = byte.clamp(1, 254)
    numbers = (blocks * torch.pow(2.0, 127.0 - byte)[:, None]).to(torch.float8_e4m3fn)
    sent = [numbers.view(torch.uint8).view(n, C), byte.to(torch.uint8).view(n, C // 32)]
    numbers, byte = (AllToAll.apply(each, to, came, group) for each in sent)
    scale = torch.pow(2.0, byte.float() - 127).repeat_interleave(32, dim=1)
    return (numbers.view(torch.float8_e4m3fn).float() * scale).to(x.dtype)
