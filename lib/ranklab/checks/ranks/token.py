"""pass_the_token: the right value on every rank, and one message each."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.handles import all_awaited
from ranklab.checks.ranks.ring import MEMBERS, OF, THE_GROUP, in_group, on_ring
from ranklab.checks.ranks.shards import SIZES
from ranklab.checks.exercise import Mistake

POINT_TO_POINT = {"send", "recv"}


class Held(NamedTuple):
    """What one rank saw of the token."""

    value: int
    again: int  # of a second call
    messages: int
    sent: int
    calls: dict
    sends_first: bool
    missing: int  # calls that were not waited for


def _token_trial(pass_the_token, members=None):
    seen = in_group(pass_the_token, members=members)
    dist.barrier()  # who hangs in the first call must not look as if in the second
    again = in_group(pass_the_token, members=members)  # the token starts at 0 in each call
    if seen is None:
        return None
    value, traffic, missing = seen
    sends_first = next((op.name for op in traffic.ops if op.peer is not None), "") == "send"
    return Held(value, again[0], traffic.sent_messages, traffic.sent_bytes, dict(traffic.calls),
                sends_first, missing)


def check_pass_the_token(pass_the_token):
    for size in SIZES:
        seen = on_ring(_token_trial, pass_the_token, ranks=size)
        _compare_token(seen, f"{size} ranks" if size > 1 else "1 rank")
    yield "1, 2, 3, 4, 8 ranks: rank r sees r, and rank 0 gets back the number of ranks"
    for rank, (_, _, messages, sent, calls, _, _) in enumerate(seen):
        if others := sorted(set(calls) - POINT_TO_POINT):
            raise Mistake(f"rank {rank} called {', '.join(others)}",
                          "A collective would do it, but here a rank talks to its neighbours "
                          "only: dist.send and dist.recv.")
        if messages != 1:
            raise Mistake(f"rank {rank} of 8 sent {messages} messages; one is enough",
                          "Every rank hands the token on exactly once.")
        if sent != 8:
            raise Mistake(f"rank {rank} of 8 sent {sent} bytes; the token has 8",
                          "The token is one int64, as it is given. (float32 can't count beyond "
                          "2^24, and section 7 counts your bytes.)")
    yield "each rank sends one message of 8 bytes; a single rank sends none"
    seen = on_ring(_token_trial, pass_the_token, MEMBERS, ranks=OF)
    _compare_token([s for s in seen if s], THE_GROUP)
    yield "right in a group that is not all ranks"


def _compare_token(seen, where):
    size = len(seen)
    for rank in (*range(1, size), 0):  # in the order of the ring: the first mistake counts
        value, again, right = seen[rank].value, seen[rank].again, rank or size
        if value is None or isinstance(value, torch.Tensor):
            raise Mistake(f"{where}: rank {rank} returned {type(value).__name__}",
                          "Return the number: token.item().")
        all_awaited(seen[rank].missing, f"{where}, rank {rank}")
        if value == right and again == right:
            continue
        if value == right:
            raise Mistake(f"{where}: a second call returned {again} on rank {rank}; right is "
                          f"{right}", "Something is kept from the first call. Make the token "
                          "inside the function: it starts at 0 in each call.")
        early = next((r for r in range(1, size) if seen[r].sends_first), None)
        if early is not None:
            hint = (f"Rank {early} sends before it has received: the token can't be there yet. "
                    "Only rank 0 begins; each other rank receives first.")
        elif value == right + size and seen[rank].messages == 2:
            hint = "The token went round twice. Each rank sends it once, and receives it once."
        elif size > 2 and [one[0] for one in seen] == list(range(size, 0, -1)):
            hint = ("The token goes the other way round: send to `after`, (rank + 1) % size, and "
                    "receive from `before`.")
        elif size > 1 and [one[0] for one in seen] == [size + 1, *range(2, size + 1)]:
            hint = ("All see 1 too many. Rank 0 starts the token at 0, and a rank returns the "
                    "value as it came, before it adds its own 1.")
        elif rank == 0 and value == 0:
            hint = ("Rank 0 returns the token as it comes back from the last rank. Does it "
                    "receive after it sent?")
        elif rank and value == rank + 1:
            hint = "Return the value as it reached the rank, before the rank adds its own 1."
        else:
            hint = "Each rank adds 1 to what it received, and sends that on: token + 1."
        raise Mistake(f"{where}: rank {rank} returned {value}; right is {right}", hint)
