"""pass_the_token and fix_the_deadlock: right, no hang, and no message too many."""

import torch
import torch.distributed as dist

from ranklab.checks.ranks.shards import SIZES, some
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

POINT_TO_POINT = {"send", "recv"}
MEMBERS = [1, 3]  # of four ranks: a group in which ranks are counted anew
LIMIT = 5  # seconds; most mistakes here hang


def in_group(fn, *args, members=None):
    """(value of `fn(*args)`, what it sent); in a group of `members`, None on all other ranks."""
    group = dist.new_group(members) if members else None
    if members and dist.get_rank() not in members:
        return None
    with Traffic() as traffic:
        value = fn(*args, group) if members else fn(*args)
    return value, traffic


def uses(fn, name):
    """True when the function's own code mentions `name`."""
    return name in getattr(getattr(fn, "__code__", None), "co_names", ())


def _token_trial(pass_the_token, members=None):
    seen = in_group(pass_the_token, members=members)
    return seen and (seen[0], seen[1].sent_messages, dict(seen[1].calls))


def check_pass_the_token(pass_the_token):
    for size in SIZES:
        seen = _on_ring(_token_trial, pass_the_token, ranks=size)
        _compare_token(seen, f"{size} ranks" if size > 1 else "1 rank")
    yield "1, 2, 3, 4, 8 ranks: rank r sees r, and rank 0 gets back the number of ranks"
    for rank, (_, messages, calls) in enumerate(seen):
        if others := sorted(set(calls) - POINT_TO_POINT):
            raise Mistake(f"rank {rank} called {', '.join(others)}",
                          "A collective would do it, but here a rank talks to its neighbours "
                          "only: dist.send and dist.recv.")
        if messages != 1:
            raise Mistake(f"rank {rank} of 8 sent {messages} messages; one is enough",
                          "Every rank hands the token on exactly once.")
    yield "each rank sends one message; a single rank sends none"
    seen = _on_ring(_token_trial, pass_the_token, MEMBERS, ranks=4)
    _compare_token([s for s in seen if s], "the group of ranks 1 and 3")
    yield "right in a group that is not all ranks"


def _compare_token(seen, where):
    size = len(seen)
    for rank in (*range(1, size), 0):  # in the order of the ring: the first mistake counts
        value, right = seen[rank][0], rank or size
        if value is None or isinstance(value, torch.Tensor):
            raise Mistake(f"{where}: rank {rank} returned {type(value).__name__}",
                          "Return the number: token.item().")
        if value == right:
            continue
        if rank == 0 and value == 0:
            hint = ("Rank 0 returns the token as it comes back from the last rank. Does it "
                    "receive after it sent?")
        elif rank and value == rank + 1:
            hint = "Return the value as it reached the rank, before the rank adds its own 1."
        else:
            hint = "Each rank adds 1 to what it received, and sends that on: token + 1."
        raise Mistake(f"{where}: rank {rank} returned {value}; right is {right}", hint)


def _shift_trial(fix_the_deadlock, members=None):
    rank, found = dist.get_rank(), []
    for length, dtype in ((3, torch.float32), (0, torch.int64), (500_001, torch.float32)):
        x = torch.full((length,), rank + 1, dtype=dtype, device=device())
        before = x.clone()
        seen = in_group(fix_the_deadlock, x, members=members)
        if seen is None:
            return None
        got, traffic = seen
        if not isinstance(got, torch.Tensor):
            return [(type(got).__name__, length, True, 0, 0)]
        values = got.detach().clone().unique().tolist()
        found.append((values, length, torch.equal(x, before), traffic.sent_bytes, x.nbytes))
    return found


def check_fix_the_deadlock(fix_the_deadlock):
    for size in SIZES:
        seen = _on_ring(_shift_trial, fix_the_deadlock, ranks=size)
        for rank, cases in enumerate(seen):
            for case in cases:
                _compare_shift(case, rank, list(range(size)))
    yield "no deadlock on 1, 2, 3, 4, 8 ranks, with 12 bytes, 0 bytes and 2 MB"
    yield "every rank returns the x of the rank before it; its own x is unchanged"
    for rank, cases in enumerate(seen):  # of the last size, 8
        for _, _, _, sent, x_bytes in cases:
            if sent != x_bytes:
                raise Mistake(f"rank {rank} of 8 sent {sent} bytes for an x of {x_bytes} bytes",
                              "One message to one neighbour is enough; a gather or broadcast "
                              "sends x to everybody.")
    yield "each rank sends x exactly once"
    seen = _on_ring(_shift_trial, fix_the_deadlock, MEMBERS, ranks=4)
    for rank, cases in enumerate(s for s in seen if s):
        for case in cases:
            _compare_shift(case, rank, MEMBERS)
    yield "right in a group that is not all ranks"


def _compare_shift(case, rank, members):
    values, length, unchanged, _, _ = case
    size = len(members)
    where = f"rank {rank} of {size}"
    if isinstance(values, str):
        raise Mistake(f"{where} returned a {values}", "Return the received tensor.")
    if not unchanged:
        raise Mistake(f"{where}: x was overwritten",
                      "The caller still needs its own x. Receive into torch.empty_like(x).")
    right = [members[(rank - 1) % size] + 1] if length else []
    if values == right:
        return
    if values == [members[(rank + 1) % size] + 1]:
        hint = "That is the x of the rank after it. Send to rank + 1, receive from rank - 1."
    elif values == [members[rank] + 1]:
        hint = "That is its own x: the received tensor must be returned."
    else:
        hint = "The buffer was read before the message was in it. Wait for the receive."
    raise Mistake(f"{where} (length {length}) returned {some(values)}; right is {some(right)}",
                  hint)


def _on_ring(trial, learners, members=None, *, ranks):
    """Launches; what hangs or breaks gets a hint for that very way to hang."""
    try:
        return on_ranks(trial, learners, members, ranks=ranks, timeout=LIMIT)
    except Mistake as mistake:
        raise Mistake(mistake.what, _why(mistake, learners, members, ranks)) from None


def _why(mistake, learners, members, ranks):
    what = mistake.what
    if members:
        return ("In a group, dist.send(x, dst) still means a rank of the whole world. Say "
                "group_dst= and group_src= (in a P2POp: group_peer=), with group=group.")
    if "got <class 'int'>" in what:
        return ("dist.recv fills the tensor that you give it, and returns the sender's rank. "
                "Do not assign its result to the tensor.")
    if "SIGSEGV" in what or "nvalid destination" in what:
        return ("There is no such rank to send to. The ring closes: after the last rank comes "
                "rank 0, so (rank + 1) % size.")
    if "does not end" not in what:
        return mistake.hint
    if uses(learners, "isend") and not uses(learners, "wait"):
        return ("isend returns a handle, and nobody waits for it: when it is dropped, the message "
                "may go with it. Keep the handle, receive, then call its wait().")
    if what.count("in send") == ranks:
        return ("All ranks send first. gloo's send returns when the other side receives, and "
                "nobody does. Either one rank receives first, or nobody waits yet: start the "
                "send, receive, then wait for the send.")
    if what.count("in recv") == ranks:
        return ("All ranks receive first, and nobody sends. Someone has to begin: in a ring "
                "with one token, rank 0 sends first; else start the send before the receive.")
    return ("A rank waits for a message that nobody sends. The ring closes: the last rank sends "
            "to rank 0, (rank + 1) % size, and rank 0 receives it.")
