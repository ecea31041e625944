"""Few steps: tree_broadcast and recursive_doubling. Checked for values, rounds and bytes."""

import math

import torch

from ranklab.checks.collectives.arguments import (
    call_no_out_in_group, call_plain, call_root_in_group, stays_in_group,
)
from ranklab.checks.collectives.ring import ALONE, TYPES, UNEVEN, plain_cases, uneven_cases
from ranklab.checks.collectives.trials import (
    Case, compare, is_mean, no_backend, observe, ranks_agree, sends, times_in, total, values,
    who_is_missing,
)
from ranklab.checks.exercise import Mistake

ODD = "R is no power of two here: is there a partner for every rank?"
PLACE = ("If it stops for src=1 only: count places from src, and turn a place back into a rank "
         "with (place + src) % R before you send to it or receive from it.")


def call_broadcast(fn, x, case):
    return fn(x, src=case.root)


def check_tree_broadcast(fn):
    for ranks in (2, 8, 5, 1):
        roots = sorted({0, ranks - 1, ranks // 2})
        cases = [Case(12, root=root) for root in roots] + [Case(6, dtype=dtype) for dtype in TYPES]
        hint = ALONE if ranks == 1 else f"{ODD} {PLACE}" if ranks == 5 else PLACE
        seen = observe(fn, call_broadcast, cases, ranks, hint)
        for case, of_ranks in zip(cases, seen):
            wanted = [values(case, case.root)] * ranks
            compare(case, ranks, of_ranks, wanted, _explain_source(case))
            _messages(of_ranks, ranks, values(case, 0).nbytes)
        _rounds(seen[0], ranks)
    yield "every rank has rank src's x, for several src, on 1, 2, 5, 8 ranks; three types"
    for case, of_ranks in zip(uneven_cases(), observe(fn, call_broadcast, uneven_cases(), 3)):
        compare(case, 3, of_ranks, [values(case, 0)] * 3)
        nothing_sent(case, of_ranks)
    yield "on 3 too, for lengths 0, 1, 2, 7, 1001, when x is not contiguous; x unchanged"
    stays_in_group(fn, call_root_in_group, lambda xs: [xs[1]] * 3)
    yield "inside a group it meets nobody else, and `src` counts there"
    yield "R-1 messages in all, in ceil(log2 R) rounds"


def _explain_source(case):
    def explain(rank, ranks, got, right):
        for other in range(ranks):
            if other != case.root and torch.equal(got, values(case, other)):
                whose = "its own x" if other == rank else f"rank {other}'s x"
                if other == rank and case.root == 0:
                    raise Mistake(f"rank {rank} of {ranks} has its own x: nobody sent it src's",
                                  "Are there enough rounds? `have` doubles until it is R or more: "
                                  "log2 R, rounded up.")
                raise Mistake(f"rank {rank} of {ranks} has {whose}, but src={case.root}",
                              "Count places from src: place = (rank - src) % R, and turn a place "
                              "back into a rank with (place + src) % R.")

    return explain


def nothing_sent(case, seen):
    if not case.n and any(one.messages for one in seen):
        raise Mistake("an empty x is sent", "Nothing at all is sent when x is empty: every rank "
                      "knows that there is nothing to come, and a message costs its latency.")


def _messages(seen, ranks, nbytes):
    no_backend(seen)
    sent = sum(one.messages for one in seen)
    if sent != ranks - 1:
        raise Mistake(f"{ranks} ranks send {sent} messages; {ranks - 1} are enough",
                      "Each rank but src gets the value once, and only ranks that have it send.")
    if (sent := sum(one.sent for one in seen)) != (ranks - 1) * nbytes:
        raise Mistake(f"{ranks} ranks send {sent} bytes; x has {nbytes}, so {(ranks - 1) * nbytes} "
                      "are enough", "Send x as it is, in its own type.")


def _rounds(seen, ranks):
    took, best = rounds([one.talk for one in seen]), math.ceil(math.log2(ranks))
    if took > best:
        one_talks = len({rank for rank, one in enumerate(seen) if one.messages}) <= 1
        raise Mistake(
            f"with {ranks} ranks it takes {took} rounds; log2 R = {best} are enough",
            "src sends to all itself. A rank that has the value can pass it on." if one_talks else
            "The value goes from rank to rank like a bucket. In each round every rank that has it "
            "can send: the number of ranks that have it doubles.")


def rounds(talk):
    """Rounds that the ranks' sends and receives take: a rank does one of them per round.

    `talk` has, for each rank, its ("send" or "recv", peer) in order.
    """
    left, clock, on_the_way = [list(ops) for ops in talk], [0] * len(talk), {}
    while any(left):
        before = sum(map(len, left))
        for rank, ops in enumerate(left):
            if not ops:
                continue
            name, peer = ops[0]
            if name == "send":
                clock[rank] += 1
                on_the_way.setdefault((rank, peer), []).append(clock[rank])
                ops.pop(0)
            elif on_the_way.get((peer, rank)):
                sent = on_the_way[peer, rank].pop(0)
                clock[rank] = max(clock[rank] + 1, sent)
                ops.pop(0)
        if sum(map(len, left)) == before:  # receives posted early: let the sends behind them go
            for ops in left:
                ops.sort(key=lambda op: op[0] != "send")
            if not any(ops and ops[0][0] == "send" for ops in left):
                break  # receives that nobody serves; the values were right all the same
    return max(clock)


def check_recursive_doubling(fn):
    for ranks in (2, 8, 1):
        cases = plain_cases(ranks)
        seen = observe(fn, call_plain, cases, ranks, hint=ALONE if ranks == 1 else "")
        for case, of_ranks in zip(cases, seen):
            compare(case, ranks, of_ranks, [total(case, ranks)] * ranks, _explain_partner)
    yield "right on 1, 2, 8 ranks; float32, bfloat16, int64"
    cases = plain_cases(7)
    on_7 = observe(fn, call_plain, cases, 7, hint=ODD)
    for case, of_ranks in zip(cases, on_7):
        compare(case, 7, of_ranks, [total(case, 7)] * 7, _explain_odd)
    yield "right on 7 ranks, which is no power of two"
    folded = list(zip(on_7, (total(case, 7).nbytes for case in cases)))
    cases = uneven_cases() + [Case(1001, "normal"), Case(48)]
    seen = observe(fn, call_plain, cases, 4, hint=UNEVEN)
    for case, of_ranks in zip(cases[:-2], seen):
        compare(case, 4, of_ranks, [total(case, 4)] * 4)
    ranks_agree(seen[-2], "Swap with one partner, rank ^ step: then both add the same two numbers.")
    yield "on 4 too, for lengths 0, 1, 2, 7, 1001; x unchanged; all ranks agree to the last bit"
    stays_in_group(fn, call_no_out_in_group, lambda xs: [sum(xs)] * 3)
    yield "inside a group it meets nobody else"
    no_backend(seen[-1])
    sends(seen[-1], 192, 2 * 192, lambda sent: "log2 R swaps of the whole tensor: 2 on 4 ranks.")
    for rank, one in enumerate(seen[-1]):
        if one.messages != 2:
            raise Mistake(f"rank {rank} of 4 sends {one.messages} messages; log2 R = 2 are enough",
                          "The whole tensor goes in each swap: no chunks here.")
    yield "each rank sends log2 R messages, of all bytes each"
    for of_ranks, nbytes in folded:
        _folded(of_ranks, nbytes)
    yield "of 7 ranks three hand over and get the sum back, and four do as four ranks alone"


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


def _explain_partner(rank, ranks, got, right):
    if is_mean(got, right, ranks):
        raise Mistake(f"rank {rank} of {ranks} has the mean, not the sum", "Do not divide by R.")
    if got.dtype == torch.int64 and got.shape == right.shape:
        times = times_in(int(got.flatten()[0]), ranks)
        if min(times) and max(times) > 1:
            what, _ = who_is_missing(f"rank {rank} of {ranks}", int(got.flatten()[0]), ranks)
            raise Mistake(what, "Too many swaps, or a partner that has it already: the step "
                          "doubles each time, 1, 2, 4 (step *= 2): ranks differ in one bit.")


def _explain_odd(rank, ranks, got, right):
    if got.dtype == torch.int64 and not torch.equal(got, right):
        raise Mistake(f"on {ranks} ranks, no power of two, rank {rank} has a wrong sum",
                      "Fold the ranks beyond the largest power of two in first: they hand their "
                      "x to a partner below, wait, and get the finished sum back.")
