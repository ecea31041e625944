"""Lab 11: plans by which some rank waits."""

import torch
from mutants import mutant

from ranklab.expert_parallel import place_experts

FILL = ("    for _ in range(ranks * slots - n_experts):\n"
        "        copies[(loads / copies).argmax()] += 1\n")

WRONG = [mutant(place_experts, *edits, says=says, called=called) for *edits, says, called in (
    (FILL, "    copies[: ranks * slots - n_experts] += 1\n", "the fullest rank",
     "copies_of_the_first"),
    ("(loads / copies).argmax()", "loads.argmax()", "the fullest rank", "copies_of_one"),
    ("key=lambda e: -share[e]", "key=lambda e: share[e]", "the fullest rank", "lightest_first"),
    ("slack=0.08 *", "slack=9.0 *", "the fullest rank", "together_alone"),
)]  # fmt: skip


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
