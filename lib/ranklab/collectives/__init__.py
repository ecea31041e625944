"""The nine verbs of distributed training, and the algorithms behind them, from send and recv.

    verbs.py         each verb in its simplest form
    ring.py          reduce-scatter, all-gather and all-reduce around a ring: the fewest bytes
    tree.py          broadcast and all-reduce in log2 R rounds: the fewest steps
    invariant.py     all-reduce in one fixed order of additions: the same bits on 1, 2, 4, ... ranks
    hierarchical.py  all-reduce for two kinds of links: fast inside a node, slow between nodes
    server.py        all-reduce through one rank, to see why that does not scale
    fit.py           alpha and beta of a link, from measured times; formulas/collectives.py
                     predicts the cost of each algorithm
    uneven.py        all-to-all of pieces whose lengths only their senders know
    wire.py          the exchange that all of them use: send to one rank, receive from another

Every function takes `group=None` (all ranks), leaves its input unchanged and returns its result.
Ranks in arguments (`src`, `dst`, `server`) count inside the group. Lab 02 builds all of this.

The functions are for buffers. As in torch.distributed, no gradient crosses between ranks: autograd
sees only this rank's part. Functions with gradients are in tensor_parallel/regions.py.
"""

from ranklab.collectives import verbs
from ranklab.collectives.fit import fit_alpha_beta
from ranklab.collectives.hierarchical import hierarchical_all_reduce, node_groups
from ranklab.collectives.invariant import invariant_all_reduce, tree_sum
from ranklab.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from ranklab.collectives.server import parameter_server
from ranklab.collectives.tree import recursive_doubling, tree_broadcast
from ranklab.collectives.uneven import all_to_all_v
from ranklab.collectives.verbs import (
    all_gather, all_reduce, all_to_all, barrier, broadcast, gather, reduce, reduce_scatter,
    scatter,
)
from ranklab.collectives.watch import Watch, marked
from ranklab.collectives.wire import sendrecv
from ranklab.formulas.collectives import (
    ALGORITHMS, Link, all_to_all_v_time, alpha_beta_time, best_sent_bytes, bus_factor,
    crossover_bytes, flat_ring_time, hierarchical_time,
)

__all__ = [
    "ALGORITHMS", "Link", "Watch", "all_gather", "all_reduce", "all_to_all", "all_to_all_v",
    "all_to_all_v_time", "alpha_beta_time", "barrier", "best_sent_bytes", "broadcast", "bus_factor",
    "crossover_bytes", "fit_alpha_beta", "flat_ring_time", "gather", "hierarchical_all_reduce",
    "hierarchical_time", "invariant_all_reduce", "marked", "node_groups", "parameter_server",
    "recursive_doubling", "reduce", "reduce_scatter", "ring_all_gather", "ring_all_reduce",
    "ring_reduce_scatter", "scatter", "sendrecv", "tree_broadcast", "tree_sum", "verbs",
]
