"""ring_shift: right, no hang, no message too many; and the rings that pass_the_token has, too."""

import math
from functools import partial
from typing import NamedTuple

import torch

from ranklab.checks.beside import IN_GROUPS, beside, expect, on_groups
from ranklab.checks.failures import MISMATCH, hinted
from ranklab.checks.handles import DROPPED, drops_handles
from ranklab.checks.ranks.shard_range import SIZES
from ranklab.engine import device
from ranklab.meter import Traffic

IN_GROUP = ("A group counts its ranks from 0: dist.get_rank(group), dist.get_world_size(group). "
            "Give each message group=group, with group_dst= and group_src= (in a P2POp: "
            "group=group, group_peer=): without the group, and with dst=, it means a rank of the "
            "whole world.")
CLOSES = ("Each message must be sent by one rank and received by another. The ring closes: "
          "the last rank sends to rank 0, (rank + 1) % size, and rank 0 receives it.")
NOT_ALL_ALIKE = r"hang: (?!.*runs)(?!(send|, )+$)(?!(recv|, )+$).*"
FAILURES = {
    "TypeError: .*got <class 'int'>.*": "dist.recv fills the tensor that you give it, and returns "
    "the sender's rank. Do not assign its result to the tensor.",
    MISMATCH: "The message is longer than the buffer it came into: x may have any shape and type, "
    "so receive into torch.empty_like(x).",
    "was killed by SIGSEGV|ValueError: .*nvalid destination.*": "There is no such rank to send to. "
    "The ring closes: after the last rank comes rank 0, so (rank + 1) % size.",
    NOT_ALL_ALIKE: CLOSES,
}


def on_rings(trial, fn, *args):
    """Yields what the looks return on each rank: in rings of 1, 2, 3, 4 and 8 ranks."""
    failures = ({"hang: .*": DROPPED} if drops_handles(fn) else {}) | FAILURES
    for size in SIZES:
        yield on_groups(trial, fn, *args, ranks=size, groupings=((tuple(range(size)),),),
                        failures=failures, timeout=5)


def in_groups(trial, fn, *args):
    """The same, in groups of one rank and of ranks 1, 2, 3; what fails is the group."""
    with hinted({".*": IN_GROUP}):
        return on_groups(trial, fn, *args, groupings=IN_GROUPS, timeout=5)


class Case(NamedTuple):
    shape: tuple
    dtype: torch.dtype

    def x(self, turn, rank):
        """No two of them are alike, unless they are empty."""
        x = torch.arange(math.prod(self.shape)) + 1000 * (rank + 1) + 100 * turn
        return x.to(self.dtype).reshape(self.shape)


CASES = (Case((3,), torch.float32), Case((0,), torch.int64), Case((2, 3), torch.int64),
         Case((250_001,), torch.float64))


def check_ring_shift(ring_shift):
    for _ in on_rings(_trial, ring_shift):
        pass
    yield "no deadlock on 1, 2, 3, 4, 8 ranks, with 12 bytes, 0 bytes and 2 MB; all is waited for"
    yield "every rank returns the x of the rank before it, shape and type; its own is unchanged"
    yield "each rank sends x exactly once"
    in_groups(_trial, ring_shift)
    yield "right in a group that is not all ranks"


def _trial(ring_shift, ranks):
    for case in CASES:
        yield from _looks(ring_shift, ranks, case)


def _looks(ring_shift, ranks, case):
    mine, after = (partial(case.x, rank=ranks.members[(ranks.index + step) % ranks.size])
                   for step in (0, 1))
    calls = []

    def call(turn):
        x = mine(turn).to(device())
        with Traffic() as traffic:
            calls.append((x, ring_shift(x, **ranks.keywords), traffic))
        return {"the result": calls[-1][1]}

    looks = [*beside(
        str(ranks), ranks, call, own=lambda turn: {"the result": mine(turn)},
        right=lambda turn: {"the result": [case.x(turn, ranks.members[i - 1])
                                           for i in range(ranks.size)]},
        slips=lambda _, turn: {"the x of the rank after it": (after(turn), "Send to rank + 1, "
                                                              "receive from rank - 1.")},
        advice=lambda _: "Either you read the buffer before the message was in it: wait for the "
        "receive. Or you sent something other than x.")]
    for turn, of_call in enumerate(calls):
        yield partial(_compare, str(ranks), mine(turn), *of_call)
    yield from looks


def _compare(where, as_given, x, got, traffic):
    expect(isinstance(got, torch.Tensor), f"{where} returned a {type(got).__name__}",
           "Return the received tensor.")
    expect(torch.equal(x.cpu(), as_given), f"{where}: x was overwritten",
           "The caller still needs its own x. Receive into torch.empty_like(x).")
    expect(not got.numel() or got.data_ptr() != x.data_ptr(), f"{where} returned x itself, not a "
           "new tensor", "A later write into the result would change x too: return x.clone().")
    expect((got.shape, got.dtype) == (x.shape, x.dtype), f"{where} returned {got.dtype} of shape "
           f"{tuple(got.shape)}; x is {x.dtype} of shape {tuple(x.shape)}", "The result has x's "
           "type and shape: receive into torch.empty_like(x), and return all of it.")
    expect(traffic.sent_bytes <= x.nbytes, f"{where} sent {traffic.sent_bytes} bytes for an x of "
           f"{x.nbytes} bytes", "One message to one neighbour is enough; a gather or broadcast "
           "sends x to everybody.")
    expect(traffic.sent_messages <= 1, f"{where} sent {traffic.sent_messages} messages for one x",
           "Send x whole, in one message: each message costs its latency.")
