"""ring_shift: right, no hang, no message too many; and what all ring checks share."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.handles import DROPPED, Waits, all_awaited, drops_handles, uses
from ranklab.checks.ranks.shards import SIZES, some
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

MEMBERS, OF = [1, 3, 4], 5  # a group of three of the five ranks, which are counted anew in it
THE_GROUP = "the group of ranks 1, 3 and 4"
LIMIT = 5  # seconds; most mistakes here hang
SHIFTED = (  # the x of each call; two are alike in shape and type, for who keeps a buffer
    ((3,), torch.float32), ((3,), torch.float32), ((0,), torch.int64), ((2, 3), torch.int64),
    ((250_001,), torch.float64))


class Shifted(NamedTuple):
    """What one rank saw in one call of ring_shift."""

    at: int  # which call
    text: str  # what it returned, for a message
    whose: list  # the ranks whose x of this call that is
    later: bool  # or it is the x of a later call
    unchanged: bool
    itself: bool  # the result lies where x lies
    missing: int  # calls that were not waited for
    messages: int
    sent: int
    nbytes: int
    dtype: torch.dtype | None
    shape: tuple | None


def in_group(fn, *args, members=None):
    """(value of `fn(*args)`, what it sent, how many of its calls were not waited for); in a group
    of `members`, None on all other ranks.
    """
    group = dist.new_group(members) if members else None
    if members and dist.get_rank() not in members:
        return None
    with Traffic() as traffic, Waits() as waits:
        value = fn(*args, group) if members else fn(*args)
    return value, traffic, waits.missing(sum(traffic.calls.values()))


def _x_of(rank, at):
    """The x of `rank` in call `at`: no two of them are alike, unless they are empty."""
    shape, dtype = SHIFTED[at]
    x = torch.arange(math.prod(shape)) + 1000 * (rank + 1) + 100 * at
    return x.to(dtype).reshape(shape)


def _shift_trial(ring_shift, members=None):
    """[Shifted of each call]; looked at after the last call, so that no call spoils another's."""
    rank, calls = dist.get_rank(), []
    for at in range(len(SHIFTED)):
        x = _x_of(rank, at).to(device())
        seen = in_group(ring_shift, x, members=members)
        if seen is None:
            return None
        calls.append((*seen, torch.equal(x.cpu(), _x_of(rank, at)), x))
    return [_shifted(at, *call) for at, call in enumerate(calls)]


def _shifted(at, got, traffic, missing, unchanged, x):
    whose, later, itself, text = [], False, False, type(got).__name__
    if isinstance(got, torch.Tensor):
        itself = got.numel() > 0 and got.data_ptr() == x.data_ptr()
        got = got.detach().cpu()
        text = f"{some(got.flatten()[:5].tolist())} ({got.dtype}, shape {tuple(got.shape)})"
        whose = [r for r in range(dist.get_world_size()) if _same(got, _x_of(r, at))]
        later = any(_same(got, _x_of(r, call)) for r in range(dist.get_world_size())
                    for call in range(at + 1, len(SHIFTED)))
    return Shifted(at, text, whose, later, unchanged, itself, missing, traffic.sent_messages,
                   traffic.sent_bytes, x.nbytes, getattr(got, "dtype", None),
                   getattr(got, "shape", None))


def _same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


def check_ring_shift(ring_shift):
    for size in SIZES:
        seen = on_ring(_shift_trial, ring_shift, ranks=size)
        for rank, calls in enumerate(seen):
            for call in calls:
                _compare_shift(call, rank, list(range(size)))
    yield "no deadlock on 1, 2, 3, 4, 8 ranks, with 12 bytes, 0 bytes and 2 MB; all is waited for"
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
    seen = on_ring(_shift_trial, ring_shift, MEMBERS, ranks=OF)
    for rank, calls in enumerate(s for s in seen if s):
        for call in calls:
            _compare_shift(call, rank, MEMBERS, f" of {THE_GROUP}")
    yield "right in a group that is not all ranks"


def _compare_shift(call, rank, members, group=""):
    size, (shape, dtype) = len(members), SHIFTED[call.at]
    where = f"rank {members[rank]}{group or f' of {size}'}"
    all_awaited(call.missing, where)
    if call.dtype is None:
        raise Mistake(f"{where} returned a {call.text}", "Return the received tensor.")
    if not call.unchanged:
        raise Mistake(f"{where}: x was overwritten",
                      "The caller still needs its own x. Receive into torch.empty_like(x).")
    if call.itself:
        raise Mistake(f"{where} returned x itself, not a new tensor",
                      "Whoever writes into the result would write into x: return x.clone().")
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


def on_ring(trial, learners, members=None, *, ranks):
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
    if drops_handles(learners):
        return DROPPED
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
