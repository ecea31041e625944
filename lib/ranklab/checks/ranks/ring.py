"""pass_the_token and fix_the_deadlock: right, no hang, and no message too many."""

import torch
import torch.distributed as dist

from ranklab.checks.ranks.shards import SIZES, some
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

POINT_TO_POINT = {"send", "recv"}


def _token_trial(pass_the_token, members=None):
    group = dist.new_group(members) if members else None
    if members and dist.get_rank() not in members:
        return None
    with Traffic() as traffic:
        value = pass_the_token() if group is None else pass_the_token(group)
    return value, traffic.sent_messages, dict(traffic.calls)


def check_pass_the_token(pass_the_token):
    for size in SIZES:
        seen = on_token_ring(pass_the_token, ranks=size)
        _compare_token(seen, f"{size} ranks" if size > 1 else "1 rank")
    yield "1, 2, 3, 4, 8 ranks: rank r sees r, and rank 0 gets back the number of ranks"
    for rank, (_, messages, calls) in enumerate(seen):
        if set(calls) - POINT_TO_POINT:
            raise Mistake(f"rank {rank} called {', '.join(sorted(set(calls) - POINT_TO_POINT))}",
                          "A collective would do it, but here a rank talks to its neighbours "
                          "only: dist.send and dist.recv.")
        if messages != 1:
            raise Mistake(f"rank {rank} of 8 sent {messages} messages; one is enough",
                          "Every rank hands the token on exactly once.")
    yield "each rank sends one message; a single rank sends none"
    seen = [s for s in on_token_ring(pass_the_token, [1, 3], ranks=4) if s]
    _compare_token(seen, "the group of ranks 1 and 3")
    yield "right in a group that is not all ranks"


def on_token_ring(pass_the_token, members=None, *, ranks):
    """Launches the ring; a hang in which all receive gets its own hint."""
    try:
        return on_ranks(_token_trial, pass_the_token, members, ranks=ranks, timeout=5)
    except Mistake as mistake:
        if members:
            hint = ("In a group, dist.send(x, dst) still means a rank of the whole world. Say "
                    "group_dst= and group_src= (or dist.get_global_rank) with group=group.")
        elif mistake.what.count("waits in recv") == ranks:
            hint = "All ranks wait in recv, and nobody sends. One has to begin: rank 0 sends first."
        elif mistake.what.count("waits in send") == ranks:
            hint = "All ranks send first. Only rank 0 may; the others receive before they send."
        elif "SIGSEGV" in mistake.what or "nvalid" in mistake.what:
            hint = "There is no such rank to send to. The ring closes: after the last rank comes rank 0, so (rank + 1) % size."
        elif "does not end" in mistake.what:
            hint = ("A rank waits for a message that nobody sends. The ring closes: the last rank "
                    "sends to rank 0, (rank + 1) % size, and rank 0 receives it.")
        else:
            hint = mistake.hint
        raise Mistake(mistake.what, hint) from None


def _compare_token(seen, where):
    size = len(seen)
    for rank, (value, _, _) in enumerate(seen):
        right = rank or size
        if isinstance(value, torch.Tensor):
            raise Mistake(f"{where}: rank {rank} returned a tensor", "Return token.item().")
        if value != right:
            if rank == 0:
                hint = ("Rank 0 returns the token as it comes back from the last rank. Does "
                        "it receive after it sent?")
            elif value == rank + 1:
                hint = "Return the value as it reached the rank, before the rank adds its own 1."
            else:
                hint = "Each rank adds 1 to what it received, and sends that on."
            raise Mistake(f"{where}: rank {rank} returned {value}; right is {right}", hint)


def _shift_trial(fix_the_deadlock):
    rank, found = dist.get_rank(), []
    for length, dtype in ((3, torch.float32), (0, torch.int64), (500_001, torch.float32)):
        x = torch.full((length,), rank + 1, dtype=dtype, device=device())
        before = x.clone()
        with Traffic() as traffic:
            got = fix_the_deadlock(x)
        if not isinstance(got, torch.Tensor):
            return [(type(got).__name__, length, True, 0, 0)]
        values = got.detach().clone().unique().tolist()
        found.append((values, length, torch.equal(x, before), traffic.sent_bytes, x.nbytes))
    return found


def check_fix_the_deadlock(fix_the_deadlock):
    for size in SIZES:
        seen = on_shift_ring(fix_the_deadlock, ranks=size)
        for rank, cases in enumerate(seen):
            for case in cases:
                _compare_shift(case, rank, size)
    yield "no deadlock on 1, 2, 3, 4, 8 ranks, with 12 bytes, 0 bytes and 2 MB"
    yield "every rank returns the x of the rank before it; its own x is unchanged"
    for rank, cases in enumerate(seen):  # of the last size, 8
        for _, _, _, sent, x_bytes in cases:
            if sent != x_bytes:
                raise Mistake(f"rank {rank} of 8 sent {sent} bytes for an x of {x_bytes} bytes",
                              "One message to one neighbour is enough; a gather or broadcast "
                              "sends x to everybody.")
    yield "each rank sends x exactly once"


def on_shift_ring(fix_the_deadlock, *, ranks):
    """Launches the shift; the hang in which all send first gets its own hint."""
    try:
        return on_ranks(_shift_trial, fix_the_deadlock, ranks=ranks, timeout=5)
    except Mistake as mistake:
        hint = mistake.hint
        if mistake.what.count("waits in send") == ranks:
            hint = ("All ranks send first. gloo's send returns when the other side receives, and "
                    "nobody does: start the send, receive, then wait for the send (dist.isend, or "
                    "dist.batch_isend_irecv).")
        elif mistake.what.count("waits in recv") == ranks:
            hint = "All ranks receive first, and nobody sends. Start the send before the receive."
        raise Mistake(mistake.what, hint) from None


def _compare_shift(case, rank, size):
    values, length, unchanged, _, _ = case
    if isinstance(values, str):
        raise Mistake(f"rank {rank} of {size} returned a {values}", "Return the received tensor.")
    if not unchanged:
        raise Mistake(f"rank {rank} of {size}: x was overwritten",
                      "The caller still needs its own x. Receive into torch.empty_like(x).")
    right = [(rank - 1) % size + 1] if length else []
    if values == right:
        return
    if values == [(rank + 1) % size + 1]:
        hint = "That is the x of the rank after it. Send to rank + 1, receive from rank - 1."
    elif values == [rank + 1]:
        hint = "That is its own x: the received tensor must be returned."
    else:
        hint = "The buffer was read before the message was in it. Wait for the receive."
    raise Mistake(f"rank {rank} of {size} (length {length}) returned {some(values)}; right is "
                  f"{some(right)}", hint)
