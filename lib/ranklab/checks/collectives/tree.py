"""Few steps: tree_broadcast and recursive_doubling. Checked for values, rounds and bytes."""

import math

from ranklab.checks.beside import expect
from ranklab.checks.collectives.cases import (
    GROUP, MARKS, ROOT, TYPES, UNEVEN, UNEVEN_CASES, Case, Verb, of_sum, run,
    stays_in_group,
)
from ranklab.checks.collectives.traffic import no_backend, nothing_sent, ranks_agree, sends

ODD = "R is no power of two here: is there a partner for every rank?"
PLACE = ("Count places from src: place = (rank - src) % R, and turn a place back into a rank with "
         "(place + src) % R before you send to it or receive from it.")
FOLD = ("On 7 ranks, no power of two: fold the ranks beyond the largest power of two in first: "
        "they hand their x to a partner below, wait, and get the finished sum back.")
SWAP = ("Swap with one partner, rank ^ step: the step doubles each time, 1, 2, 4 (step *= 2). Too "
        "many swaps, or a partner that has it already, count twice.")


def _of_source(result):
    case, members, own = result.case, result.ranks.members, result.ranks.index
    named = {"its own x: nobody sent it src's": (result.xs[own], "Are there enough rounds? `have` "
             "doubles until it is R or more: log2 R, rounded up.")} if case.root == 0 else {}
    return named | {f"the x of rank {member}, but src={case.root}": (x, PLACE)
                    for member, x in zip(members, result.xs)}


BROADCAST = Verb(lambda xs, case: [xs[case.root]] * len(xs), _of_source,
                 call=lambda fn, x, case, keywords, _: fn(x, src=case.root, **keywords))


def check_tree_broadcast(fn):
    for ranks in (2, 8, 5, 1):
        roots = sorted({0, ranks - 1, ranks // 2})
        seen = run(fn, BROADCAST, [*(Case(12, root=root) for root in roots), *TYPES], ranks,
                   f"{ODD} {PLACE}" if ranks == 5 else PLACE)
        for of_ranks in seen:
            _messages(of_ranks, ranks)
        _rounds(seen[0], ranks)
    yield "every rank has rank src's x, for several src, on 1, 2, 5, 8 ranks; four types"
    nothing_sent(run(fn, BROADCAST, UNEVEN_CASES, 3))
    yield "on 3 too, for lengths 0, 1, 2, 7, 1001, when x is not contiguous; x unchanged"
    stays_in_group(fn, BROADCAST, has_out=False, hint=f"{GROUP} {ROOT}")
    yield "inside a group it talks to nobody outside, and `src` counts there"
    yield "R-1 messages in all, in ceil(log2 R) rounds"


def _messages(seen, ranks):
    no_backend(seen)
    messages, sent = (sum(getattr(traffic, name) for _, traffic in seen)
                      for name in ("sent_messages", "sent_bytes"))
    expect(messages == ranks - 1, f"{ranks} ranks send {messages} messages; {ranks - 1} are "
           "enough", "Each rank but src gets the value once, and only ranks that have it send.")
    least = (ranks - 1) * seen[0][0].nbytes
    expect(sent == least, f"{ranks} ranks send {sent} bytes; {least} are enough",
           "Send x as it is, in its own type.")


def _rounds(seen, ranks):
    took, best = _has_all(seen, rank=0), math.ceil(math.log2(ranks))
    one_talks = sum(traffic.sent_messages > 0 for _, traffic in seen) <= 1
    expect(took <= best, f"with {ranks} ranks it takes {took} rounds; log2 R = {best} are enough",
           "src sends to all itself. A rank that has the value can pass it on." if one_talks else
           "The value goes from rank to rank like a bucket. In each round every rank that has it "
           "can send: the number of ranks that have it doubles.")


def _has_all(seen, rank, has=0):
    """The round after which all have it that get it by way of `rank`, which has it after `has`.

    A rank sends once in a round. Each but src gets one message: `_messages` saw to that.
    """
    sent_to = [op.peer for op in seen[rank][1].ops if op.name == "send"]
    return max([has, *(_has_all(seen, peer, has + n) for n, peer in enumerate(sent_to, 1))])


DOUBLING = Verb(lambda xs, case: [sum(xs)] * len(xs),
                lambda result: of_sum(result, {"twice": SWAP}))
ODD_DOUBLING = Verb(DOUBLING.right, lambda result: of_sum(result, dict.fromkeys(
    ("lacks", "twice", "both"), FOLD)))


def check_recursive_doubling(fn):
    for ranks in (2, 8, 1):
        run(fn, DOUBLING, [MARKS, *TYPES], ranks)
    yield "right on 1, 2, 8 ranks; four types"
    on_7 = run(fn, ODD_DOUBLING, [MARKS, *TYPES], 7, ODD)
    yield "right on 7 ranks, which is no power of two"
    cases = [*UNEVEN_CASES, Case(1001, kind="normal"), Case(48)]
    *_, agreeing, seen = run(fn, DOUBLING, cases, 4, UNEVEN)
    ranks_agree(agreeing, "Swap with one partner, rank ^ step: then both add the same two numbers.")
    yield "on 4 too, for lengths 0, 1, 2, 7, 1001; x unchanged; all ranks agree to the last bit"
    stays_in_group(fn, DOUBLING, has_out=False)
    yield "inside a group it talks to nobody outside"
    sends(seen, [(2 * 192, 2)] * 4, "log2 R swaps of the whole tensor, no chunks: 2 on 4 ranks.")
    yield "each rank sends log2 R messages, of all bytes each"
    for of_ranks in on_7:
        _folded(of_ranks)
    yield "of 7 ranks three hand over and get the sum back, and four do as four ranks alone"


def _folded(seen):
    """Of 7 ranks, three hand over; three of the other four take over, and hand back at the end."""
    no_backend(seen)
    messages = [traffic.sent_messages for _, traffic in seen]
    times = [traffic.sent_bytes / got.nbytes for got, traffic in seen]
    expect(sorted(messages) == [1, 1, 1, 2, 3, 3, 3] and times == messages, "on 7 ranks they send "
           f"{messages} messages and {[round(n, 2) for n in times]} times x", "Three ranks hand x "
           "over, in one message. The other four swap all they have twice, as four ranks do, and "
           "three of them send the sum back.")
