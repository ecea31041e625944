"""dispatch_once: a token crosses to a node once, however many of its experts are there."""

import math

import torch.distributed as dist

from ranklab.expert_parallel.dispatch import AllToAll, dispatch_tokens


def dispatch_once(x, chosen, n_experts, inside, across):
    """Send the rows of x to their experts' ranks, over the slow link once to each node.

    There are M nodes of L ranks. A row for another node crosses to the rank there that has the same
    number in its node as this rank, together with its k choices. That rank sends it on inside the
    node, once for each of its experts there.
    Node m has experts m E/M to (m+1) E/M - 1, spread over its ranks as in dispatch_tokens.
    inside, across: the groups of node_groups (lab 02): this rank's node, its peers on all nodes.
    Returns: (rows, counts). The rows for this rank are sorted by expert, in any order within one
        expert. counts has the number of rows for each expert of this rank, a tensor or a list.
    The arguments are not modified. Gradients add up inside the node, and cross once.
    Shape: x (N, C); chosen (N, k), int64, -1 for none; rows (n, C), in the dtype of x.
    Cost: between nodes, for each row and each other node that has one of its experts, the row and
        8 k bytes, and 16 bytes to each other node; backward repeats the rows.
    Raises: ValueError if M L does not divide E.
    Lab: 11
    """
    M, L, k = dist.get_world_size(across), dist.get_world_size(inside), chosen.shape[1]
    if n_experts % (M * L):
        raise ValueError(f"{M} nodes of {L} ranks must divide the {n_experts} experts")
    each = n_experts // M  # experts of a node
    node = chosen.div(each, rounding_mode="floor").sort(dim=1).values  # of no expert: -1
    is_first = node.diff(dim=1, prepend=node.new_full((len(node), 1), -1)) > 0
    rows, sent = dispatch_tokens(x, node.where(is_first, -1), M, across)  # nodes for experts
    choices = AllToAll.apply(chosen[sent.order // k], sent.to, sent.came, across)
    here = choices - dist.get_rank(across) * each
    here = here.where((here >= 0) & (here < each), -1)
    rows, sent = dispatch_tokens(rows, here, each, inside)
    return rows, sent.counts


def crossings(chosen, n_experts, nodes, node):
    """Return (nodes, choices): how often the tokens of one node must cross to other nodes.

    nodes: once to each other node (dispatch_once); choices: for each expert (dispatch_tokens).
    chosen: (N, k), of tokens on node number `node`; -1 for none.
    """
    of_choices = chosen.div(n_experts // nodes, rounding_mode="floor")
    targets = [[m for m in row if m not in (-1, node)] for row in of_choices.tolist()]
    return sum(len(set(row)) for row in targets), sum(map(len, targets))


def once_bytes(rows, width, k, element=2):
    """Return the bytes of `rows` crossings in dispatch_once: each is a row and its k choices."""
    return rows * (width * element + 8 * k)


def even_crossings(k, n_experts, nodes):
    """Return the mean of `crossings` for a token whose k experts are drawn evenly: (once, each)."""
    missed = math.comb(n_experts - n_experts // nodes, k) / math.comb(n_experts, k)
    return (nodes - 1) * (1 - missed), k * (nodes - 1) / nodes
