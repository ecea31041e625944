"""ring_shift: right, no hang, no message too many; and what all ring checks share."""

import math

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import MISMATCH, RECEIVE_FIRST, SEND_FIRST, hint_of
from ranklab.checks.handles import DROPPED, Waits, all_awaited, drops_handles, uses
from ranklab.checks.ranks.shard_range import SIZES
from ranklab.checks.trial import explain, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

MEMBERS, OF = [1, 3, 4], 5  # a group of three of the five ranks, which are counted anew in it
THE_GROUP = "the group of ranks 1, 3 and 4"
LIMIT = 5  # seconds; most mistakes here hang
SHIFTED = (  # the x of each call; two are alike in shape and type: a buffer may be kept
    ((3,), torch.float32), ((3,), torch.float32), ((0,), torch.int64), ((2, 3), torch.int64),
    ((250_001,), torch.float64))

IN_GROUP = ("In a group ranks are counted anew: dist.get_rank(group), dist.get_world_size(group). "
            "And dist.send(x, dst) still means a rank of the whole world. Say group_dst= and "
            "group_src= (in a P2POp: group_peer=), with group=group.")
CLOSES = ("The ring closes: the last rank sends to rank 0, (rank + 1) % size, and rank 0 receives "
          "it.")
BATCH = ("batch_isend_irecv returns a handle for each send and receive. Do you wait for all of "
         f"them? A message may go with a dropped handle. {CLOSES}")
FAILURES = {
    "TypeError: .*got <class 'int'>.*": "dist.recv fills the tensor that you give it, and returns "
    "the sender's rank. Do not assign its result to the tensor.",
    MISMATCH: "The message is longer than the buffer it came into: x may have any shape and type, "
    "so receive into torch.empty_like(x).",
    "was killed by SIGSEGV|ValueError: .*nvalid destination.*": "There is no such rank to send to. "
    "The ring closes: after the last rank comes rank 0, so (rank + 1) % size.",
}


def in_group(fn, *args, members=None):
    """(value of `fn(*args)`, its Traffic, how many of its calls were not waited for); in a group
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
    """The first Mistake of this rank, or (messages, bytes sent, bytes of x) of each call; looked
    at after the last call, because a later call may spoil what an earlier one returned.
    """
    rank = dist.get_rank()
    xs = [_x_of(rank, at).to(device()) for at in range(len(SHIFTED))]
    seen = [in_group(ring_shift, x, members=members) for x in xs]
    if None in seen:
        return []
    try:
        for at, x in enumerate(xs):
            _compare_shift(at, x, seen[at], members)
    except Mistake as mistake:
        return mistake
    return [(traffic.sent_messages, traffic.sent_bytes, x.nbytes)
            for x, (_, traffic, _) in zip(xs, seen)]


def _compare_shift(at, x, seen, members):
    got, _, missing = seen
    rank, ranks = dist.get_rank(), members or list(range(dist.get_world_size()))
    before, after = (ranks[(ranks.index(rank) + step) % len(ranks)] for step in (-1, 1))
    where = f"rank {rank} of {THE_GROUP if members else len(ranks)}"
    all_awaited(missing, where)
    if not isinstance(got, torch.Tensor):
        raise Mistake(f"{where} returned a {type(got).__name__}", "Return the received tensor.")
    if not torch.equal(x.cpu(), _x_of(rank, at)):
        raise Mistake(f"{where}: x was overwritten",
                      "The caller still needs its own x. Receive into torch.empty_like(x).")
    if got.numel() and got.data_ptr() == x.data_ptr():
        raise Mistake(f"{where} returned x itself, not a new tensor",
                      "What is written into the result would stand in x: return x.clone().")
    if (got.shape, got.dtype) != (x.shape, x.dtype):
        hint = ("The result has x's type and shape: receive into torch.empty_like(x), and return "
                "all of it.")
    else:
        hint = ("Either the buffer was read before the message was in it: wait for the receive. "
                "Or it is not x that was sent.")
    kept = ("Its message overwrote the result of this call. Make the buffer inside the function, "
            "new in each call.")
    slips = {f"the x of rank {r} that came in a later call": (_x_of(r, later), kept) for r in ranks
             for later in range(at + 1, len(SHIFTED)) if SHIFTED[later] == SHIFTED[at]}
    slips["the x of the rank after it"] = (_x_of(after, at),
                                           "Send to rank + 1, receive from rank - 1.")
    slips["its own x"] = _x_of(rank, at), "The received tensor must be returned."
    explain(f"{where}: the result", got.detach().cpu(), _x_of(before, at), slips, hint)


def check_ring_shift(ring_shift):
    for size in SIZES:
        sent = on_ring(_shift_trial, ring_shift, ranks=size)
    yield "no deadlock on 1, 2, 3, 4, 8 ranks, with 12 bytes, 0 bytes and 2 MB; all is waited for"
    yield "every rank returns the x of the rank before it, shape and type; its own is unchanged"
    for rank, of_rank in enumerate(sent):  # of the last size, 8
        for messages, nbytes, of_x in of_rank:
            if nbytes != of_x:
                raise Mistake(f"rank {rank} of 8 sent {nbytes} bytes for an x of {of_x} bytes",
                              "One message to one neighbour is enough; a gather or broadcast "
                              "sends x to everybody.")
            if messages > 1:
                raise Mistake(f"rank {rank} of 8 sent {messages} messages for one x",
                              "Send x whole, in one message: each message costs its latency.")
    yield "each rank sends x exactly once"
    on_ring(_shift_trial, ring_shift, MEMBERS, ranks=OF)
    yield "right in a group that is not all ranks"


def on_ring(trial, learner_fn, members=None, *, ranks):
    """Launches; what hangs or breaks gets a hint for that very way to hang. A Mistake that a rank
    returns is raised.
    """
    try:
        seen = on_ranks(trial, learner_fn, members, ranks=ranks, timeout=LIMIT)
    except Mistake as mistake:
        mistake.hint = _why(mistake, learner_fn, members)
        raise
    for value in seen:
        if isinstance(value, Mistake):
            raise value
    return seen


def _why(mistake, learner_fn, members):
    """A hint about this very way to hang or to break."""
    if members:
        return IN_GROUP
    hangs = mistake.cause.startswith("hang: ")
    if hangs and drops_handles(learner_fn):
        return DROPPED
    if not hangs or mistake.hint in (SEND_FIRST, RECEIVE_FIRST):
        return hint_of(FAILURES, mistake) or mistake.hint
    if uses(learner_fn, "batch_isend_irecv"):
        return BATCH
    return f"{mistake.hint} {CLOSES}".strip()
