"""All-reduce for two kinds of links: fast ones inside a node, slow ones between nodes."""

import itertools

import torch.distributed as dist

from ranklab.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def node_groups(per_node, group=None):
    """Two groups of this rank: (`inside`: the ranks of its node, `across`: its peers on all nodes).

    The first per_node ranks of `group` are the first node, and so on. Every rank of the job must
    call it (new_group is a collective), also with a `group`: some ranks for their group, others for
    theirs; a rank in none gets (None, None). Once is enough: keep the groups.

    cost   without `group` nothing; with it, one all_gather of some bytes over the whole job
    error  per_node must divide the number of ranks
    lab    02
    """
    is_outside = group == dist.GroupMember.NON_GROUP_MEMBER
    ranks = [] if is_outside else dist.get_process_group_ranks(group or dist.group.WORLD)
    if per_node < 1 or len(ranks) % per_node:
        raise ValueError(f"per_node={per_node} must divide the {len(ranks)} ranks of the group")
    nodes = [tuple(ranks[i : i + per_node]) for i in range(0, len(ranks), per_node)]
    peers = list(zip(*nodes))
    wanted = [nodes + peers]
    if group is not None:
        # new_group names by a counter: two halves of the job that each make only their own groups
        # would take the same names, and meet under them. So every rank makes all, in one order.
        wanted = [None] * dist.get_world_size()
        dist.all_gather_object(wanted, nodes + peers)
    made = {members: dist.new_group(list(members))
            for members in dict.fromkeys(itertools.chain(*wanted))}
    return tuple(next((made[members] for members in parts if dist.get_rank() in members), None)
                 for parts in (nodes, peers))


def hierarchical_all_reduce(x, inside=None, across=None):
    """Every rank ends with the sum of `x` over all nodes, in a new tensor; `x` is unchanged.

    `inside` is the group of this rank's node, `across` the group of its peers on all nodes
    (see node_groups). With L ranks on each of M nodes:

    cost   inside, 2(L-1)/L of x's bytes; across, 2(M-1)/M of one L-th of them, so that
           2(M-1)/M of x leaves each node, instead of 2(R-1)/R in a flat ring
    lab    02
    """
    shard = ring_reduce_scatter(x, inside)  # (n,) -> (n/L,), summed over my node
    shard = ring_all_reduce(shard, across)  # (n/L,), summed over all nodes
    return ring_all_gather(shard, inside, out=x.new_empty(x.shape))
