"""The ring: reduce-scatter, all-gather, all-reduce. Checked for values, then bytes and messages."""

import torch
import torch.distributed as dist

from ranklab.checks.collectives.arguments import (
    call_gather_in_group, call_plain, call_scatter, explain_gathered, explain_into,
    explain_lost, fill, own_chunk, stays_in_group,
)
from ranklab.checks.collectives.ring_traffic import hint_all_reduce, one_pass, round_the_ring
from ranklab.checks.collectives.trials import (
    MARK, WORLD_SIZES, Case, compare, is_mean, no_backend, observe, ranks_agree, sends, total,
    values,
)
from ranklab.checks.handles import uses
from ranklab.checks.exercise import Mistake

ALONE = "With one rank there is nobody to talk to: the loop must not run at all."
TYPES = ("float32", "bfloat16", "int64")
UNEVEN = ("R does not divide this length: chunks differ by one, and some may be empty. "
          "tensor_split cuts any length, x's and that of `out`.")
HAND_ON = ("R does not divide this length, so shards differ in length: make `out` where none is "
           "given, x.new_empty(x.shape), and hand `out` to both. It says how long each shard is.")


def uneven_cases():
    """Lengths that R does not divide, shorter than R, and a matrix that is not contiguous."""
    return [Case(n) for n in (1001, 7, 2, 1, 0)] + [Case(24, strided=True)]


def into_cases():
    """With an `out`: what lies in it for even and uneven chunks and two dimensions, and what is
    returned then.
    """
    return [Case(48, into=True), Case(1001, into=True), Case(24, strided=True, into=True),
            Case(7, returned=True)]


def plain_cases(ranks):
    """First the one that says which rank is missing, then the types; R divides the length."""
    return [Case(2 * ranks, "marks")] + [Case(6 * ranks, dtype=dtype) for dtype in TYPES]


def filled_alone(ranks):
    """On one rank, too, the result lies in an `out` that is given; judged after all others."""
    return [Case(6, into=True)] if ranks == 1 else []


def compare_alone(seen):
    case, = filled_alone(1)
    compare(case, 1, seen, [values(case, 0)], explain_into)


# --- reduce-scatter -----------------------------------------------------------------------------


def check_ring_reduce_scatter(fn):
    for ranks in WORLD_SIZES:
        cases = plain_cases(ranks)
        seen = observe(fn, call_scatter, cases, ranks, hint=ALONE if ranks == 1 else "")
        for case, of_ranks in zip(cases, seen):
            compare(case, ranks, of_ranks, shards(case, ranks), _explain_shard(of_ranks))
    yield "rank r has chunk r of the sum, on 1, 2, 3, 8 ranks; float32, bfloat16, int64"
    plain, cases = [Case(48), Case(48, again=True), *uneven_cases()], into_cases()
    seen = observe(fn, call_scatter, plain + cases, 4, hint=UNEVEN)
    for case, of_ranks in zip(plain, seen):
        compare(case, 4, of_ranks, shards(case, 4), _explain_shard(of_ranks))
    yield "on 4 too, when the length does not divide (0, 1, 2, 7, 1001), when x is not contiguous"
    yield from one_pass(seen[0], whole_bytes=48 * 4)
    for case, of_ranks in zip(cases, seen[len(plain):]):
        explain = explain_into if case.into else None
        compare(case, 4, of_ranks, shards(case, 4), explain)
    stays_in_group(fn, call_scatter, lambda xs: sum(xs).tensor_split(3))
    yield "in the `out` that is given; inside a group it meets nobody else"


def shards(case, ranks):
    """The right shard of every rank."""
    return total(case, ranks).flatten().tensor_split(ranks)


def _explain_shard(seen):
    def explain(rank, ranks, got, right):
        if got.dtype != right.dtype:
            return
        _explain_unsummed(rank, ranks, got, right)
        goes_left(seen, rank)
        same = Case(right.numel() * ranks, dtype=str(got.dtype).removeprefix("torch."))
        if got.shape == right.shape and ranks > 1 and right.numel():
            _explain_chunk(rank, ranks, got, shards(same, ranks))

    return explain


def _explain_unsummed(rank, ranks, got, right):
    if got.dtype == torch.int64 and got.shape == right.shape:
        value = int(got[0]) if got.numel() else 0
        if value == MARK**rank and ranks > 1:
            raise Mistake(f"rank {rank} of {ranks} returns its own share of chunk {rank}, unsummed",
                          "Are there R-1 steps, range(1, R)? The result is the partial sum that "
                            "arrived last, with your share added.")
    if got.numel() > right.numel() > 0 and got.numel() >= (ranks - 1) * right.numel():
        raise Mistake(f"rank {rank} of {ranks} returns {got.numel()} elements, not its chunk of "
                      f"{right.numel()}", "Return one chunk only: the finished one.")


def _explain_chunk(rank, ranks, got, right):
    for other, shard in enumerate(right):
        if other != rank and torch.equal(shard, got):
            raise Mistake(
                f"rank {rank} of {ranks} ends with chunk {other} of the sum, not chunk {rank}",
                "The indices are shifted. Chunk r must end at rank r after R-1 steps to the "
                "right, so it starts at rank r+1: each rank first sends chunk rank-1.")
    if got.is_floating_point():  # the marks, which come first, say that every rank is in the sum
        raise Mistake(
            f"on rank {rank} of {ranks} the sum mixes shares of different chunks",
            "Every rank is in it once, so the steps are right. But the share that you add must be "
            "of the chunk that arrives: in step s = 1 .. R-1 that is chunk (rank - 1 - s) % R.")


def goes_left(seen, rank):
    """A result is wrong: is it because messages go round the other way?"""
    ranks = len(seen)
    if ranks > 2 and all(set(one.bytes_to) == {(r - 1) % ranks} for r, one in enumerate(seen)):
        raise Mistake(f"rank {rank} of {ranks} sends to its left neighbour, rank "
                      f"{(rank - 1) % ranks}, and ends with a wrong result",
                      "The ring is swapped: `to` is the right neighbour, (rank + 1) % R, and "
                      "`source` the left one, (rank - 1) % R.")


# --- all-gather ---------------------------------------------------------------------------------


def check_ring_all_gather(fn):
    for ranks in WORLD_SIZES:
        cases = [Case(3, "normal"), Case(5, again=True), *[Case(5, dtype=d) for d in TYPES]]
        seen = observe(fn, call_plain, cases + filled_alone(ranks), ranks,
                       hint=ALONE if ranks == 1 else "")
        for case, of_ranks in zip(cases, seen):
            parts = [values(case, rank) for rank in range(ranks)]
            explain = _explain_gather(parts, of_ranks)
            compare(case, ranks, of_ranks, [torch.cat(parts)] * ranks, explain)
    alone = seen[-1]
    yield "every rank has all shards in rank order, on 1, 2, 3, 8 ranks; three types"
    cases = [Case(48), *uneven_cases()]
    into = [Case(1001, into=True), Case(24, strided=True, into=True), Case(1001, returned=True)]
    seen = observe(fn, call_gather_into, cases + into, 4, hint=UNEVEN)
    for case, of_ranks in zip(cases, seen):
        whole = values(case, 0)
        parts = whole.flatten().tensor_split(4)
        compare(case, 4, of_ranks, [whole] * 4, _explain_out(parts))
    for case, of_ranks in zip(into, seen[len(cases):]):
        explain = explain_lost if case.returned else explain_gathered
        compare(case, 4, of_ranks, [values(case, 0)] * 4, explain)
    compare_alone(alone)
    yield "on 4 too, in the `out` that is given, where the shard may lie already"
    stays_in_group(fn, call_gather_in_group, lambda xs: [torch.cat(xs)] * 3)
    yield "inside a group it meets nobody else"
    yield from one_pass(seen[0], whole_bytes=48 * 4)


def call_gather_into(fn, x, case):
    """The shards of one tensor, which rank 0's input stands for, into an `out` of its shape."""
    whole = values(case, 0).to(x.device)
    if not case.returned:
        return fill(fn, own_chunk(whole).clone(), whole.shape, case)[0]
    out = torch.full_like(whole, 99)  # as ring_all_reduce does it: the shard is a part of `out`
    return fn(own_chunk(out).copy_(own_chunk(whole)), out=out)


def _explain_gather(parts, seen):
    def explain(rank, ranks, got, right):
        goes_left(seen, rank)
        if got.shape != right.shape or got.dtype != right.dtype or not right.numel():
            return
        pieces = got.tensor_split(ranks)
        order = [next((r for r, part in enumerate(parts) if torch.equal(part, piece)), None)
                 for piece in pieces]
        if sorted(map(str, order)) == sorted(map(str, range(ranks))):
            raise Mistake(f"on rank {rank} of {ranks} the shards stand in the order {order}",
                          "The shard of rank r belongs in place r, on every rank: the place comes "
                          "from the rank that made the shard, not from when it arrived.")
        if any(order.count(r) > 1 for r in order if r is not None):
            raise Mistake(f"on rank {rank} of {ranks} places hold the shards of ranks {order}",
                          "Pass on what arrived last; your own shard goes out first, and once.")
        if None in order:
            raise Mistake(f"on rank {rank} of {ranks}, place {order.index(None)} was not filled "
                          "with its shard", "Is your own shard copied in? Are there R-1 steps?")

    return explain


def _explain_out(parts):
    def explain(rank, ranks, got, right):
        equal = ranks * parts[rank].numel()
        if got.numel() == equal != right.numel():
            raise Mistake(f"rank {rank} returns {got.numel()} elements where `out` has "
                          f"{right.numel()}", "When `out` is given, the result goes there: its "
                          "tensor_split says how long each shard is.")

    return explain


# --- all-reduce ---------------------------------------------------------------------------------


def check_ring_all_reduce(fn):
    for ranks in WORLD_SIZES:
        cases = plain_cases(ranks)
        seen = observe(fn, call_plain, cases + filled_alone(ranks), ranks,
                       hint=ALONE if ranks == 1 else "")
        for case, of_ranks in zip(cases, seen):
            compare(case, ranks, of_ranks, [total(case, ranks)] * ranks, _explain_sum)
    alone = seen[-1]
    yield "right on 1, 2, 3, 8 ranks; float32, bfloat16, int64"
    plain, cases = [Case(48), *uneven_cases()], into_cases()
    hint = HAND_ON if uses(fn, "ring_all_gather") else UNEVEN
    seen = observe(fn, call_plain, [*plain, *cases, Case(1001, "normal")], 4, hint=hint)
    for case, of_ranks in zip(plain, seen):
        compare(case, 4, of_ranks, [total(case, 4)] * 4, _explain_sum)
    yield "on 4 too, when the length does not divide (0, 1, 2, 7, 1001), when x is not contiguous"
    ranks_agree(seen[-1])
    yield "x unchanged; all ranks agree to the last bit"
    no_backend(seen[0])
    sends(seen[0], 192, 2 * 3 * 48, hint_all_reduce)
    everything = sum(one.sent for one in seen[1])
    if everything != 2 * 3 * 1001 * 4:
        raise Mistake(f"with 1001 elements, 4 ranks send {everything} bytes in all, not "
                      f"{2 * 3 * 1001 * 4}", "Do you pad to a multiple of R? Padding is sent too. "
                      "tensor_split cuts any length into R chunks.")
    yield "each rank sends exactly 2(R-1)/R of the bytes, also when R does not divide"
    round_the_ring(seen[0], messages=6)
    for case, of_ranks in zip(cases, seen[len(plain):]):
        explain = explain_into if case.into else None
        compare(case, 4, of_ranks, [total(case, 4)] * 4, explain)
    compare_alone(alone)
    stays_in_group(fn, call_plain, lambda xs: [sum(xs)] * 3)
    yield "in the `out` that is given; inside a group it meets nobody else"


def _explain_sum(rank, ranks, got, right):
    if got.numel() == right.numel() and got.shape != right.shape:
        raise Mistake(f"the shape {tuple(right.shape)} came in, {tuple(got.shape)} went out",
                      "The chunks are flat. Give the result x's shape.")
    if 0 < got.numel() < right.numel():
        raise Mistake(f"rank {rank} of {ranks} returns {got.numel()} of {right.numel()} elements",
                      "After reduce-scatter each rank has one chunk; an all-gather must follow.")
    if is_mean(got, right, ranks):
        raise Mistake(f"rank {rank} of {ranks} has the mean, not the sum",
                      "Do not divide by R: whoever wants the mean does it afterwards.")
