"""pass_the_token: the right value on every rank, and one message each."""

import torch

from ranklab.checks.beside import KEPT, expect, located, on_groups
from ranklab.checks.failures import hinted
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.ranks.ring_shift import IN_GROUP, in_groups, on_rings
from ranklab.meter import Traffic


def check_pass_the_token(pass_the_token):
    for seen in on_rings(_trial, pass_the_token):
        _compare(seen)
    yield "1, 2, 3, 4, 8 ranks: rank r sees r, and rank 0 gets back the number of ranks"
    yield "each rank sends one message of 8 bytes; a single rank sends none"
    with hinted({".*": f"{KEPT} The token starts at 0 in each call."}):
        located("a second call", _compare, on_groups(_trial, pass_the_token, 2, ranks=3))
    with hinted({".*": IN_GROUP}):
        _compare(in_groups(_trial, pass_the_token)[1:])
    yield "right in a group that is not all ranks"


def _trial(pass_the_token, ranks, times=1):
    for _ in range(times):
        with Traffic() as traffic, Waits() as waits:
            value = pass_the_token(**ranks.keywords)
    missing = waits.missing(sum(traffic.calls.values()))
    yield lambda: (str(ranks), value, traffic, missing)


def _compare(seen):
    ring = [of_rank for of_rank, in seen]
    for rank in (*range(1, len(ring)), 0):  # in the order of the ring: the first mistake counts
        where, value, traffic, missing = ring[rank]
        right, messages, nbytes = rank or len(ring), traffic.sent_messages, traffic.sent_bytes
        expect(value is not None and not isinstance(value, torch.Tensor),
               f"{where} returned a {type(value).__name__}", "Return the number: token.item().")
        all_awaited(missing, where)
        expect(value == right, f"{where} returned {value}; right is {right}",
               _why_wrong(ring, rank, value, right))
        others = ", ".join(sorted(set(traffic.calls) - {"send", "recv"}))
        expect(not others, f"{where} called {others}", "A collective would do it, but here a rank "
               "talks to its neighbours only: dist.send and dist.recv.")
        expect(messages <= 1, f"{where} sent {messages} messages; one is enough",
               "Every rank hands the token on exactly once.")
        expect(nbytes in (0, 8), f"{where} sent {nbytes} bytes; the token has 8",
               "The token is one int64, as it is given. (float32 can't count beyond 2^24, and "
               "section 7 counts your bytes.)")


def _why_wrong(ring, rank, value, right):
    size, values, traffic = len(ring), [value for _, value, *_ in ring], ring[rank][2]
    first_op = [next((op.name for op in of_rank.ops if op.peer is not None), "")
                for _, _, of_rank, _ in ring]
    early = next((r for r in range(1, size) if first_op[r] == "send"), None)
    hints = (  # the first that fits
        (early is not None, f"Rank {early} sends before it has received: the token can't be there "
                            "yet. Only rank 0 begins; each other rank receives first."),
        (value == right + size and traffic.sent_messages == 2,
         "The token went round twice. Each rank sends it once, and receives it once."),
        (size > 2 and values == list(range(size, 0, -1)),
         "The token goes the other way round: send to `after`, (rank + 1) % size, and receive from "
         "`before`."),
        (size > 1 and values == [size + 1, *range(2, size + 1)],
         "All see 1 too many. Rank 0 starts the token at 0, and a rank returns the value as it "
         "came, before it adds its own 1."),
        (rank == 0 and value == 0, "Rank 0 returns the token as it comes back from the last rank. "
                                   "Does it receive after it sent?"),
        (rank and value == rank + 1,
         "Return the value as it reached the rank, before the rank adds its own 1."),
        (True, "Each rank adds 1 to what it received, and sends that on: token + 1."))
    return next(hint for fits, hint in hints if fits)
