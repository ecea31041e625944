"""One rank in the middle, or two kinds of links: parameter_server, hierarchical_all_reduce."""

from functools import partial

from ranklab.checks.beside import expect
from ranklab.checks.collectives.cases import (
    GROUP, MARKS, ROOT, TYPES, UNEVEN_CASES, WORLD_SIZES, Case, Verb, of_sum, run,
    stays_in_group,
)
from ranklab.checks.collectives.traffic import no_backend, nothing_sent, ranks_agree, sends
from ranklab.collectives import node_groups

LENGTHS = "Where L does not divide, give the last all-gather out=x.new_empty(x.shape)."
EARLY = ("Receive from all workers first, then send to all: an early reply lacks the workers that "
         "come later. The server's own x counts once.")
ORDER = ("The three steps must use the groups in this order: inside, across, inside. The last "
         "gathers the same shards that the first scattered.")


def _of_server(result):
    own = {f"still its own x (server={result.case.root})": (
        result.xs[result.ranks.index], "After the server has added everything up, it must send the "
        "sum back.")}
    return own | of_sum(result, {"lacks": EARLY})


SERVER = Verb(lambda xs, case: [sum(xs)] * len(xs), _of_server,
              call=lambda fn, x, case, keywords, _: fn(x, server=case.root, **keywords))


def check_parameter_server(fn):
    for ranks in WORLD_SIZES:
        run(fn, SERVER, [MARKS, *TYPES, Case(6, root=ranks - 1), Case(6, root=ranks // 2)], ranks)
    yield "every rank has the sum, for several servers, on 1, 2, 3, 8 ranks; four types"
    cases = [*UNEVEN_CASES, Case(1001, kind="normal"), Case(48, root=2)]
    seen = run(fn, SERVER, cases, 4)
    nothing_sent(seen)
    ranks_agree(seen[-2])
    yield "on 4 too, for lengths 0, 1, 2, 7, 1001, when x is not contiguous; x unchanged"
    stays_in_group(fn, SERVER, has_out=False, hint=f"{GROUP} {ROOT}")
    yield "inside a group it talks to nobody outside, and `server` counts there"
    sends(seen[-1], [(192 * times, times) for times in (1, 1, 3, 1)],  # rank 2 is the server
          "All traffic goes through rank `server`, whichever that is."
          if seen[-1][0][1].sent_bytes == 3 * 192 else
          "A worker sends its x once, to the server only; the server answers each once.")
    yield "the server sends R-1 times x, every other rank once: that is the bottleneck"


def _of_layers(per_node, result):
    got, right, ranks, xs = result.got, result.right, result.ranks, result.xs
    if got.shape != right.shape:
        return {f"{got.numel()} of {right.numel()} elements, in shape {tuple(got.shape)}": (
            got, LENGTHS if 2 * got.numel() > right.numel() else "After the sum across the nodes "
            "each rank has one shard: an all-gather inside the node must follow.")}
    node = ranks.index // per_node
    named = {f"the sum of node {node} only": (
        sum(xs[node * per_node:(node + 1) * per_node]),
        "The nodes never met: all-reduce the shard over the group `across`.")}
    if result.case.kind == "marks" and bool((got != got[0]).any()):
        named["a sum in which some parts lack some ranks"] = got, ORDER
    return named | of_sum(result)


def _layers(per_node):
    return Verb(SERVER.right, partial(_of_layers, per_node), prepare=partial(node_groups, per_node),
                call=lambda fn, x, case, keywords, groups: fn(x, *groups))


def check_hierarchical_all_reduce(fn):
    for nodes, per_node in ((1, 1), (1, 2), (3, 1), (2, 4)):  # ranks on each node
        *_, on_8 = run(fn, _layers(per_node), [MARKS, *TYPES, Case(96)], nodes * per_node,
                       nodes=nodes)
    yield "right on 1, 2, 3, 8 ranks, in 1, 2, 3 nodes; four types"
    cases = [*UNEVEN_CASES, Case(1001, kind="normal"), Case(96)]
    *_, agreeing, on_6 = run(fn, _layers(2), cases, 6, LENGTHS, nodes=3)
    ranks_agree(agreeing)
    yield "on 6 too, when nothing divides (0, 1, 2, 7, 1001), when x is not contiguous; x unchanged"
    no_backend(on_8)
    _link_bytes(on_8, nodes=2, per_node=4, nbytes=96 * 4)
    _link_bytes(on_6, nodes=3, per_node=2, nbytes=96 * 4)  # with two, a server does as well
    sent, least = sum(traffic.sent_bytes for _, traffic in agreeing), 8 * 1001 * 5  # of two rings
    expect(sent <= least, f"with 1,001 elements the ranks send {sent:,} bytes in all; {least:,} "
           "are enough", f"Nothing is padded. {LENGTHS}")
    yield "over the slow link each rank sends 2(M-1)/M of one L-th of the bytes, inside 2(L-1)/L"


def _link_bytes(seen, nodes, per_node, nbytes):
    """Each rank of 100 MB, as it is told, sends its part over both kinds of links."""
    slow_best = 2 * (nodes - 1) * nbytes // (nodes * per_node)
    fast_best = 2 * (per_node - 1) * nbytes // per_node
    slow, fast = (_bytes(seen, per_node, is_inside) for is_inside in (False, True))
    hint = "Sum inside the node first, and let only a shard of that sum cross to its peers."
    if sum(slow) == slow_best * len(seen):
        hint = "One rank carries more than the others. Let each take its own shard across."
    elif nodes > 2:  # on two nodes it was right
        hint = "Across the nodes, too, a ring sends the fewest bytes: ring_all_reduce."
    elif len(set(slow)) > 1:
        hint = f"This is a flat ring (group=None?): use the groups inside and across. {hint}"
    elif fast == [fast_best // nodes] * len(seen):
        hint = f"The groups are swapped: the big transfers go over the slow link. {hint}"
    told = " and ".join(f"{100 * n / nbytes:.3g} MB" for n in sorted({*slow}))
    expect(slow == [slow_best] * len(seen), f"of a 100 MB tensor, ranks send {told} over the slow "
           f"link; {100 * slow_best / nbytes:.3g} MB each are enough", hint)
    expect(fast == [fast_best] * len(seen), "inside the node a rank sends "
           f"{100 * max(fast) / nbytes:g} MB of a 100 MB tensor; {100 * fast_best / nbytes:g} MB "
           "are enough", "Inside, one reduce-scatter comes before and one all-gather after.")


def _bytes(seen, per_node, is_inside):
    """What each rank sent to the ranks of its node, or to those of other nodes."""
    return [sum(n for peer, n in traffic.bytes_to.items()
                if (peer // per_node == rank // per_node) == is_inside)
            for rank, (_, traffic) in enumerate(seen)]
