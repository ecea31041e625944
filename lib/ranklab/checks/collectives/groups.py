"""One rank in the middle, or two kinds of links: parameter_server, hierarchical_all_reduce."""

import functools

import torch

from ranklab.checks.beside import expect
from ranklab.checks.collectives.arguments import call_root_in_group, stays_in_group
from ranklab.checks.collectives.cases import (
    WORLD_SIZES, Case, plain_cases, sums, uneven_cases, values,
)
from ranklab.checks.collectives.judging import (
    explain_mean, no_backend, nothing_sent, ranks_agree, right_on, sends,
)
from ranklab.checks.exercise import Mistake

LAYOUTS = ((1, 1), (1, 2), (3, 1), (2, 4))  # (nodes, ranks on each)
LENGTHS = ("Shards differ in length when L does not divide: give the last all-gather "
           "out=x.new_empty(x.shape), which says how long each one is.")


def call_server(fn, x, case):
    return fn(x, server=case.root)


def check_parameter_server(fn):
    for ranks in WORLD_SIZES:
        cases = plain_cases(ranks) + [Case(6, root=ranks - 1), Case(6, root=ranks // 2)]
        right_on(fn, call_server, cases, ranks, sums, _explain_server)
    yield "every rank has the sum, for several servers, on 1, 2, 3, 8 ranks; three types"
    cases = [*uneven_cases(), Case(1001, "normal"), Case(48, root=2)]
    seen = right_on(fn, call_server, cases, 4, sums)
    nothing_sent(cases, seen)
    ranks_agree(seen[-2])
    yield "on 4 too, for lengths 0, 1, 2, 7, 1001, when x is not contiguous; x unchanged"
    stays_in_group(fn, call_root_in_group, lambda xs: [sum(xs)] * 3, has_out=False)
    yield "inside a group it meets nobody else, and `server` counts there"
    no_backend(seen[-1])
    sends(seen[-1], [(192 * times, times) for times in (1, 1, 3, 1)],  # rank 2 is the server
          "All traffic goes through rank `server`, whichever that is."
          if seen[-1][0].sent == 3 * 192 else
          "A worker sends its x once, to the server only; the server answers each once.")
    yield "the server sends R-1 times x, every other rank once: that is the bottleneck"


def _explain_server(wrong):
    case, rank = wrong.case, wrong.rank
    if wrong.ranks > 1 and torch.equal(wrong.got, values(case, rank)):
        raise Mistake(f"{wrong.where} still has its own x (server={case.root})",
                      "After the server has added everything up it must send the sum back.")
    explain_mean(wrong)
    if case.kind == "marks" and rank != case.root and wrong.ranks > 2:
        raise Mistake(f"{wrong.where} got a sum that is not finished, or not right",
                      "Receive from all workers first, then send to all: an early reply "
                      "lacks those that come later. The server's own x counts once.")


def call_hierarchical(fn, x, case, inside, across):
    return fn(x, inside, across)


def check_hierarchical_all_reduce(fn):
    for nodes, per_node in LAYOUTS:
        ranks = nodes * per_node
        seen = right_on(fn, call_hierarchical, [*plain_cases(ranks), Case(96)], ranks, sums,
                        functools.partial(_explain_layers, per_node), per_node=per_node)
    on_8 = seen[-1]  # two nodes of four ranks
    yield "right on 1, 2, 3, 8 ranks, in 1, 2, 3 nodes; float32, bfloat16, int64"
    cases = [*uneven_cases(), Case(1001, "normal"), Case(96)]
    *_, agreeing, on_6 = right_on(fn, call_hierarchical, cases, 6, sums,
                                  functools.partial(_explain_layers, 2), LENGTHS, per_node=2)
    ranks_agree(agreeing)
    yield "on 6 too, when nothing divides (0, 1, 2, 7, 1001), when x is not contiguous; x unchanged"
    no_backend(on_8)
    _link_bytes(on_8, nodes=2, per_node=4, nbytes=96 * 4)
    _link_bytes(on_6, nodes=3, per_node=2, nbytes=96 * 4)  # with two, a server does as well
    _no_padding(agreeing, nodes=3, per_node=2, n=1001)
    yield "over the slow link each rank sends 2(M-1)/M of one L-th of the bytes"
    yield "inside its node each rank sends 2(L-1)/L of the bytes"


def _explain_layers(per_node, wrong):
    got, right, node = wrong.got, wrong.right, wrong.rank // per_node
    if got.shape != right.shape:
        raise Mistake(f"{wrong.where} returns {got.numel()} of {right.numel()} elements, in shape "
                      f"{tuple(got.shape)}", "After the sum across the nodes each rank has one "
                      "shard: an all-gather inside the node must follow."
                      if 2 * got.numel() <= right.numel() else
                      LENGTHS)
    if not wrong.times:
        return
    if per_node < wrong.ranks and all(
            bool(n) == (r // per_node == node) for r, n in enumerate(wrong.times)):
        raise Mistake(f"{wrong.where} has the sum of node {node} only",
                      "The nodes never met: all-reduce the shard over the group `across`.")
    if bool((got != got[0]).any()):  # else the general message names who is missing
        raise Mistake(f"on {wrong.where} some parts of the tensor lack some ranks",
                      "The three steps must use the groups in this order: inside, across, "
                      "inside. The last gathers the same shards that the first scattered.")


def _link_bytes(seen, nodes, per_node, nbytes):
    """Each rank of 100 MB, as it is told, sends its part over both kinds of links."""
    slow_best = 2 * (nodes - 1) * nbytes // (nodes * per_node)
    fast_best = 2 * (per_node - 1) * nbytes // per_node
    slow, fast = (_bytes(seen, per_node, is_inside) for is_inside in (False, True))
    if sum(slow) != slow_best * len(seen):
        hint = "Sum inside the node first, and let only a shard of that sum cross to its peers."
        if nodes > 2:  # on two nodes it was right
            hint = "Across the nodes, too, a ring sends the fewest bytes: ring_all_reduce."
        elif len(set(slow)) > 1:
            hint = f"This is a flat ring (group=None?): use the groups inside and across. {hint}"
        elif fast == [fast_best // nodes] * len(seen):
            hint = f"The groups are swapped: the big transfers go over the slow link. {hint}"
        raise Mistake(f"{100 * sum(slow) / nodes / nbytes:g} MB of a 100 MB tensor leave each node "
                      f"over the slow link; {100 * slow_best * per_node / nbytes:g} MB are enough",
                      hint)
    told = " and ".join(f"{100 * n / nbytes:.3g} MB" for n in sorted({*slow}))
    expect(slow == [slow_best] * len(seen), f"of a 100 MB tensor, ranks send {told} over the slow "
           f"link; {100 * slow_best / nbytes:.3g} MB each are enough", "One rank carries more than "
           "the others, and they wait for it. Let each rank of the node take its own shard across, "
           "and round a ring there.")
    expect(fast == [fast_best] * len(seen), "inside the node a rank sends "
           f"{100 * max(fast) / nbytes:g} MB of a 100 MB tensor; {100 * fast_best / nbytes:g} MB "
           "are enough", "Inside, reduce-scatter before and all-gather after; no second "
           "all-reduce.")


def _no_padding(seen, nodes, per_node, n):
    """Of n float32 elements, which do not divide, the ranks together send what two rings send."""
    sent, least = sum(one.sent for one in seen), 8 * n * (nodes * per_node - 1)
    expect(sent <= least, f"with {n:,} elements the ranks send {sent:,} bytes in all; {least:,} "
           "are enough", f"Nothing is padded. {LENGTHS}")


def _bytes(seen, per_node, is_inside):
    """What each rank sent to the ranks of its node, or to those of other nodes."""
    return [sum(n for peer, n in one.bytes_to.items()
                if (peer // per_node == rank // per_node) == is_inside)
            for rank, one in enumerate(seen)]
