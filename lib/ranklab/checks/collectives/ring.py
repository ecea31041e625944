"""The ring: reduce-scatter, all-gather, all-reduce. Checked for values, then bytes and messages."""

import torch
import torch.distributed as dist

from ranklab.checks.beside import expect
from ranklab.checks.collectives.cases import (
    INTO, MARKS, TYPES, UNEVEN, UNEVEN_CASES, WORLD_SIZES, Case, Verb, of_sum, run,
    stays_in_group,
)
from ranklab.checks.collectives.traffic import ranks_agree, sends
from ranklab.checks.handles import uses
from ranklab.engine import device

WHOLE = 192  # bytes of Case(48), whose traffic is looked at
HAND_ON = ("R does not divide this length, so shards differ in length: make `out` where none is "
           "given, x.new_empty(x.shape), and hand `out` to both. It says how long each shard is.")
SHIFTED = ("The indices are shifted. Chunk r must end at rank r after R-1 steps to the right, so "
           "it starts at rank r+1: each rank first sends chunk rank-1.")
SWAPPED = ("The ring is swapped: `to` is the right neighbour, (rank + 1) % R, and `source` the "
           "left one, (rank - 1) % R.")
UNSUMMED = ("Are there R-1 steps, range(1, R)? The result is the partial sum that arrived last, "
            "with your share added.")
ORDER = ("The shard of rank r belongs in place r, on every rank: the place comes from the rank "
         "that made the shard, not from when it arrived.")
LIES_THERE = ("Here the shard lies in `out` already, as ring_all_reduce calls it, and it is lost. "
              "Do not clear `out`, nor receive there before you have sent.")


def _chunk(x, ranks):
    """The chunk of x that belongs to this rank: a view where x is contiguous."""
    return x.flatten().tensor_split(ranks.size)[ranks.index]


def _shards(xs, case):
    return sum(xs).flatten().tensor_split(len(xs))


def _goes_left(result):
    """Is the result wrong because messages go round the other way?"""
    R, left = result.ranks.size, result.ranks.members[result.ranks.index - 1]
    if R <= 2 or {*result.traffic.bytes_to} != {left}:
        return {}
    return {f"wrong, and it sends to its left neighbour, rank {left}": (result.got, SWAPPED)}


def _of_shard(result):
    own = result.xs[result.ranks.index].flatten().tensor_split(result.ranks.size)
    named = {f"its own share of chunk {i}, unsummed": (own[i], UNSUMMED) for i in range(len(own))}
    for i, shard in enumerate(_shards(result.xs, result.case)):
        named[f"chunk {i} of the sum"] = shard, SHIFTED
    return named | _goes_left(result) | of_sum(result)


SCATTER = Verb(
    _shards, _of_shard, part=_chunk, shape="Return one chunk only: the finished one.",
    advice="Every rank is in it once, so the steps are right. But the share that you add must be "
    "of the chunk that arrives: in step s = 1 .. R-1 that is chunk (rank - 1 - s) % R. Else it "
    "mixes shares of different chunks.")


def check_ring_reduce_scatter(fn):
    for ranks in WORLD_SIZES:
        run(fn, SCATTER, [MARKS, *TYPES], ranks)
    yield "rank r has chunk r of the sum, on 1, 2, 3, 8 ranks; four types"
    seen = run(fn, SCATTER, [Case(48), *UNEVEN_CASES], 4, UNEVEN)
    yield "on 4 too, when the length does not divide (0, 1, 2, 7, 1001), when x is not contiguous"
    _one_pass(seen[0])
    yield "x unchanged; each rank sends exactly (R-1)/R of the bytes, to one neighbour"
    run(fn, SCATTER, INTO, 4, UNEVEN)
    run(fn, SCATTER, [Case(6, has_out=True)], 1)
    stays_in_group(fn, SCATTER)
    yield "in the `out` that is given; inside a group it talks to nobody outside"


def _of_shards(result):
    got, right, R = result.got, result.right, result.ranks.size
    named = _goes_left(result)
    if (got.shape, got.dtype) != (right.shape, right.dtype):
        return named
    parts, pieces = ([each.flatten().tensor_split(R)[r] for r in range(R)] for each in (right, got))
    order = [next((r for r in range(R) if torch.equal(parts[r], piece)), None) for piece in pieces]
    known = [r for r in order if r is not None]
    hint = (LIES_THERE if result.case.kind == IN_PLACE else ORDER if len({*known}) == R else
            "Pass on what arrived last; your own shard goes out first, and once."
            if len({*known}) < len(known) else "")
    return named | ({f"the shards of ranks {order}": (got, hint)} if hint else {})


def _gives_shard(case, ranks, turn):
    if not _is_cut(case):
        x = case.x(dist.get_rank(), turn).to(device())
        return x, torch.full((ranks.size * x.numel(),), 99).to(x)
    whole = case.x(0, turn).to(device())
    out, shard = torch.full(whole.shape, 99).to(whole), _chunk(whole, ranks).clone()
    return _chunk(out, ranks).copy_(shard) if case.kind == IN_PLACE else shard, out


def _is_cut(case):
    """Are the shards parts of one tensor, which lengths do not divide?"""
    return case.has_out and case.kind != "marks"


IN_PLACE = "in its place"  # the shard lies in `out`, as ring_all_reduce does it
GATHER = Verb(
    lambda xs, case: [torch.cat(xs).reshape(case.x(0).shape if _is_cut(case) else -1)] * len(xs),
    _of_shards, "Is your own shard copied in? Are there R-1 steps?", give=_gives_shard,
    xs=lambda case, ranks, turn: [*case.x(0, turn).flatten().tensor_split(ranks.size)]
    if _is_cut(case) else [case.x(r, turn) for r in ranks.members])


def check_ring_all_gather(fn):
    for ranks in WORLD_SIZES:
        run(fn, GATHER, [Case(3, kind="normal"), *TYPES], ranks)
    yield "every rank has all shards in rank order, on 1, 2, 3, 8 ranks; four types"
    cases = [Case(48), *UNEVEN_CASES, Case(1001, kind=IN_PLACE)]
    seen = run(fn, GATHER, [case._replace(has_out=True) for case in cases], 4, UNEVEN)
    run(fn, GATHER, [Case(6, has_out=True)], 1)
    yield "on 4 too, in the `out` that is given, where the shard may lie already"
    stays_in_group(fn, GATHER)
    yield "inside a group it talks to nobody outside"
    _one_pass(seen[0])
    yield "x unchanged; each rank sends exactly (R-1)/R of the bytes, to one neighbour"


def _of_whole(result):
    got, right = result.got, result.right
    if got.numel() == right.numel() and got.shape != right.shape:
        return {f"of shape {tuple(got.shape)}, and x of {tuple(right.shape)}": (
            got, "The chunks are flat. Give the result x's shape.")}
    if got.numel() < right.numel():
        return {f"{got.numel()} of {right.numel()} elements": (
            got, "After reduce-scatter each rank has one chunk; an all-gather must follow.")}
    return of_sum(result)


ALL_REDUCE = Verb(lambda xs, case: [sum(xs)] * len(xs), _of_whole)


def check_ring_all_reduce(fn):
    for ranks in WORLD_SIZES:
        run(fn, ALL_REDUCE, [MARKS, *TYPES], ranks)
    yield "right on 1, 2, 3, 8 ranks; four types"
    hint = HAND_ON if uses(fn, "ring_all_gather") else UNEVEN
    seen = run(fn, ALL_REDUCE, [Case(48), *UNEVEN_CASES, Case(1001, kind="normal")], 4, hint)
    yield "on 4 too, when the length does not divide (0, 1, 2, 7, 1001), when x is not contiguous"
    ranks_agree(seen[-1])
    yield "x unchanged; all ranks agree to the last bit"
    _two_passes(seen[0])
    everything = sum(traffic.sent_bytes for _, traffic in seen[1])
    expect(everything == 2 * 3 * 1001 * 4, f"with 1001 elements, 4 ranks send {everything} bytes "
           f"in all, not {2 * 3 * 1001 * 4}", "Do you pad to a multiple of R? Padding is sent too. "
           "tensor_split cuts any length into R chunks.")
    yield "each rank sends exactly 2(R-1)/R of the bytes, also when R does not divide"
    run(fn, ALL_REDUCE, INTO, 4, hint)
    run(fn, ALL_REDUCE, [Case(6, has_out=True)], 1)
    stays_in_group(fn, ALL_REDUCE)
    yield "in the `out` that is given; inside a group it talks to nobody outside"


def _one_pass(seen):
    _sends_as_a_ring(seen, 1, {
        3 * WHOLE: "You pass the whole tensor each time. One chunk a step is enough.",
        WHOLE: "One step too many: R-1 steps, not R. Nobody needs to send a chunk to its owner.",
        WHOLE * 6 // 4: "Each step sends everything that has arrived so far. Only the last arrival "
        "is new to the next rank."}, "R-1 steps of one chunk each: 3/4 of the bytes on 4 ranks.")


def _two_passes(seen):
    _sends_as_a_ring(seen, 2, {3 * WHOLE: "You pass the whole tensor R-1 times. Pass one chunk at "
                               "a time: after R-1 steps each rank owns one finished chunk."},
                     "It is R-1 chunks in reduce-scatter and R-1 in all-gather: is there a step "
                     "too many, or is it gathered or summed twice?")


def _sends_as_a_ring(seen, passes, slips, hint):
    """Each of 4 ranks sends 3 chunks in a pass, to one neighbour, and one message a step.

    slips  {bytes that a rank sends: the hint about them}
    """
    if len({traffic.sent_bytes for _, traffic in seen}) > 1:
        hint, slips = "One rank does more than the others. In a ring no rank is special.", {}
    sends(seen, [(passes * WHOLE * 3 // 4, passes * 3)] * 4,
          slips.get(seen[0][1].sent_bytes, hint))
    for rank, (_, traffic) in enumerate(seen):
        expect(len(traffic.bytes_to) == 1, f"rank {rank} of 4 sends to ranks "
               f"{sorted(traffic.bytes_to)}", "In a ring a rank talks to its neighbours only: send "
               "to rank+1.")
