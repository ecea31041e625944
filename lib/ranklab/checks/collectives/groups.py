"""One rank in the middle, or two kinds of links: parameter_server, hierarchical_all_reduce."""

import torch

from ranklab.checks.collectives.arguments import call_root_in_group, stays_in_group
from ranklab.checks.collectives.ring import ALONE, plain_cases, uneven_cases
from ranklab.checks.collectives.trials import (
    WORLD_SIZES, Case, compare, is_mean, no_backend, observe, ranks_agree, times_in, total, values,
)
from ranklab.checks.collectives.tree import nothing_sent
from ranklab.checks.exercise import Mistake

LAYOUTS = ((1, 1), (1, 2), (3, 1), (2, 4))  # (nodes, ranks on each)


def call_server(fn, x, case):
    return fn(x, server=case.root)


def check_parameter_server(fn):
    for ranks in WORLD_SIZES:
        cases = plain_cases(ranks) + [Case(6, root=ranks - 1), Case(6, root=ranks // 2)]
        seen = observe(fn, call_server, cases, ranks, hint=ALONE if ranks == 1 else "")
        for case, of_ranks in zip(cases, seen):
            compare(case, ranks, of_ranks, [total(case, ranks)] * ranks, _explain_server(case))
    yield "every rank has the sum, for several servers, on 1, 2, 3, 8 ranks; three types"
    cases = uneven_cases() + [Case(1001, "normal"), Case(48, root=2)]
    seen = observe(fn, call_server, cases, 4)
    for case, of_ranks in zip(cases[:-2], seen):
        compare(case, 4, of_ranks, [total(case, 4)] * 4)
        nothing_sent(case, of_ranks)
    ranks_agree(seen[-2])
    yield "on 4 too, for lengths 0, 1, 2, 7, 1001, when x is not contiguous; x unchanged"
    stays_in_group(fn, call_root_in_group, lambda xs: [sum(xs)] * 3)
    yield "inside a group it meets nobody else, and `server` counts there"
    no_backend(seen[-1])
    _server_bytes(seen[-1], server=2, nbytes=192)
    yield "the server sends R-1 times x, every other rank once: that is the bottleneck"


def _explain_server(case):
    def explain(rank, ranks, got, right):
        if got.shape == right.shape and torch.equal(got, values(case, rank)) and ranks > 1:
            raise Mistake(f"rank {rank} of {ranks} still has its own x (server={case.root})",
                          "After the server has added everything up it must send the sum back.")
        if is_mean(got, right, ranks):
            raise Mistake(f"rank {rank} of {ranks} has the mean, not the sum",
                          "Do not divide by R: whoever wants the mean does it afterwards.")
        if case.kind == "marks" and rank != case.root and ranks > 2:
            raise Mistake(f"rank {rank} of {ranks} got a sum that is not finished, or not right",
                          "Receive from all workers first, then send to all: an early reply "
                          "lacks those that come later. The server's own x counts once.")

    return explain


def _server_bytes(seen, server, nbytes):
    for rank, one in enumerate(seen):
        wanted = 3 * nbytes if rank == server else nbytes
        if one.sent != wanted:
            what = (f"rank {rank} of 4, {'the server' if rank == server else 'a worker'}, sends x "
                    f"{one.sent / nbytes:g} times, not {wanted // nbytes}")
            hint = ("All traffic goes through rank `server`, whichever that is."
                    if seen[0].sent == 3 * nbytes else
                    "A worker sends its x once, to the server only; the server answers each once.")
            raise Mistake(what, hint)
        if one.messages != wanted // nbytes:
            raise Mistake(f"rank {rank} of 4 sends {one.messages} messages, not {wanted // nbytes}",
                          "x goes in one piece, as each message costs its latency.")


def call_hierarchical(fn, x, case, inside, across):
    return fn(x, inside, across)


def check_hierarchical_all_reduce(fn):
    for nodes, per_node in LAYOUTS:
        ranks = nodes * per_node
        cases = [*plain_cases(ranks), Case(96)]
        seen = observe(fn, call_hierarchical, cases, ranks, per_node=per_node)
        for case, of_ranks in zip(cases, seen):
            wanted = [total(case, ranks)] * ranks
            compare(case, ranks, of_ranks, wanted, _explain_layers(nodes, per_node))
    last = seen[-1]  # 96 numbers on two nodes of four ranks
    yield "right on 1, 2, 3, 8 ranks, in 1, 2, 3 nodes; float32, bfloat16, int64"
    cases = uneven_cases() + [Case(1001, "normal"), Case(96)]
    hint = ("Shards differ in length here: the last all-gather needs out=x.new_empty(x.shape), "
            "which says how long each one is.")
    seen = observe(fn, call_hierarchical, cases, 6, hint, per_node=2)
    for case, of_ranks in zip(cases[:-2], seen):
        compare(case, 6, of_ranks, [total(case, 6)] * 6, _explain_shape)
    ranks_agree(seen[-2])
    yield "on 6 too, when nothing divides (0, 1, 2, 7, 1001), when x is not contiguous; x unchanged"
    no_backend(last)
    _link_bytes(last, nodes=2, per_node=4, nbytes=96 * 4)
    _link_bytes(seen[-1], nodes=3, per_node=2, nbytes=96 * 4)  # with two, a server does as well
    yield "over the slow link each rank sends 2(M-1)/M of one L-th of the bytes"
    yield "inside its node each rank sends 2(L-1)/L of the bytes"


def _explain_shape(rank, ranks, got, right):
    if got.shape != right.shape:
        raise Mistake(f"rank {rank} of {ranks} returns {got.numel()} elements in shape "
                      f"{tuple(got.shape)}, not {tuple(right.shape)}",
                      "Shards differ in length when L does not divide: give the all-gather "
                      "out=x.new_empty(x.shape), which says how long each one is.")


def _explain_layers(nodes, per_node):
    def explain(rank, ranks, got, right):
        if got.numel() < right.numel():
            raise Mistake(f"rank {rank} of {ranks} returns {got.numel()} of {right.numel()} "
                          "elements", "After the sum across the nodes each rank has one shard: "
                          "an all-gather inside the node must follow.")
        if got.dtype != torch.int64 or got.shape != right.shape:
            return
        times = times_in(int(got.flatten()[0]), ranks)
        node = rank // per_node
        if nodes > 1 and all(bool(t) == (r // per_node == node) for r, t in enumerate(times)):
            raise Mistake(f"rank {rank} of {ranks} has the sum of node {node} only",
                          "The nodes never met: all-reduce the shard over the group `across`.")
        if not torch.equal(got, right) and all(int(v) == int(got.flatten()[0]) for v in got):
            return  # the same marks everywhere: the general message names who is missing
        if not torch.equal(got, right):
            raise Mistake(f"on rank {rank} of {ranks} some parts of the tensor lack some ranks",
                          "The three steps must use the groups in this order: inside, across, "
                          "inside. The last gathers the same shards that the first scattered.")

    return explain


def _link_bytes(seen, nodes, per_node, nbytes):
    slow_best = 2 * (nodes - 1) * nbytes // (nodes * per_node)
    fast_best = 2 * (per_node - 1) * nbytes // per_node
    slow = [_bytes(one, rank, per_node, same_node=False) for rank, one in enumerate(seen)]
    fast = [_bytes(one, rank, per_node, same_node=True) for rank, one in enumerate(seen)]
    if sum(slow) != slow_best * len(seen):
        told = f"{100 * sum(slow) / nodes / nbytes:g} MB of a 100 MB tensor leave each node"
        best = 100 * slow_best * per_node / nbytes
        hint = "Sum inside the node first, and let only a shard of that sum cross to its peers."
        if nodes > 2:  # on two nodes it was right
            hint = "Across the nodes, too, a ring sends the fewest bytes: ring_all_reduce."
        elif len(set(slow)) > 1:
            hint = f"This is a flat ring (group=None?): use the groups inside and across. {hint}"
        elif fast == [fast_best // nodes] * len(seen):
            hint = f"The groups are swapped: the big transfers go over the slow link. {hint}"
        raise Mistake(f"{told} over the slow link; {best:g} MB are enough", hint)
    if slow != [slow_best] * len(seen):
        told = " and ".join(f"{100 * n / nbytes:.3g} MB" for n in sorted({*slow}))
        raise Mistake(f"of a 100 MB tensor, ranks send {told} over the slow link; "
                      f"{100 * slow_best / nbytes:.3g} MB each are enough",
                      "One rank carries more than the others, and they wait for it. Let each rank "
                      "of the node take its own shard across, and round a ring there.")
    if fast != [fast_best] * len(seen):
        raise Mistake(f"inside the node a rank sends {100 * max(fast) / nbytes:g} MB of a 100 MB "
                      f"tensor; {100 * fast_best / nbytes:g} MB are enough",
                      "Inside, reduce-scatter before and all-gather after; no second all-reduce.")


def _bytes(one, rank, per_node, same_node):
    return sum(n for peer, n in one.bytes_to.items()
               if (peer // per_node == rank // per_node) == same_node)
