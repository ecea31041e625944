"""The figures of the deck 02_collectives.md."""
import numpy as np
import torch
import torch.distributed as dist

from ranklab import collectives as c
from ranklab import launch
from ranklab.collectives.watch import Watch, marked
from ranklab.plots import collectives as plots
from ranklab.projects.collectives import links


def _watch(call, ranks):
    with Watch() as seen:
        call(marked(ranks))
    return seen.messages


def _layered(ranks, per_node):
    groups = c.node_groups(per_node)
    return _watch(lambda x: c.hierarchical_all_reduce(x, *groups), ranks)


def verbs():
    return plots.nine_verbs(), 6, 2.6


def traffic():
    MB = 1e6
    server = [{1: 4 * MB, 2: 4 * MB, 3: 4 * MB}, {0: 4 * MB}, {0: 4 * MB}, {0: 4 * MB}]
    ring = [{(r + 1) % 4: 6 * MB} for r in range(4)]
    return plots.traffic_matrices({"through rank 0": server, "ring": ring}), 5.75, 2.1


def scatter():
    return plots.steps(launch(_watch, c.ring_reduce_scatter, 4, ranks=4), 4), 5.75, 2.15


def ring():
    return plots.steps(launch(_watch, c.ring_all_reduce, 4, ranks=4), 4, cols=7), 5.75, 1.75


def nodes():
    return plots.steps(launch(_layered, 4, 2, ranks=4, nodes=2), 4, nodes=2), 5.75, 2.1


def model():
    sizes, link = np.geomspace(1e3, 1e9, 40), (10e-6, 1e-11)
    times = {name: (sizes, [c.alpha_beta_time(name, n, 8, *link) for n in sizes])
             for name in ("ring", "recursive_doubling", "parameter_server")}
    return plots.time_against_size(times, crossover=c.crossover_bytes(8, *link),
                                   title="all-reduce on 8 ranks: 10 us, 100 GB/s"), 5.75, 2.4


def slow():
    ratios = np.geomspace(1, 16, 9)
    return plots.slow_link(ratios, links.model(ratios)), 5.75, 2.4


def _add_up(rows):
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _sums(n=20_000):
    rows = torch.randn(8, n, generator=torch.Generator().manual_seed(0))
    own = rows.chunk(dist.get_world_size())[dist.get_rank()]
    return (c.ring_all_reduce(_add_up(own)), c.recursive_doubling(_add_up(own)),
            c.invariant_all_reduce(own))


def bits():
    sums = {R: launch(_sums, ranks=R)[0] for R in (1, 2, 4, 8)}
    ways = "+=, then a ring", "+=, then doubling", "one fixed tree"
    return plots.differing_bits({way: {
        R: (sums[R][i] != sums[1][i]).double().mean().item() for R in sums}
        for i, way in enumerate(ways)}), 5.75, 2.2
