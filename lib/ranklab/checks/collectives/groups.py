"""One rank in the middle, or two kinds of links: parameter_server, hierarchical_all_reduce."""

import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.collectives.inputs import (
    BUILD, CHANGED, COST, EMPTY, FLAT, KEPT, MARKS, MEAN, OWN_TYPE, ROOTS, STRIDED, TYPES, UNEVEN,
    WORLD_SIZES, Case, all_reduce_by_torch, two_sums,
)
from ranklab.checks.handles import DROPPED
from ranklab.checks.prover import GROUPS, AtMost, Proof, Slip, Stage
from ranklab.collectives import (
    hierarchical_all_reduce, node_groups, parameter_server, ring_all_gather, ring_all_reduce,
    ring_reduce_scatter, verbs,
)


# --- hierarchical_all_reduce ----------------------------------------------------------------------

class Layers(NamedTuple):
    """An input, with the ranks laid out as this many nodes."""

    nodes: int
    case: Case

    def __str__(self):
        return f"{self.nodes} node{'s' * (self.nodes > 1)}, {self.case}"


def _see_layers(fn, layers, ranks):
    M, L = layers.nodes, ranks.size // layers.nodes
    nbytes, is_even = layers.case.x(0).nbytes, layers.case.n % ranks.size == 0
    inside, across = groups_of_nodes(L, dist.group.WORLD)

    def by_link(traffic):
        node = dist.get_rank() // L
        fast = sum(n for peer, n in traffic.bytes_to.items() if peer // L == node)
        shares = {"over the slow link": (traffic.sent_bytes - fast, 2 * (M - 1) / (M * L)),
                  "inside the node": (fast, 2 * (L - 1) / L)}
        return {f"bytes {where}": AtMost(
            100 * sent / nbytes, 100 * share, f"sends {{:.3g}} MB of a 100 MB tensor {where}; "
            "{:.3g} MB are enough") for where, (sent, share) in shares.items()
            if nbytes and is_even}

    cost = 2 * (ranks.size - 1) / ranks.size, math.inf, ranks.size
    yield from two_sums(lambda x: fn(x, inside, across), ranks, layers.case, cost, more=by_link)


@functools.cache
def groups_of_nodes(per_node, world):
    """Make the groups once per launch, however many cases there are."""
    return node_groups(per_node)


def sum_by_torch(x, inside=None, across=None):
    return all_reduce_by_torch(x)


def flat_ring(x, inside=None, across=None):
    return ring_all_reduce(x)


def whole_tensor_across(x, inside=None, across=None):
    return ring_all_reduce(ring_all_reduce(x, inside), across)


def across_first(x, inside=None, across=None):
    return ring_all_reduce(ring_all_reduce(x, across), inside)


def leaders_across(x, inside=None, across=None):
    total = verbs.reduce(x, 0, inside)
    return verbs.broadcast(x if total is None else ring_all_reduce(total, across), 0, inside)


def pads(x, inside=None, across=None):
    padded = torch.cat([x.flatten(), x.new_zeros(-x.numel() % dist.get_world_size(inside))])
    shard = ring_all_reduce(ring_reduce_scatter(padded, inside), across)
    return ring_all_gather(shard, inside)[:x.numel()].reshape(x.shape)


def layers_of(nodes, *cases):
    return tuple(Layers(nodes, case) for case in cases)


SCATTERED, ACROSS = "ring_reduce_scatter(x, inside)", "ring_all_reduce(shard, across)"
GATHERED = "ring_all_gather(shard, inside, out=x.new_empty(x.shape))"
EVEN = MARKS, *TYPES, Case(24, kind="normal")
SLOW, FAST = "bytes over the slow link", "bytes inside the node"
LENGTHS = "If L does not divide the length, pass out=x.new_empty(x.shape) to the last all-gather."
HIERARCHICAL = Proof(
    hierarchical_all_reduce,
    Stage({"right on 6 ranks in 3 nodes, four types; when nothing divides (0, 1, 2, 7, 1001), when "
           "x is not contiguous; x unchanged": (*COST[:4],),
           "over the slow link each rank sends 2(M-1)/M of one L-th of the bytes, inside 2(L-1)/L":
           (SLOW, FAST, *COST[4:])},
          _see_layers, layers_of(3, *EVEN, *UNEVEN, Case(1001, kind="normal")), (6,),
          oracle=sum_by_torch, launch={"nodes": 3}),
    Stage("on 8 ranks in 2 nodes", _see_layers, layers_of(2, *EVEN), (8,), oracle=sum_by_torch,
          launch={"nodes": 2}),
    Stage("on 1 and 2 ranks in one node", _see_layers, layers_of(1, *EVEN), (2, 1),
          oracle=sum_by_torch),
    Stage("on 3 nodes of one rank", _see_layers, layers_of(3, *EVEN), (3,), oracle=sum_by_torch,
          launch={"nodes": 3}),
    mistakes=(
        Slip("The groups are swapped: the big transfers go over the slow link. Sum inside the node "
             "first.", (SCATTERED, "ring_reduce_scatter(x, across)", "(shard, across)",
                        "(shard, inside)", "(shard, inside, out", "(shard, across, out")),
        Slip("The nodes never communicate: all-reduce the shard over the group `across`.",
             (ACROSS, "shard")),
        Slip("The shard is reduced inside the node again: all-reduce it over the group `across`.",
             (ACROSS, "ring_all_reduce(shard, inside)")),
        Slip("Here a shard is less than one L-th of x: reduce-scatter over `inside`, then "
             "all-reduce over `across`.", (ACROSS, "ring_reduce_scatter(shard, across)"),
             (SCATTERED, "ring_reduce_scatter(x)")),
        Slip("Reduce-scatter inside the node: each rank then has one L-th of its node's sum.",
             (SCATTERED, "ring_reduce_scatter(x, across)")),
        Slip("The last step must gather the shards that the first one scattered, inside the node.",
             ("(shard, inside, out", "(shard, across, out")),
        Slip("After the sum across the nodes each rank has one shard: an all-gather inside the "
             "node must follow.", (f"return {GATHERED}", "return shard")),
        Slip(LENGTHS, (GATHERED, "ring_all_gather(shard, inside).view(x.shape)"),
             (GATHERED, "ring_all_gather(shard, inside)[:x.numel()].view(x.shape)")),
        Slip("Give the result x's shape.", (GATHERED, f"{GATHERED}.view(-1)")),
        Slip(MEAN, (GATHERED, f"({GATHERED} / dist.get_world_size()).to(x.dtype)")),
        Slip("Pass the groups on: without a group, a ring goes round all ranks.",
             (ACROSS, "ring_all_reduce(shard)"),
             (GATHERED, GATHERED.replace("inside, ", ""))),
        Slip("This is a flat ring: use the groups `inside` and `across`. Let only a shard of the "
             "node's sum cross to its peers.", flat_ring),
        Slip("The whole tensor crosses the slow link. Sum inside the node first, and let only a "
             "shard of that sum cross to its peers.", whole_tensor_across, across_first),
        Slip("Some ranks send more than others. Let each rank send its own shard across, round a "
             "ring.", leaders_across,
             (ACROSS, "parameter_server(shard, 0, across)"), parameter_server=parameter_server),
        Slip("Don't pad: tensor_split cuts any length. Pass out=x.new_empty(x.shape) to the last "
             "all-gather.", pads),
        Slip(OWN_TYPE, (SCATTERED, "ring_reduce_scatter(x.float(), inside).to(x.dtype)")),
        Slip(f"{CHANGED}Gather into a new tensor.", ("out=x.new_empty(x.shape)", "out=x")),
        Slip(FLAT, ("x.new_empty(x.shape)", "torch.empty_like(x)"), torch=torch),
        Slip(KEPT, ("across=None):", "across=None, kept={}):", "x.new_empty(x.shape)",
                    "kept.setdefault((x.shape, x.dtype), x.new_empty(x.shape))")),
        Slip("Build it yourself here, from ring_reduce_scatter, ring_all_reduce and "
             "ring_all_gather.", sum_by_torch),
    ), hints=(
        "Three lines are enough: do as much as you can inside the node, before and after you use "
        "the slow link.",
        "Reduce-scatter inside: each rank of the node then has one L-th of the node's sum. "
        "All-reduce that across, then all-gather inside.",
        "shard = ring_reduce_scatter(x, inside); shard = ring_all_reduce(shard, across); return "
        "ring_all_gather(shard, inside, out=x.new_empty(x.shape))",
    ))


# --- parameter_server -----------------------------------------------------------------------------

def _see_server(fn, case, ranks):
    R = ranks.size
    times = R - 1 if ranks.index == case.root_of(R) else 1  # the server answers each of them
    messages = times if case.n else 0
    yield from two_sums(functools.partial(fn, server=case.root_of(R)), ranks, case,
                        (times, messages, messages), cuts=False)


def sum_for_server(x, server=0, group=None):
    return all_reduce_by_torch(x, group)


def ring_instead(x, server=0, group=None):
    return ring_all_reduce(x, group)


def all_to_all(x, server=0, group=None):
    return verbs.all_gather(x.contiguous(), group).sum(dim=0, dtype=x.dtype)


ASK = "dist.send(total, group=group, group_dst=server)"
TAKE = "dist.recv(total, group=group, group_src=server)"
COLLECT = "dist.recv(buffer, group=group, group_src=worker)"
ANSWER = "dist.send(total, group=group, group_dst=worker)"
BUFFER, START = "buffer = torch.empty_like(total)", "    rank, R ="
CLONE, RETURN = "x.clone(memory_format=torch.contiguous_format)", "    return total\n"
SERVER = Proof(
    parameter_server,
    Stage({"every rank has the sum, for several servers, on 1, 2, 3, 4 ranks; four types": (),
           "x unchanged; the server sends R-1 times x, every other rank once: that is the "
           "bottleneck": COST},
          _see_server, (*ROOTS, *TYPES, Case(24, kind="normal")), WORLD_SIZES,
          oracle=sum_for_server),
    Stage("for lengths 0, 1, 2, 7, 1001, when x is not contiguous", _see_server,
          (*UNEVEN, Case(1001, kind="normal")), (4,), oracle=sum_for_server),
    Stage("inside a group it talks only to that group's ranks, and `server` is a rank of the group",
          _see_server,
          (ROOTS[1],), (4,), GROUPS, oracle=sum_for_server),
    mistakes=(
        Slip("All traffic goes through rank `server`, which need not be rank 0.",
             (START, f"    server = 0\n{START}")),
        Slip("Receive from all workers before you send: an earlier reply lacks the x of the "
             "workers that come later.", ("total += buffer\n        for worker in workers:",
                                  "total += buffer")),
        Slip("Workers still have their own x: the server must send the sum back, and each worker "
             "must receive it into the tensor it returns.", (TAKE, "pass", ANSWER, "pass"),
             (TAKE, f"{BUFFER}\n        {TAKE.replace('total', 'buffer')}")),
        Slip("The server adds each tensor that arrives: total += buffer.",
             ("total += buffer", "total = buffer.clone()")),
        Slip("The server's own x is part of the sum.",
             (BUFFER, f"{BUFFER}\n        total.zero_()")),
        Slip("The server's own x counts once.", (BUFFER, f"{BUFFER}\n        total += x")),
        Slip("The sum that comes back already includes the worker's x: return it unchanged.",
             (TAKE, f"{TAKE}\n        total += x")),
        Slip(MEAN, (RETURN, "    return (total / R).to(x.dtype)\n")),
        Slip("Deadlock: every rank is waiting in recv. A worker must send first, then receive.",
             (ASK, TAKE.replace("total", "buffer"), TAKE, ASK, "workers = [r for",
              "buffer = torch.empty_like(total)\n    workers = [r for")),
        Slip("The server talks to workers only, not to itself.", (" if r != server]", "]")),
        Slip("Each worker sends its x once, to the server only, and the server sends each worker "
             "one answer.",
             ring_instead, all_to_all),
        Slip("Send each tensor in one message: every message pays its own latency.",
             (ASK, "for part in total.view(-1).tensor_split(2):\n"
              "            dist.send(part, group=group, group_dst=server)",
              COLLECT, "for part in buffer.view(-1).tensor_split(2):\n"
              "                dist.recv(part, group=group, group_src=worker)")),
        Slip(EMPTY, ("server and total.numel()", "server", "elif total.numel()", "else")),
        Slip(OWN_TYPE, (CLONE, "x.float()"), (CLONE, "x.float()", RETURN,
                                              "    return total.to(x.dtype)\n")),
        Slip(f"{CHANGED}Add into a copy. (x.contiguous() makes no copy if x is already "
             "contiguous.)",
             (CLONE, "x"), (CLONE, "x.contiguous()")),
        Slip("Return a copy on a single rank as well: a caller who writes into the result would "
             "write into x.",
             (RETURN, "    return total if R > 1 else x\n")),
        Slip(STRIDED, (CLONE, "x.clone()"), ("torch.empty_like(total)", "torch.empty_like(x)")),
        Slip(KEPT, ("group=None):", "group=None, kept={}):", CLONE,
                    f"kept.setdefault((R, x.shape, x.dtype), {CLONE})")),
        Slip(DROPPED, (ANSWER, ANSWER.replace("send", "isend"))),
        Slip("Pass `group` to every call that takes it: get_rank(group), dist.send(..., "
             "group=group, group_dst=...).", (START, f"    group = None\n{START}"),
             (ASK, ASK.replace("group=group, ", ""))),
        Slip("`server` and the workers are ranks within the group: use group_dst and group_src. "
             "dst= and src= take global ranks.",
             (ASK, ASK.replace("group_dst", "dst"), TAKE, TAKE.replace("group_src", "src"),
              COLLECT, COLLECT.replace("group_src", "src"),
              ANSWER, ANSWER.replace("group_dst", "dst"))),
        Slip(BUILD, sum_for_server),
    ), hints=(
        "There are two kinds of ranks. Workers send x and wait for the answer; the server adds.",
        "The server receives from each worker in turn, adding as it goes, and only then sends the "
        "sum to all of them.",
        "if rank != server: send(total), recv(total), both with group=group and group_dst or "
        "group_src=server; else: for each worker: recv(buffer); "
        "total += buffer; then for each worker: send(total). An empty x is not sent at all.",
    ))
