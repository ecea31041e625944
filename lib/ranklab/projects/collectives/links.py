"""When is a hierarchical all-reduce worth it? Emulated slow links, and the model."""

import tempfile
from functools import partial

import torch

from ranklab.collectives import (
    Link, flat_ring_time, hierarchical_all_reduce, hierarchical_time, node_groups, ring_all_reduce,
)
from ranklab.collectives.emulate import EmulatedLinks
from ranklab.engine import device, launch
from ranklab.projects.clock import in_turns

NBYTES = 1_000_000  # bytes really sent: few, because the waiting is emulated anyway


def links(ratio, fast_s=0.04):
    """Return the Links (fast, slow), inside a node and between nodes.

    Moving all NBYTES takes `fast_s` seconds inside a node, and `ratio` times as long outside.
    """
    fast = Link(0.0, fast_s / NBYTES)
    return fast, Link(0.0, ratio * fast.beta)


def model(ratios, nodes=2, per_node=2):
    """Predict {algorithm: [seconds at each ratio]} by the alpha-beta model."""
    times = {"flat ring": flat_ring_time, "hierarchical": hierarchical_time}
    return {name: [time_of(NBYTES, nodes, per_node, *links(r)) for r in ratios]
            for name, time_of in times.items()}


def emulate(ratios, nodes=2, per_node=2, repeats=3, ring=ring_all_reduce,
            hierarchical=hierarchical_all_reduce):  # fmt: skip
    """Time real ranks whose sends sleep; return {algorithm: {ratio: seconds}}.

    The seconds are the best of `repeats`.
    ring, hierarchical: the library's functions, or a learner's
    """
    algorithms = {"flat ring": ring, "hierarchical": hierarchical}
    with tempfile.TemporaryDirectory() as folder:
        seconds, *_ = launch(_time_both, algorithms, ratios, per_node, folder, repeats,
                             ranks=nodes * per_node, nodes=nodes)
    return {name: {ratio: min(seconds[name, ratio]) for ratio in ratios} for name in algorithms}


def _time_both(algorithms, ratios, per_node, folder, repeats):
    groups = {"flat ring": (), "hierarchical": node_groups(per_node)}
    x = torch.ones(NBYTES // 4, device=device())

    def call(name, ratio):
        with EmulatedLinks(*links(ratio), per_node, folder):
            algorithms[name](x, *groups[name])

    calls = {(name, ratio): partial(call, name, ratio) for ratio in ratios for name in algorithms}
    return in_turns(calls, repeats, warm_up=0)
