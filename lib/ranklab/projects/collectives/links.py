"""When is a hierarchical all-reduce worth it? Emulated slow links, beside the model."""

import tempfile
import time

import torch
import torch.distributed as dist

from ranklab.collectives import (
    Link, flat_ring_time, hierarchical_all_reduce, hierarchical_time, node_groups, ring_all_reduce,
)
from ranklab.collectives.emulate import EmulatedLinks
from ranklab.engine import device, launch
from ranklab.projects.clock import finish

NBYTES = 1_000_000  # what really moves: small, because the waiting is invented anyway


def links(ratio, fast_s=0.04):
    """(fast, slow): moving all NBYTES takes `fast_s` inside a node, `ratio` times that outside."""
    fast = Link(0.0, fast_s / NBYTES)
    return fast, Link(0.0, ratio * fast.beta)


def model(ratios, nodes=2, per_node=2):
    """{algorithm: [seconds at each ratio]} by the alpha-beta model."""
    times = {"flat ring": flat_ring_time, "hierarchical": hierarchical_time}
    return {name: [time_of(NBYTES, nodes, per_node, *links(r)) for r in ratios]
            for name, time_of in times.items()}


def emulate(ratios, nodes=2, per_node=2, repeats=3, ring=ring_all_reduce,
            hierarchical=hierarchical_all_reduce):  # fmt: skip
    """{algorithm: {ratio: seconds}} of real ranks whose sends sleep: the best of `repeats`.

    ring, hierarchical  a learner's own will do
    """
    both = {"flat ring": ring, "hierarchical": hierarchical}
    with tempfile.TemporaryDirectory() as folder:
        seen = launch(_time_both, both, ratios, per_node, folder, repeats,
                      ranks=nodes * per_node, nodes=nodes)
    slowest = {key: map(max, zip(*(one[key] for one in seen))) for key in seen[0]}
    return {name: {ratio: min(slowest[name, ratio]) for ratio in ratios}
            for name in both}


def _time_both(both, ratios, per_node, folder, repeats):
    groups = {"flat ring": (), "hierarchical": node_groups(per_node)}
    x, seconds = torch.ones(NBYTES // 4, device=device()), {}
    for ratio in (0, *ratios * repeats):  # 0 warms up: first messages open connections
        for name, all_reduce in both.items():
            dist.barrier()
            with EmulatedLinks(*links(ratio), per_node, folder):
                start = time.perf_counter()
                all_reduce(x, *groups[name])
                finish()
                seconds.setdefault((name, ratio), []).append(time.perf_counter() - start)
    return seconds
