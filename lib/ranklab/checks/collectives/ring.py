"""The ring: reduce-scatter, all-gather, all-reduce."""

import torch
import torch.distributed as dist

from ranklab.checks.collectives.inputs import (
    COST, FLAT, INTO, KEPT, MARKS, MARKS_INTO, MEAN, OWN_TYPE, TYPES, UNEVEN, WORLD_SIZES, Case,
    all_reduce_by_torch, out_for, seen_of, two_calls, two_sums,
)
from ranklab.checks.prover import GROUPS, Proof, Slip, Stage
from ranklab.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, sendrecv

ALONE = (Case(6, has_out=True),)
LENGTHS = ("R does not divide some of these lengths: tensor_split cuts chunks whose lengths differ "
           "by one.")
OUTSIDE = "Here `out` is given. It is contiguous, and filled with other numbers."
IN_GROUPS = "It was right on all ranks. Here there are groups, whose ranks are not 0 .. n-1."
GROUP = "Pass `group` to every call that takes it: get_rank(group), sendrecv(..., group)."
OUT = "What you return is not in `out`: receive into the chunks of `out`, and add in place."


def _passes(number, R):
    """Return the cost of passing R-1 of R chunks on, so often, to one neighbour."""
    return number * (R - 1) / R, number * (R - 1), min(1, R - 1)


def _stages(see, oracle, name, cost):
    return (
        Stage({f"{name}, on 1, 2, 3, 4 ranks; four types": (),
               f"x unchanged; each rank sends {cost} of the bytes, to one neighbour": COST},
              see, (MARKS, *TYPES, Case(24, kind="normal")), WORLD_SIZES, oracle=oracle),
        Stage("when the length does not divide (0, 1, 2, 7, 1001), when x is not "
              "contiguous", see, (*UNEVEN, Case(1001, kind="normal")), (4,), oracle=oracle,
              note=LENGTHS),
        Stage("in the given `out`", see, INTO, (4,), oracle=oracle, note=OUTSIDE),
        Stage("also on a single rank, in the given `out`", see, ALONE, (1,), oracle=oracle),
        Stage("inside a group it talks only to that group's ranks", see, MARKS_INTO, (4,), GROUPS,
              oracle=oracle, note=IN_GROUPS))


# --- reduce-scatter -------------------------------------------------------------------------------

def _see_scatter(fn, case, ranks):
    yield from two_calls(fn, ranks, case, _passes(1, ranks.size), of_out=lambda out: (
        out.flatten().tensor_split(ranks.size)[ranks.index]))


def scatter_by_torch(x, group=None, out=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    total = all_reduce_by_torch(x, group, out)
    return total.flatten().tensor_split(R)[rank]


def whole_tensor(x, group=None, out=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    message, total = x.flatten(), x.flatten().clone()
    for _ in range(R - 1):
        buffer = torch.empty_like(message)
        message = sendrecv(message, (rank + 1) % R, buffer, (rank - 1) % R, group)
        total += message
    return total.tensor_split(R)[rank]


ADD = "buffer.add_(chunks[i])"
EXCHANGE = "sendrecv(partial, (rank + 1) % R, buffer, (rank - 1) % R, group)"
RETURN = "    return partial"
ALONE_COPY = "sums[0].copy_(partial) if sums else partial.clone()"
SCATTER = Proof(
    ring_reduce_scatter, *_stages(_see_scatter, scatter_by_torch, "rank r has chunk r of the sum",
                                  "(R-1)/R"),
    mistakes=(
        Slip("There are too few steps: make R-1 of them, range(1, R).",
             ("range(1, R)", "range(1, R - 1)", RETURN, "    return partial.clone()")),
        Slip("The indices are shifted. Chunk r must end at rank r after R-1 steps to the right, so "
             "it starts at rank r+1: each rank first sends chunk rank-1.",
             ("chunks[rank - 1]", "chunks[rank]", "(rank - 1 - step)", "(rank - step)")),
        Slip("The ring runs backwards: send to the right, (rank + 1) % R, and receive from the "
             "left.",
             (EXCHANGE, "sendrecv(partial, (rank - 1) % R, buffer, (rank + 1) % R, group)")),
        Slip("You pass on what arrived without adding your own share.", (ADD, "buffer")),
        Slip("You mix shares of different chunks: in step s = 1 .. R-1, chunk (rank - 1 - s) % R "
             "arrives, so add your share of that chunk.",
             (ADD, "buffer.add_(chunks[(i + 1) % R])"), (ADD, "buffer.add_(chunks[rank])")),
        Slip("x itself is changed: chunks cut from x are views of x. Add into the tensor that "
             "arrived.", (ADD, "chunks[i].add_(buffer)")),
        Slip(MEAN, (RETURN, "    return (partial / R).to(x.dtype)")),
        Slip(OUT, (ADD, "buffer + chunks[i]"), ("if out is not None else None", "if False else 0")),
        Slip("A tensor of several numbers is not true or false: ask `out is not None`. And cut "
             "`out` with tensor_split, which gives a tuple of chunks of any lengths.",
             ("out.view(-1).tensor_split(R)", "out.view(R, -1)")),
        Slip("Return only one chunk, the finished one.",
             (RETURN, f"    if out is not None:\n        return out\n{RETURN}")),
        Slip("Return the chunk even when `out` is given.",
             (RETURN, "    return partial if out is None else None")),
        Slip("Return a copy on a single rank as well: a caller who writes into the result would "
             "write into x.",
             (ALONE_COPY, "sums[0].copy_(partial) if sums else partial")),
        Slip("On a single rank as well, the result must be in the `out` that is given.",
             (ALONE_COPY, "partial.clone()")),
        Slip(GROUP, (EXCHANGE, EXCHANGE.replace(", group", "")),
             ("dist.get_rank(group), dist.get_world_size(group)",
              "dist.get_rank(), dist.get_world_size()")),
        Slip("Send one message in each step: every message costs latency.",
             (EXCHANGE, "for a, b in zip(partial.tensor_split(2), buffer.tensor_split(2)):\n"
              f"            {EXCHANGE.replace('partial', 'a').replace('buffer', 'b')}")),
        Slip("You pass the whole tensor each time. One chunk per step is enough.", whole_tensor),
    ), hints=(
        "Cut x with x.flatten().tensor_split(R). A partial sum travels round the ring, and every "
        "rank adds its own share. Where must it start in order to end at its owner?",
        "Chunk r ends at rank r after R-1 steps, so it starts at rank r+1: a rank first sends its "
        "chunk rank-1. In step s = 1 .. R-1 it receives chunk (rank - 1 - s) % R and adds its own.",
        "partial = chunks[rank - 1]; for step in range(1, R): i = (rank - 1 - step) % R; receive "
        "into buffer (like chunks[i]) while partial is sent; partial = buffer.add_(chunks[i])",
    ))


# --- all-gather -----------------------------------------------------------------------------------

def _see_gather(fn, case, ranks):
    """Look at calls with `out`, whose length R need not divide; and at one more call with the shard
    already in its place, as ring_all_reduce calls it.
    """
    looks = []
    for turn in range(2 + case.has_out):
        x, whole = case.x(dist.get_rank(), turn), case.x(9, turn)
        out = None
        if case.has_out and case.kind != "marks":
            out = out_for(case, whole)
            x = whole.flatten().tensor_split(ranks.size)[ranks.index].clone()
            if turn == 2:
                x = out.view(-1).tensor_split(ranks.size)[ranks.index].copy_(x)
        elif case.has_out:
            out = x.new_full((ranks.size * x.numel(),), 99)
        looks.append(seen_of(lambda x, keywords: fn(x, **keywords), ranks, case, x, out,
                             _passes(1, ranks.size),
                             size=ranks.size * x.numel() if out is None else out.numel()))
    yield from looks


def gather_by_torch(shard, group=None, out=None):
    R, shard = dist.get_world_size(group), shard.flatten()
    if out is None:
        parts = [torch.empty_like(shard) for _ in range(R)]
        dist.all_gather(parts, shard, group=group)
        return torch.cat(parts)
    parts = [part.clone() for part in out.view(-1).tensor_split(R)]
    parts[dist.get_rank(group)] = shard
    for r, part in enumerate(parts):  # lengths may differ
        dist.broadcast(part, group=group, group_src=r)
    return out.copy_(torch.cat(parts).view(out.shape))


GIVE = "sendrecv(chunks[have], (rank + 1) % R, chunks[want], (rank - 1) % R, group)"
MADE = "shard.new_empty(R * shard.numel())"
GATHER = Proof(
    ring_all_gather,
    Stage({"every rank has all shards in rank order, on 1, 2, 3, 4 ranks; four types": (),
           "x unchanged; each rank sends (R-1)/R of the result's bytes, to one neighbour": COST},
          _see_gather, (Case(3, kind="normal"), *TYPES), WORLD_SIZES, oracle=gather_by_torch),
    Stage("in the given `out`, which may hold the shard; R need not divide the length",
          _see_gather, tuple(case._replace(has_out=True) for case in UNEVEN), (4,),
          oracle=gather_by_torch, note=LENGTHS),
    Stage("also on a single rank, in the given `out`", _see_gather, ALONE, (1,),
          oracle=gather_by_torch),
    Stage("inside a group it talks only to that group's ranks", _see_gather, MARKS_INTO, (4,),
          GROUPS,
          oracle=gather_by_torch, note=IN_GROUPS),
    mistakes=(
        Slip("The shard of rank r belongs in place r, on every rank: the place comes from the rank "
             "that made the shard, not from when it arrived.",
             ("chunks[rank].copy_", "chunks[0].copy_", "(rank - step + 1) % R, (rank - step) % R",
              "step - 1, step")),
        Slip("Pass on what arrived last; your own shard goes out only once, in the first step.",
             ("sendrecv(chunks[have]", "sendrecv(chunks[rank]")),
        Slip("In a ring, a rank talks only to its neighbours: send to rank+1.",
             (GIVE, "sendrecv(chunks[rank], (rank + step) % R, chunks[want], (rank - step) % R, "
              "group)")),
        Slip("The ring runs backwards: send to the right, (rank + 1) % R, and receive from the "
             "left.",
             (GIVE, "sendrecv(chunks[have], (rank - 1) % R, chunks[want], (rank + 1) % R, group)")),
        Slip("There is one step too many: make R-1 steps, not R.",
             ("range(1, R)", "range(1, R + (R > 1))")),
        Slip("The result must be in the `out` that is given.",
             ("if out is None", "if True"), ("if out is None", "if out is None or R == 1"),
             ("chunks = out", "out = torch.empty_like(out)\n    chunks = out")),
        Slip("Here the shard is already in `out`, as in ring_all_reduce, and it gets lost. Do not "
             "clear `out`, or receive over the shard before you have sent it.",
             ("chunks = out", "chunks = out.zero_()")),
        Slip(GROUP, (GIVE, GIVE.replace(", group", "")),
             ("    rank, R =", "    group = group if out is None else None\n    rank, R =")),
        Slip(KEPT, ("out=None):", "out=None, kept={}):", MADE,
                    f"kept.setdefault((R, shard.shape, shard.dtype), {MADE})")),
        Slip(OWN_TYPE, ("shard.new_empty(", "torch.empty(")),
    ), hints=(
        "Make room for R shards, put your own in place `rank`, and pass on what arrives.",
        "In each step send what arrived last: in step s = 1 .. R-1 shard (rank - s) % R comes in, "
        "and the one before, (rank - s + 1) % R, goes out. tensor_split of `out` gives the places.",
        "chunks[rank].copy_(shard.flatten()); for step in range(1, R): have, want = (rank - step + "
        "1) % R, (rank - step) % R; sendrecv(chunks[have], right, chunks[want], left, group)",
    ))


# --- all-reduce -----------------------------------------------------------------------------------

def _see_reduce(fn, case, ranks):
    yield from two_sums(fn, ranks, case, _passes(2, ranks.size))


def passes_the_whole(x, group=None, out=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    of_all = torch.stack([x.contiguous()] * R)
    for step in range(1, R):
        source, target = of_all[(rank - step + 1) % R], of_all[(rank - step) % R]
        sendrecv(source, (rank + 1) % R, target, (rank - 1) % R, group)
    return of_all.sum(dim=0, dtype=x.dtype)


def own_order(x, group=None, out=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    message, total = x.contiguous(), x.contiguous().clone()
    for _ in range(R - 1):
        buffer = torch.empty_like(message)
        message = sendrecv(message, (rank + 1) % R, buffer, (rank - 1) % R, group)
        total += message
    return total


def pads(x, group=None, out=None):
    padded = torch.cat([x.flatten(), x.new_zeros(-x.numel() % dist.get_world_size(group))])
    shard = ring_reduce_scatter(padded, group)
    return ring_all_gather(shard, group)[: x.numel()].view(x.shape)


GATHERED = "ring_all_gather(shard, group, out)"
ALL_REDUCE = Proof(
    ring_all_reduce, *_stages(_see_reduce, all_reduce_by_torch, "every rank has the sum, in the "
                              "same bits", "2(R-1)/R"),
    mistakes=(
        Slip("After reduce-scatter each rank has one chunk; an all-gather must follow.",
             (f"return {GATHERED}", "return shard")),
        Slip("The chunks are flat. Give the result x's shape.", (GATHERED, f"{GATHERED}.view(-1)")),
        Slip(MEAN, (GATHERED, f"({GATHERED} / dist.get_world_size(group)).to(x.dtype)")),
        Slip("R does not divide this length, so shards differ in length. If no `out` is given, "
             "make one, x.new_empty(x.shape), and pass `out` to both calls.",
             (GATHERED, "ring_all_gather(shard, group).view(x.shape)")),
        Slip(OWN_TYPE, ("shard = ring_reduce_scatter(x, group, out)",
              "shard = ring_reduce_scatter(x.float(), group).to(x.dtype)")),
        Slip("Nothing was written to the `out` that was given.",
             ("    if out is None:", "    if True:")),
        Slip("x is not free to serve as `out`: what arrives overwrites this rank's shares before "
             "they are added. If no `out` is given, make one, x.new_empty(x.shape).",
             ("x.new_empty(x.shape)", "x")),
        Slip(FLAT, ("x.new_empty(x.shape)", "torch.empty_like(x)")),
        Slip(GROUP, (GATHERED, "ring_all_gather(shard, None, out)"),
             ("    if out is None:", "    group = group if out is None else None\n"
              "    if out is None:")),
        Slip("You pass the whole tensor R-1 times. Pass one chunk at a time: after R-1 steps each "
             "rank owns one finished chunk.", passes_the_whole),
        Slip("Each rank adds in a different order, so replicas drift apart. Let one rank finish a "
             "chunk and send the finished chunk to the others.", own_order),
        Slip("You send padding as well. tensor_split cuts any length into R chunks.", pads),
    ), hints=(
        "You have both halves already. What does a rank have after reduce-scatter?",
        "Reduce-scatter leaves each rank with one finished chunk; all-gather gives the chunks to "
        "all ranks.",
        "out = x.new_empty(x.shape) when none is given; shard = ring_reduce_scatter(x, group, "
        "out); return ring_all_gather(shard, group, out)",
    ))
