"""Few steps: tree_broadcast and recursive_doubling. Checked for values, rounds and bytes."""

import math

import torch

from ranklab.checks.collectives.arguments import call_plain, call_root_in_group, stays_in_group
from ranklab.checks.collectives.cases import (
    TYPES, UNEVEN, Case, of_root, plain_cases, sums, uneven_cases, values,
)
from ranklab.checks.collectives.judging import (
    explain_mean, no_backend, nothing_sent, ranks_agree, right_on, sends, who_is_missing,
)
from ranklab.checks.exercise import Mistake

ODD = "R is no power of two here: is there a partner for every rank?"
PLACE = ("If it stops for src=1 only: count places from src, and turn a place back into a rank "
         "with (place + src) % R before you send to it or receive from it.")


def call_broadcast(fn, x, case):
    return fn(x, src=case.root)


def check_tree_broadcast(fn):
    for ranks in (2, 8, 5, 1):
        cases = [Case(12, root=root) for root in sorted({0, ranks - 1, ranks // 2})]
        cases += [Case(6, dtype=dtype) for dtype in TYPES]
        seen = right_on(fn, call_broadcast, cases, ranks, of_root, _explain_source,
                        f"{ODD} {PLACE}" if ranks == 5 else PLACE)
        for case, of_ranks in zip(cases, seen):
            _messages(of_ranks, ranks, values(case, 0).nbytes)
        _rounds(seen[0], ranks)
    yield "every rank has rank src's x, for several src, on 1, 2, 5, 8 ranks; three types"
    nothing_sent(uneven_cases(), right_on(fn, call_broadcast, uneven_cases(), 3, of_root))
    yield "on 3 too, for lengths 0, 1, 2, 7, 1001, when x is not contiguous; x unchanged"
    stays_in_group(fn, call_root_in_group, lambda xs: [xs[1]] * 3, has_out=False)
    yield "inside a group it meets nobody else, and `src` counts there"
    yield "R-1 messages in all, in ceil(log2 R) rounds"


def _explain_source(wrong):
    root, rank = wrong.case.root, wrong.rank
    for other in range(wrong.ranks):
        if other == root or not torch.equal(wrong.got, values(wrong.case, other)):
            continue
        if other == rank and root == 0:
            raise Mistake(f"{wrong.where} has its own x: nobody sent it src's", "Are there enough "
                          "rounds? `have` doubles until it is R or more: log2 R, rounded up.")
        whose = "its own x" if other == rank else f"rank {other}'s x"
        raise Mistake(f"{wrong.where} has {whose}, but src={root}",
                      "Count places from src: place = (rank - src) % R, and turn a place back into "
                      "a rank with (place + src) % R.")


def _messages(seen, ranks, nbytes):
    no_backend(seen)
    sent = sum(one.messages for one in seen)
    if sent != ranks - 1:
        raise Mistake(f"{ranks} ranks send {sent} messages; {ranks - 1} are enough",
                      "Each rank but src gets the value once, and only ranks that have it send.")
    sent = sum(one.sent for one in seen)
    if sent != (ranks - 1) * nbytes:
        raise Mistake(f"{ranks} ranks send {sent} bytes; x has {nbytes}, so {(ranks - 1) * nbytes} "
                      "are enough", "Send x as it is, in its own type.")


def _rounds(seen, ranks):
    took, best = _has_all(seen, rank=0), math.ceil(math.log2(ranks))
    if took > best:
        one_talks = len({rank for rank, one in enumerate(seen) if one.messages}) <= 1
        raise Mistake(
            f"with {ranks} ranks it takes {took} rounds; log2 R = {best} are enough",
            "src sends to all itself. A rank that has the value can pass it on." if one_talks else
            "The value goes from rank to rank like a bucket. In each round every rank that has it "
            "can send: the number of ranks that have it doubles.")


def _has_all(seen, rank, has=0):
    """The round after which all have it that get it by way of `rank`, which has it after `has`.

    A rank sends once in a round. Each but src gets one message: `_messages` saw to that.
    """
    sent_to = [peer for name, peer in seen[rank].talk if name == "send"]
    return max([has, *(_has_all(seen, peer, has + n) for n, peer in enumerate(sent_to, 1))])


def check_recursive_doubling(fn):
    for ranks in (2, 8, 1):
        right_on(fn, call_plain, plain_cases(ranks), ranks, sums, _explain_partner)
    yield "right on 1, 2, 8 ranks; float32, bfloat16, int64"
    on_7 = right_on(fn, call_plain, plain_cases(7), 7, sums, _explain_odd, ODD)
    yield "right on 7 ranks, which is no power of two"
    cases = [*uneven_cases(), Case(1001, "normal"), Case(48)]
    *_, agreeing, seen = right_on(fn, call_plain, cases, 4, sums, hint=UNEVEN)
    ranks_agree(agreeing, "Swap with one partner, rank ^ step: then both add the same two numbers.")
    yield "on 4 too, for lengths 0, 1, 2, 7, 1001; x unchanged; all ranks agree to the last bit"
    stays_in_group(fn, call_plain, lambda xs: [sum(xs)] * 3, has_out=False)
    yield "inside a group it meets nobody else"
    no_backend(seen)
    sends(seen, [(2 * 192, 2)] * 4, "log2 R swaps of the whole tensor, no chunks: 2 on 4 ranks.")
    yield "each rank sends log2 R messages, of all bytes each"
    for case, of_ranks in zip(plain_cases(7), on_7):
        _folded(of_ranks, values(case, 0).nbytes)
    yield "of 7 ranks three hand over and get the sum back, and four do as four ranks alone"


def _explain_partner(wrong):
    explain_mean(wrong)
    if wrong.times and min(wrong.times) and max(wrong.times) > 1:
        what, _ = who_is_missing(wrong)
        raise Mistake(what, "Too many swaps, or a partner that has it already: the step doubles "
                      "each time, 1, 2, 4 (step *= 2): ranks differ in one bit.")


def _explain_odd(wrong):
    if wrong.times:
        raise Mistake(f"on 7 ranks, no power of two, rank {wrong.rank} has a wrong sum",
                      "Fold the ranks beyond the largest power of two in first: they hand their "
                      "x to a partner below, wait, and get the finished sum back.")


def _folded(seen, nbytes):
    """Of 7 ranks, three hand over; three of the other four take over, and hand back at the end."""
    no_backend(seen)
    messages = [one.messages for one in seen]
    if sorted(messages) != [1, 1, 1, 2, 3, 3, 3] or any(
            one.sent != one.messages * nbytes for one in seen):
        raise Mistake(f"on 7 ranks they send {messages} messages and "
                      f"{[round(one.sent / nbytes, 2) for one in seen]} times x",
                      "Three ranks hand x over, in one message. The other four swap all they have "
                      "twice, as four ranks do, and three of them send the sum back.")
