"""Which rank holds which experts, by their loads in a trace. Nothing is sent."""

import torch


def place_experts(chosen, n_experts, ranks, slots, per_node):
    """Place experts on ranks: return [[experts of rank 0], [experts of rank 1], ...].

    Each list has `slots` entries, and each expert is in at least one of them. If an expert has
    several slots, they share its load.
    The busiest rank has little more than the mean load, and tokens must reach few nodes besides
    their own.
    chosen: (N, k), a trace of routing.
    per_node: the number of ranks in a node, which share NVLink.
    Raises: ValueError if there are fewer slots than experts.
    Source: DeepSeek's EPLB, https://github.com/deepseek-ai/EPLB: copies first, then packing
    Lab: 11
    """
    if ranks * slots < n_experts:
        raise ValueError(f"{ranks} ranks with {slots} slots have no place for {n_experts} experts")
    loads = chosen.flatten().bincount(minlength=n_experts).double()
    copies = torch.ones(n_experts, dtype=torch.long)
    for _ in range(ranks * slots - n_experts):
        copies[(loads / copies).argmax()] += 1
    share, pairs = (loads / copies).tolist(), chosen_together(chosen, n_experts)

    def pack(experts, bins, room, slack):
        """Put the heaviest expert first, into the emptiest bin; of bins that are nearly as empty,
        into the one with the experts that are chosen together with it most often.
        """
        placed, load = [[] for _ in range(bins)], [0.0] * bins
        for e in sorted(experts, key=lambda e: -share[e]):
            free = [b for b in range(bins) if len(placed[b]) < room]
            free = [b for b in free if e not in placed[b]] or free
            min_load = min(load[b] for b in free)
            best = max((b for b in free if load[b] <= min_load + slack), key=lambda b: (
                pairs[e, placed[b]].sum().item() if slack else 0, -load[b]))
            placed[best].append(e)
            load[best] += share[e]
        return placed

    nodes = pack([e for e in range(n_experts) for _ in range(copies[e])], ranks // per_node,
                 per_node * slots, slack=0.08 * chosen.numel() * per_node / ranks)
    return [rank for node in nodes for rank in pack(node, per_node, slots, slack=0)]


def chosen_together(chosen, n_experts):
    """Count the tokens that chose both experts of each pair: (E, E)."""
    choices = torch.nn.functional.one_hot(chosen, n_experts).sum(1).double()  # (N, E)
    pairs = choices.T @ choices
    return pairs - torch.diag(pairs.diag())


def placement_score(plan, chosen, n_experts, per_node):
    """Return (load of the fullest rank / mean load, other nodes that a token must reach).

    Tokens are dealt to the ranks in turn. A token is sent to a node once, however many of its
    experts are there (as in DeepEP). If an expert has a copy on the token's own node, that is used.
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
    nodes = torch.where(on_node[home[:, None], chosen], home[:, None], first[chosen])
    crossings = torch.nn.functional.one_hot(nodes, len(on_node)).amax(1).sum(1) - (
        nodes == home[:, None]).any(1).long()
    return fullest, crossings.double().mean().item()


def score_of(place, chosen, n_experts, ranks, slots, per_node):
    """Return the placement_score of the plan that place(...) returns."""
    return placement_score(place(chosen, n_experts, ranks, slots, per_node), chosen, n_experts,
                           per_node)
