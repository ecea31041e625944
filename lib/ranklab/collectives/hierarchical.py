"""All-reduce for two kinds of links: fast ones inside a node, slow ones between nodes."""

import torch.distributed as dist

from ranklab.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def node_groups(per_node, group=None):
    """Two groups of this rank: (`inside`: the ranks of its node, `across`: its peers on all nodes).

    Ranks 0 .. per_node-1 are the first node, and so on. Every rank must call it (new_group is
    a collective), and once is enough: keep the groups.

    error  per_node must divide the number of ranks
    lab    02
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if per_node < 1 or len(ranks) % per_node:
        raise ValueError(f"per_node={per_node} must divide the {len(ranks)} ranks of the group")
    nodes = [ranks[i : i + per_node] for i in range(0, len(ranks), per_node)]
    me, inside, across = dist.get_rank(), None, None
    for members in nodes:
        made = dist.new_group(members)
        inside = made if me in members else inside
    for members in zip(*nodes):
        made = dist.new_group(list(members))
        across = made if me in members else across
    return inside, across


def hierarchical_all_reduce(x, inside=None, across=None):
    """Every rank ends with the sum of `x` over all nodes, in a new tensor; `x` is unchanged.

    `inside` is the group of this rank's node, `across` that of its peers on the other nodes
    (see node_groups). With L ranks on each of M nodes:

    cost   inside, 2(L-1)/L of x's bytes; across, 2(M-1)/M of one L-th of them, so that
           2(M-1)/M of x leaves each node, instead of 2(R-1)/R in a flat ring
    lab    02
    """
    shard = ring_reduce_scatter(x, inside)  # (n,) -> (n/L,), summed over my node
    shard = ring_all_reduce(shard, across)  # (n/L,), summed over all nodes
    return ring_all_gather(shard, inside, out=x.new_empty(x.shape))
