"""The ring: reduce-scatter, all-gather, all-reduce. Checked for values, then bytes and messages."""

import torch

from ranklab.checks.collectives.arguments import (
    call_gather_in_group, call_plain, call_scatter, explain_into, own_chunk, stays_in_group,
)
from ranklab.checks.collectives.cases import (
    MARK, TYPES, UNEVEN, WORLD_SIZES, Case, observe, of_root, plain_cases, sums, uneven_cases,
    values,
)
from ranklab.checks.collectives.judging import (
    compare, explain_mean, no_backend, ranks_agree, right_on, sends,
)
from ranklab.checks.exercise import Mistake
from ranklab.checks.handles import uses

WHOLE = 192  # bytes of Case(48), whose traffic is looked at
HAND_ON = ("R does not divide this length, so shards differ in length: make `out` where none is "
           "given, x.new_empty(x.shape), and hand `out` to both. It says how long each shard is.")
# What comes back where an `out` is given; what lies in it is looked at in the other cases.
INTO = [Case(48, into=True), Case(1001, into=True), Case(24, strided=True, into=True),
        Case(7, returned=True)]


def check_ring_reduce_scatter(fn):
    for ranks in WORLD_SIZES:
        right_on(fn, call_scatter, plain_cases(ranks), ranks, shards, _explain_shard)
    yield "rank r has chunk r of the sum, on 1, 2, 3, 8 ranks; float32, bfloat16, int64"
    plain = [Case(48), Case(48, again=True), *uneven_cases()]
    seen = observe(fn, call_scatter, plain + INTO, 4, UNEVEN)
    compare(plain, seen, shards, _explain_shard)
    yield "on 4 too, when the length does not divide (0, 1, 2, 7, 1001), when x is not contiguous"
    _one_pass(seen[0])
    yield "x unchanged; each rank sends exactly (R-1)/R of the bytes, to one neighbour"
    compare(INTO, seen[len(plain):], shards, explain_into)
    stays_in_group(fn, call_scatter, lambda xs: sum(xs).tensor_split(3))
    yield "in the `out` that is given; inside a group it meets nobody else"


def shards(case, ranks):
    """The right shard of every rank."""
    return sums(case, ranks)[0].flatten().tensor_split(ranks)


def _explain_shard(wrong):
    got, right, rank, ranks = wrong.got, wrong.right, wrong.rank, wrong.ranks
    if got.dtype != right.dtype:
        return
    if wrong.times and ranks > 1 and int(got[0]) == MARK**rank:
        raise Mistake(f"{wrong.where} returns its own share of chunk {rank}, unsummed",
                      "Are there R-1 steps, range(1, R)? The result is the partial sum that "
                      "arrived last, with your share added.")
    if got.numel() > right.numel() > 0 and got.numel() >= (ranks - 1) * right.numel():
        raise Mistake(f"{wrong.where} returns {got.numel()} elements, not its chunk of "
                      f"{right.numel()}", "Return one chunk only: the finished one.")
    _goes_left(wrong)
    for other, shard in enumerate(shards(wrong.case, ranks)):
        if torch.equal(shard, got) and right.numel() and not wrong.times:
            raise Mistake(f"{wrong.where} ends with chunk {other} of the sum, not chunk {rank}",
                          "The indices are shifted. Chunk r must end at rank r after R-1 steps to "
                          "the right, so it starts at rank r+1: each rank first sends chunk "
                          "rank-1.")
    is_mixed = not wrong.times and not wrong.case.strided  # marks, first, say that all are in it
    if is_mixed and got.shape == right.shape and ranks > 1 and right.numel():
        raise Mistake(f"on {wrong.where} the sum mixes shares of different chunks",
                      "Every rank is in it once, so the steps are right. But the share that you "
                      "add must be of the chunk that arrives: in step s = 1 .. R-1 that is chunk "
                      "(rank - 1 - s) % R.")


def _goes_left(wrong):
    """Is the result wrong because messages go round the other way?"""
    rank, ranks = wrong.rank, wrong.ranks
    if ranks > 2 and all({*one.bytes_to} == {(r - 1) % ranks} for r, one in enumerate(wrong.seen)):
        raise Mistake(f"{wrong.where} sends to its left neighbour, rank {(rank - 1) % ranks}, and "
                      "ends with a wrong result",
                      "The ring is swapped: `to` is the right neighbour, (rank + 1) % R, and "
                      "`source` the left one, (rank - 1) % R.")


def check_ring_all_gather(fn):
    for ranks in WORLD_SIZES:
        cases = [Case(3, "normal"), Case(5, again=True), *[Case(5, dtype=d) for d in TYPES]]
        right_on(fn, call_plain, cases, ranks, _gathered, _explain_gathered)
    yield "every rank has all shards in rank order, on 1, 2, 3, 8 ranks; three types"
    into = [Case(1001, into=True), Case(24, strided=True, into=True), Case(1001, returned=True)]
    seen = right_on(fn, _call_gather_into, [Case(48), *uneven_cases(), *into], 4, of_root,
                    _explain_out, UNEVEN)
    right_on(fn, call_plain, [Case(6, into=True)], 1, sums, explain_into)
    yield "on 4 too, in the `out` that is given, where the shard may lie already"
    stays_in_group(fn, call_gather_in_group, lambda xs: [torch.cat(xs)] * 3)
    yield "inside a group it meets nobody else"
    _one_pass(seen[0])
    yield "x unchanged; each rank sends exactly (R-1)/R of the bytes, to one neighbour"


def _gathered(case, ranks):
    return [torch.cat([values(case, rank) for rank in range(ranks)])] * ranks


def _call_gather_into(fn, x, case):
    """The shards of one tensor, which rank 0's input stands for, into an `out` of its shape."""
    whole = values(case, 0).to(x.device)
    shard, out = own_chunk(whole).clone(), whole.new_full(whole.shape, 99)
    if case.returned:  # as ring_all_reduce does it: the shard is a part of `out`
        shard = own_chunk(out).copy_(shard)
    got = fn(shard, out=out)
    return out if case.into else got


def _explain_gathered(wrong):
    _goes_left(wrong)
    got, right = wrong.got, wrong.right
    if got.shape != right.shape or got.dtype != right.dtype:
        return
    parts = right.tensor_split(wrong.ranks)
    order = [next((r for r, part in enumerate(parts) if torch.equal(part, piece)), None)
             for piece in got.tensor_split(wrong.ranks)]
    known = [r for r in order if r is not None]
    if sorted(known) == list(range(wrong.ranks)):
        raise Mistake(f"on {wrong.where} the shards stand in the order {order}",
                      "The shard of rank r belongs in place r, on every rank: the place comes "
                      "from the rank that made the shard, not from when it arrived.")
    if len({*known}) < len(known):
        raise Mistake(f"on {wrong.where} places hold the shards of ranks {order}",
                      "Pass on what arrived last; your own shard goes out first, and once.")
    raise Mistake(f"on {wrong.where}, place {order.index(None)} was not filled with its shard",
                  "Is your own shard copied in? Are there R-1 steps?")


def _explain_out(wrong):
    if wrong.case.returned:
        raise Mistake(f"on {wrong.where} the shard lies in `out` already, and is lost",
                      "ring_all_reduce calls it so: the shard is the chunk of `out` in its own "
                      "place. Do not clear `out`, nor receive there before you have sent.")
    explain_into(wrong, "Copy your shard into its place in `out`, and let the others arrive in "
                 "theirs. torch.cat and empty_like make a new tensor elsewhere.")


def check_ring_all_reduce(fn):
    for ranks in WORLD_SIZES:
        right_on(fn, call_plain, plain_cases(ranks), ranks, sums, _explain_sum)
    yield "right on 1, 2, 3, 8 ranks; float32, bfloat16, int64"
    plain = [Case(48), *uneven_cases()]
    seen = observe(fn, call_plain, [*plain, *INTO, Case(1001, "normal")], 4,
                   HAND_ON if uses(fn, "ring_all_gather") else UNEVEN)
    compare(plain, seen, sums, _explain_sum)
    yield "on 4 too, when the length does not divide (0, 1, 2, 7, 1001), when x is not contiguous"
    ranks_agree(seen[-1])
    yield "x unchanged; all ranks agree to the last bit"
    _two_passes(seen[0])
    everything = sum(one.sent for one in seen[1])
    if everything != 2 * 3 * 1001 * 4:
        raise Mistake(f"with 1001 elements, 4 ranks send {everything} bytes in all, not "
                      f"{2 * 3 * 1001 * 4}", "Do you pad to a multiple of R? Padding is sent too. "
                      "tensor_split cuts any length into R chunks.")
    yield "each rank sends exactly 2(R-1)/R of the bytes, also when R does not divide"
    compare(INTO, seen[len(plain):], sums, explain_into)
    right_on(fn, call_plain, [Case(6, into=True)], 1, sums, explain_into)
    stays_in_group(fn, call_plain, lambda xs: [sum(xs)] * 3)
    yield "in the `out` that is given; inside a group it meets nobody else"


def _explain_sum(wrong):
    got, right = wrong.got, wrong.right
    if got.numel() == right.numel() and got.shape != right.shape:
        raise Mistake(f"the shape {tuple(right.shape)} came in, {tuple(got.shape)} went out",
                      "The chunks are flat. Give the result x's shape.")
    if 0 < got.numel() < right.numel():
        raise Mistake(f"{wrong.where} returns {got.numel()} of {right.numel()} elements",
                      "After reduce-scatter each rank has one chunk; an all-gather must follow.")
    explain_mean(wrong)


def _one_pass(seen):
    _sends_as_a_ring(seen, 1, {
        3 * WHOLE: "You pass the whole tensor each time. One chunk a step is enough.",
        WHOLE: "One step too many: R-1 steps, not R. Nobody needs to send a chunk to its owner.",
        WHOLE * 6 // 4: "Each step sends all that came so far. Only what arrived last is new to "
        "the next."}, "R-1 steps of one chunk each: 3/4 of the bytes on 4 ranks.")


def _two_passes(seen):
    hint = "It is R-1 chunks in reduce-scatter and R-1 in all-gather: is there a step too many?"
    if seen[0].sent > 3 * WHOLE:
        hint = "More than the whole tensor per neighbour: is it gathered or summed twice?"
    _sends_as_a_ring(seen, 2, {3 * WHOLE: "You pass the whole tensor R-1 times. Pass one chunk at "
                               "a time: after R-1 steps each rank owns one finished chunk."}, hint)


def _sends_as_a_ring(seen, passes, slips, hint):
    """Each of 4 ranks sends 3 chunks in a pass, to one neighbour, and one message a step.

    slips  {bytes that a rank sends: the hint about them}
    """
    no_backend(seen)
    if len({one.sent for one in seen}) > 1:
        hint, slips = "One rank does more than the others. In a ring no rank is special.", {}
    sends(seen, [(passes * WHOLE * 3 // 4, passes * 3)] * 4, slips.get(seen[0].sent, hint))
    for rank, one in enumerate(seen):
        if len(one.bytes_to) != 1:
            raise Mistake(f"rank {rank} of 4 sends to ranks {sorted(one.bytes_to)}",
                          "In a ring a rank talks to its neighbours only: send to rank+1.")
