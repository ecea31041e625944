"""All-reduce for two kinds of links: fast ones inside a node, slow ones between nodes."""

import itertools

import torch.distributed as dist

from ranklab.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def node_groups(per_node, group=None):
    """Make two groups for this rank: (the ranks of its node, its peers on all nodes).

    The first per_node ranks of `group` are the first node, and so on. Every rank of the job must
    call it (new_group is a collective), even with a `group`, each with its own group; a rank in no
    group gets (None, None). Call it once and keep the groups.
    Returns: (inside, across), the arguments of hierarchical_all_reduce.
    Cost: without `group` nothing; with it, one all_gather of some bytes over the whole job.
    Raises: ValueError if per_node does not divide the number of ranks.
    Lab: 02
    """
    is_outside = group == dist.GroupMember.NON_GROUP_MEMBER
    ranks = [] if is_outside else dist.get_process_group_ranks(group or dist.group.WORLD)
    if per_node < 1 or len(ranks) % per_node:
        raise ValueError(f"per_node={per_node} must divide the {len(ranks)} ranks of the group")
    nodes = [tuple(ranks[i : i + per_node]) for i in range(0, len(ranks), per_node)]
    peers = list(zip(*nodes))
    rank_lists = [nodes + peers]
    if group is not None:
        # new_group names groups by a counter: if two halves of the job each made only their own,
        # the names would clash. So every rank makes all groups, in the same order.
        rank_lists = [None] * dist.get_world_size()
        dist.all_gather_object(rank_lists, nodes + peers)
    groups = {members: dist.new_group(list(members))
              for members in dict.fromkeys(itertools.chain(*rank_lists))}
    return tuple(next((groups[members] for members in parts if dist.get_rank() in members), None)
                 for parts in (nodes, peers))


def hierarchical_all_reduce(x, inside=None, across=None):
    """Sum `x` over all nodes; return the sum in a new tensor on every rank; `x` is unchanged.

    inside: the group of this rank's node (see node_groups).
    across: the group of its peers on all nodes.
    Cost: with L ranks on each of M nodes: inside, 2(L-1)/L of x's bytes; across, 2(M-1)/M of one
        L-th of them, so that 2(M-1)/M of x leaves each node, instead of 2(R-1)/R in a flat ring.
    Lab: 02
    """
    shard = ring_reduce_scatter(x, inside)  # (n,) -> (n/L,), summed over my node
    shard = ring_all_reduce(shard, across)  # (n/L,), summed over all nodes
    return ring_all_gather(shard, inside, out=x.new_empty(x.shape))
