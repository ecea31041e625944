"""Which experts stand on which rank, by what a trace says of their loads. Nothing is sent."""

import itertools

import torch

LEAN = 1.03  # times the mean load of a node


def place_experts(chosen, n_experts, ranks, slots, per_node):
    """[[experts of rank 0], [of rank 1], ...]: `slots` on each rank, and each expert at least once.

    An expert in several slots has its tokens shared by them. The fullest rank has little more than
    the mean load, and experts that are often chosen together stand on one node.
    chosen    (N, k): a trace
    per_node  ranks of a node, which share NVLink
    error     ValueError where the slots are fewer than the experts
    source    DeepSeek's EPLB, https://github.com/deepseek-ai/EPLB: copies first, then packing
    lab       11
    """
    if ranks * slots < n_experts:
        raise ValueError(f"{ranks} ranks with {slots} slots have no place for {n_experts} experts")
    loads = chosen.flatten().bincount(minlength=n_experts).double()
    copies = torch.ones(n_experts, dtype=torch.long)
    for _ in range(ranks * slots - n_experts):
        copies[(loads / copies).argmax()] += 1
    share = loads / copies
    nodes = _pack(copies, share, [per_node * slots] * (ranks // per_node))
    _join(nodes, share.tolist(), chosen_together(chosen, n_experts).tolist())
    plan = []
    for experts in nodes:
        here = torch.tensor(experts).bincount(minlength=n_experts)
        plan += _pack(here, share, [slots] * per_node)
    return plan


def _pack(copies, share, room):
    """The experts of each bin: the heaviest first, where it is emptiest and has no copy yet."""
    bins, load = [[] for _ in room], [0.0] * len(room)
    for e in (e for e in share.argsort(descending=True).tolist() for _ in range(copies[e])):
        best = min((b for b in range(len(bins)) if len(bins[b]) < room[b]),
                   key=lambda b: (e in bins[b], load[b]))
        bins[best].append(e)
        load[best] += share[e].item()
    return bins


def _join(nodes, share, together):
    """Experts of two nodes change places as long as more of those that are chosen together meet,
    and no node has more than LEAN times the mean load.
    """
    most = LEAN * sum(share[e] for node in nodes for e in node) / len(nodes)
    load = [sum(share[e] for e in node) for node in nodes]
    slots = [(n, i) for n, node in enumerate(nodes) for i in range(len(node))]

    def ties(e, node, without):
        return sum(together[e][other] for other in {*node} - {e, without})

    changed = True
    while changed:
        changed = False
        for (a, i), (b, j) in itertools.combinations(slots, 2):
            x, y = nodes[a][i], nodes[b][j]
            more = share[y] - share[x]
            fuller = max(load[a] + more, load[b] - more) > max(most, load[a], load[b])
            if a == b or x in nodes[b] or y in nodes[a] or fuller:
                continue
            if ties(x, nodes[b], y) + ties(y, nodes[a], x) > (
                    ties(x, nodes[a], y) + ties(y, nodes[b], x)):
                nodes[a][i], nodes[b][j], changed = y, x, True
                load[a], load[b] = load[a] + more, load[b] - more


def chosen_together(chosen, n_experts):
    """(E, E): how many tokens chose both."""
    wants = torch.nn.functional.one_hot(chosen, n_experts).sum(1).double()  # (N, E)
    together = wants.T @ wants
    return together - torch.diag(together.diag())


def placement_score(plan, chosen, n_experts, per_node):
    """(load of the fullest rank beside the mean, nodes that a token must reach beside its own).

    A token is on the ranks in turn, and crosses to a node once, however many of its experts are
    there (as DeepEP does). Where an expert has copies, the one on its own node is taken.
    """
    ranks = len(plan)
    copies = torch.zeros(ranks, n_experts)
    for rank, experts in enumerate(plan):
        for e in experts:
            copies[rank, e] += 1
    loads = chosen.flatten().bincount(minlength=n_experts) / copies.sum(0)
    fullest = (copies @ loads).max().item() * ranks / chosen.numel()
    on_node = copies.view(-1, per_node, n_experts).sum(1) > 0  # (nodes, E)
    home = torch.arange(len(chosen)) % ranks // per_node
    first = on_node.int().argmax(0)  # the node of an expert's first copy
    reached = torch.where(on_node[home[:, None], chosen], home[:, None], first[chosen])
    away = torch.nn.functional.one_hot(reached, len(on_node)).amax(1).sum(1) - (
        reached == home[:, None]).any(1).long()
    return fullest, away.double().mean().item()


def score_of(place, chosen, n_experts, ranks, slots, per_node):
    """placement_score of what place(...) says."""
    return placement_score(place(chosen, n_experts, ranks, slots, per_node), chosen, n_experts,
                           per_node)
