"""pass_the_token and fix_the_deadlock: right, no hang, and no message too many."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.ranks.shards import SIZES, some
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

POINT_TO_POINT = {"send", "recv"}
MEMBERS = [1, 3]  # of four ranks: a group in which ranks are counted anew
LIMIT = 5  # seconds; most mistakes here hang
SHIFTED = (  # the x of each call; two are alike in shape and type, for who keeps a buffer
    ((3,), torch.float32), ((3,), torch.float32), ((0,), torch.int64), ((2, 3), torch.int64),
    ((500_001,), torch.float32))


class Shifted(NamedTuple):
    """What one rank saw in one call of fix_the_deadlock."""

    at: int  # which call
    text: str  # what it returned, for a message
    whose: list  # the ranks whose x of this call that is
    later: bool  # or it is the x of a later call
    unchanged: bool
    messages: int
    sent: int
    nbytes: int
    dtype: torch.dtype | None
    shape: tuple | None


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
    dist.barrier()  # who hangs in the first call must not look as if in the second
    again = in_group(pass_the_token, members=members)  # the token starts at 0 in each call
    if seen is None:
        return None
    value, traffic = seen
    return value, again[0], traffic.sent_messages, traffic.sent_bytes, dict(traffic.calls)


def check_pass_the_token(pass_the_token):
    for size in SIZES:
        seen = _on_ring(_token_trial, pass_the_token, ranks=size)
        _compare_token(seen, f"{size} ranks" if size > 1 else "1 rank")
    yield "1, 2, 3, 4, 8 ranks: rank r sees r, and rank 0 gets back the number of ranks"
    for rank, (_, _, messages, sent, calls) in enumerate(seen):
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
    seen = _on_ring(_token_trial, pass_the_token, MEMBERS, ranks=4)
    _compare_token([s for s in seen if s], "the group of ranks 1 and 3")
    yield "right in a group that is not all ranks"


def _compare_token(seen, where):
    size = len(seen)
    for rank in (*range(1, size), 0):  # in the order of the ring: the first mistake counts
        value, again, right = *seen[rank][:2], rank or size
        if value is None or isinstance(value, torch.Tensor):
            raise Mistake(f"{where}: rank {rank} returned {type(value).__name__}",
                          "Return the number: token.item().")
        if value == right and again == right:
            continue
        if value == right:
            raise Mistake(f"{where}: a second call returned {again} on rank {rank}; right is "
                          f"{right}", "Something is kept from the first call. Make the token "
                          "inside the function: it starts at 0 in each call.")
        if size > 2 and [one[0] for one in seen] == list(range(size, 0, -1)):
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


def _x_of(rank, at):
    """The x of `rank` in call `at`: no two of them are alike, unless they are empty."""
    shape, dtype = SHIFTED[at]
    x = torch.arange(math.prod(shape)) + 1000 * (rank + 1) + 100 * at
    return x.to(dtype).reshape(shape)


def _shift_trial(fix_the_deadlock, members=None):
    """[Shifted of each call]; looked at after the last call, so that no call spoils another's."""
    rank, calls = dist.get_rank(), []
    for at in range(len(SHIFTED)):
        x = _x_of(rank, at).to(device())
        seen = in_group(fix_the_deadlock, x, members=members)
        if seen is None:
            return None
        calls.append((*seen, torch.equal(x.cpu(), _x_of(rank, at)), x.nbytes))
    return [_shifted(at, *call) for at, call in enumerate(calls)]


def _shifted(at, got, traffic, unchanged, nbytes):
    whose, later, text = [], False, type(got).__name__
    if isinstance(got, torch.Tensor):
        got = got.detach().cpu()
        text = f"{some(got.flatten()[:5].tolist())} ({got.dtype}, shape {tuple(got.shape)})"
        whose = [r for r in range(dist.get_world_size()) if _same(got, _x_of(r, at))]
        later = any(_same(got, _x_of(r, call)) for r in range(dist.get_world_size())
                    for call in range(at + 1, len(SHIFTED)))
    return Shifted(at, text, whose, later, unchanged, traffic.sent_messages, traffic.sent_bytes,
                   nbytes, getattr(got, "dtype", None), getattr(got, "shape", None))


def _same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


def check_fix_the_deadlock(fix_the_deadlock):
    for size in SIZES:
        seen = _on_ring(_shift_trial, fix_the_deadlock, ranks=size)
        for rank, calls in enumerate(seen):
            for call in calls:
                _compare_shift(call, rank, list(range(size)))
    yield "no deadlock on 1, 2, 3, 4, 8 ranks, with 12 bytes, 0 bytes and 2 MB"
    yield "every rank returns the x of the rank before it, shape and type; its own is unchanged"
    for rank, calls in enumerate(seen):  # of the last size, 8
        for call in calls:
            if call.sent != call.nbytes:
                raise Mistake(f"rank {rank} of 8 sent {call.sent} bytes for an x of {call.nbytes} "
                              "bytes", "One message to one neighbour is enough; a gather or "
                              "broadcast sends x to everybody.")
            if call.messages > 1:
                raise Mistake(f"rank {rank} of 8 sent {call.messages} messages for one x",
                              "Send x whole, in one message: each message costs its latency.")
    yield "each rank sends x exactly once"
    seen = _on_ring(_shift_trial, fix_the_deadlock, MEMBERS, ranks=4)
    for rank, calls in enumerate(s for s in seen if s):
        for call in calls:
            _compare_shift(call, rank, MEMBERS)
    yield "right in a group that is not all ranks"


def _compare_shift(call, rank, members):
    size, (shape, dtype) = len(members), SHIFTED[call.at]
    where = f"rank {rank} of {size}"
    if call.dtype is None:
        raise Mistake(f"{where} returned a {call.text}", "Return the received tensor.")
    if not call.unchanged:
        raise Mistake(f"{where}: x was overwritten",
                      "The caller still needs its own x. Receive into torch.empty_like(x).")
    if members[(rank - 1) % size] in call.whose:
        return
    if call.dtype != dtype or tuple(call.shape) != shape:
        hint = ("The result has x's type and shape: receive into torch.empty_like(x), and return "
                "all of it.")
    elif call.later:
        hint = ("That came in a later call: its message overwrote the result of this one. Make "
                "the buffer inside the function, new in each call.")
    elif members[(rank + 1) % size] in call.whose:
        hint = "That is the x of the rank after it. Send to rank + 1, receive from rank - 1."
    elif members[rank] in call.whose:
        hint = "That is its own x: the received tensor must be returned."
    else:
        hint = ("Either the buffer was read before the message was in it: wait for the receive. "
                "Or it is not x that was sent.")
    right = _x_of(members[(rank - 1) % size], call.at)
    raise Mistake(f"{where} returned {call.text}; right is {some(right.flatten()[:5].tolist())} "
                  f"({dtype}, shape {shape})", hint)


def _on_ring(trial, learners, members=None, *, ranks):
    """Launches; what hangs or breaks gets a hint for that very way to hang."""
    try:
        return on_ranks(trial, learners, members, ranks=ranks, timeout=LIMIT)
    except Mistake as mistake:
        raise Mistake(mistake.what, _why(mistake, learners, members, ranks)) from None


def _why(mistake, learners, members, ranks):
    what = mistake.what
    if members:
        return ("In a group ranks are counted anew: dist.get_rank(group), dist.get_world_size"
                "(group). And dist.send(x, dst) still means a rank of the whole world. Say "
                "group_dst= and group_src= (in a P2POp: group_peer=), with group=group.")
    if "got <class 'int'>" in what:
        return ("dist.recv fills the tensor that you give it, and returns the sender's rank. "
                "Do not assign its result to the tensor.")
    if "SIGABRT" in what:
        return ("The message is longer than the buffer it came into: x may have any shape and "
                "type, so receive into torch.empty_like(x).")
    if "SIGSEGV" in what or "nvalid destination" in what:
        return ("There is no such rank to send to. The ring closes: after the last rank comes "
                "rank 0, so (rank + 1) % size.")
    if "does not end" not in what:
        return mistake.hint
    if (uses(learners, "isend") or uses(learners, "irecv")) and not uses(learners, "wait"):
        return ("isend and irecv return a handle, and nobody waits for it: when it is dropped, the "
                "message may go with it. Keep the handle, then call its wait().")
    if what.count("in send") == ranks:
        return ("All ranks send first. gloo's send returns when the other side receives, and "
                "nobody does. Either one rank receives first, or nobody waits yet: start the "
                "send, receive, then wait for the send.")
    if what.count("in recv") == ranks:
        return ("All ranks receive first, and nobody sends. Someone has to begin: in a ring "
                "with one token, rank 0 sends first; else start the send before the receive.")
    if uses(learners, "batch_isend_irecv"):
        return ("batch_isend_irecv returns a handle for each send and receive. Do you wait for all "
                "of them? A message may go with a dropped handle. And the ring closes: to "
                "(rank + 1) % size, from (rank - 1) % size.")
    return ("A rank waits for a message that nobody sends. The ring closes: the last rank sends "
            "to rank 0, (rank + 1) % size, and rank 0 receives it.")
