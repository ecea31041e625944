"""The check of ring_shift: what arrives, what is sent, and no deadlock."""

import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.failures import RECEIVE_FIRST, SEND_FIRST
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.checks.ranks.messages import (
    CLOSES, DROPPED, GROUPINGS, IN_GROUP, LIMIT, MESSAGES, NEXT, NUMBERS, PREVIOUS, WAIT, sent_by,
)
from ranklab.engine import device
from ranklab.ranks import ring_shift

SHARED, BYTES = "memory that the result shares with x", "bytes sent"
BARRIERS = "calls of dist.barrier"


class Case(NamedTuple):
    shape: tuple
    dtype: str

    def __str__(self):
        return f"{self.dtype} of shape {self.shape}"

    def x(self, turn, rank):
        """Make the x of a rank in a turn: no two are equal, unless they are empty."""
        x = torch.arange(math.prod(self.shape)) + 1000 * (rank + 1) + 100 * turn
        return x.to(device(), getattr(torch, self.dtype)).reshape(self.shape)


FIRST = Case((3,), "float32")
CASES = FIRST, Case((0,), "int64"), Case((2, 3), "int64"), Case((25_001,), "float64")


def _see(fn, case, ranks):
    """Call twice, and then look: memory kept from the first call is overwritten by the second."""
    xs = [case.x(turn, dist.get_rank()) for turn in (0, 1)]
    calls = [sent_by(functools.partial(fn, x, **ranks.keywords)) for x in xs]
    for turn, (x, (got, traffic, messages)) in enumerate(zip(xs, calls)):
        is_tensor = isinstance(got, torch.Tensor)
        shares = is_tensor and x.numel() and got.data_ptr() == x.data_ptr()
        yield {"what it returns": Must("Tensor" if is_tensor else type(got).__name__, "Tensor"),
               "the result": Told(got if is_tensor else None, functools.partial(
                   _whose, case, turn, ranks.members)),
               "x afterwards": x, SHARED: Must(bool(shares), False), **messages,
               BARRIERS: AtMost(traffic.calls["barrier"], 0),
               BYTES: AtMost(traffic.sent_bytes, x.nbytes)}


def _whose(case, turn, members, got, due):
    """Return whose x it is."""
    of = {f"the x of rank {rank}{', in the other call' * (at != turn)}": case.x(at, rank)
          for at in (turn, 1 - turn) for rank in members}
    return next((text for text, x in of.items() if isinstance(got, torch.Tensor)
                 and x.numel() and x.dtype == got.dtype and torch.equal(x.cpu(), got)), "")


def by_gathering(x, group=None):
    of_ranks = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, x, group=group)
    return of_ranks[dist.get_rank(group) - 1].clone()


BEFORE = "# Both are under way before either is waited for, so no rank blocks its neighbour."
SEND = "dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),"
RECV = "dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),"
SENT = "dist.{}(x, group=group, group_dst=(rank + 1) % size)"
CAME = "dist.{}(received, group=group, group_src=(rank - 1) % size)"
WAITS = "for work in works:\n        work.wait()"
BUFFER, RETURN = "torch.empty_like(x)", "return received"
SINGLE = "    if size == 1:\n        return x.clone()\n"
HALF = "for half in (slice(len(x) // 2), slice(len(x) // 2, None))"
RING_SHIFT = Proof(
    ring_shift,
    Stage("no deadlock on 3 ranks", _see, (FIRST,), (3,),
          oracle=by_gathering, launch={"timeout": LIMIT}),
    Stage({"every rank returns the x of the rank before it, shape and type; its own is unchanged":
           (),
           "each rank sends x exactly once, on 1, 2, 3, 4 ranks and in groups, whether 0 bytes or "
           "200 KB; every handle is waited for": (DROPPED, MESSAGES, BARRIERS, BYTES)},
          _see, CASES, (4,), GROUPINGS, oracle=by_gathering, launch={"timeout": LIMIT}),
    mistakes=(
        Slip(SEND_FIRST, (BEFORE, SENT.format("send"), SEND, "")),
        Slip(RECEIVE_FIRST, (BEFORE, CAME.format("recv"), RECV, "")),
        Slip(WAIT, (WAITS, ""), (WAITS, "works[-1].wait()\n    dist.barrier(group)"),
             (BEFORE, SENT.format("isend"), SEND, "")),
        Slip("This is the next rank's x: send to rank + 1, and receive from rank - 1.",
             (SEND, SEND.replace("+", "-"), RECV, RECV.replace("- 1", "+ 1"))),
        Slip("No rank ends. Start both the send and the receive before you wait for either, and "
             "let them meet: all send to rank + 1, all receive from rank - 1.",
             (BEFORE, f"{SENT.format('isend')}.wait()", SEND, ""),
             (BEFORE, f"{CAME.format('irecv')}.wait()", RECV, ""),
             (RECV, RECV.replace("- 1", "+ 1")),
             (SEND, SEND.replace("+ 1", "- 1"))),
        Slip(CLOSES, (SEND, f"*([{SEND[:-1]}] if rank < size - 1 else []),")),
        Slip(NEXT, (SEND, SEND.replace("(rank + 1) % size", "rank + 1"))),
        Slip(PREVIOUS, (RECV, RECV.replace("(rank - 1) % size", "rank - 1"))),
        Slip(IN_GROUP, ("dist.get_rank(group), dist.get_world_size(group)",
                        "dist.get_rank(), dist.get_world_size()"),
             (SEND, SEND.replace("group=group, ", ""), RECV, RECV.replace("group=group, ", ""))),
        Slip(NUMBERS, (SEND, SEND.replace("group_peer", "peer"),
                       RECV, RECV.replace("group_peer", "peer"))),
        Slip("The caller still needs x unchanged: send x, and receive into torch.empty_like(x).",
             (f"received = {BUFFER}", "received, x = x, x.clone()"),
             (SEND, SEND.replace(" x,", " received,"), RECV, RECV.replace("received", "x"),
              BUFFER, "torch.zeros_like(x)")),
        Slip("On a single rank return a copy, x.clone(); otherwise, writing into the result would "
             "change x.",
             ("x.clone()", "x")),
        Slip("A single rank has no neighbour: it sends nothing, and returns x.clone().",
             (SINGLE, "")),
        Slip("Return what arrived: the tensor that the message was received into.",
             (RETURN, ""), (RETURN, "return x.clone()"), (RETURN, "return works")),
        Slip("dist.recv fills the tensor that you pass to it and returns the sender's rank. Do not "
             "assign its result to the tensor.",
             (BEFORE, f"work = {SENT.format('isend')}\n    received = {CAME.format('recv')}\n"
              f"    work.wait()\n    {RETURN}")),
        Slip("The message and the buffer must have x's dtype: send x as it is, and receive into "
             "torch.empty_like(x).", ("x.contiguous()", "x.float()"),
             (BUFFER, "torch.empty(x.shape)")),
        Slip("The result must have x's shape: torch.empty_like(x).",
             (RETURN, f"{RETURN}.flatten()"),
             (BUFFER, "x.new_empty(x.numel())")),
        Slip("The numbers are in reverse order: send x, and return what arrives, as they are.",
             ("x.contiguous()", "x.flip(0)")),
        Slip("Send all of x in one message: every message costs latency.",
             (SEND, f"*({SEND[:-1].replace(' x', ' x[half]')} {HALF}),",
              RECV, f"*({RECV[:-1].replace('received', 'received[half]')} {HALF}),")),
        Slip("One message to one neighbour is enough; a gather or broadcast sends x to every rank.",
             by_gathering),
        Slip("A barrier makes every rank wait for the slowest one and tells you nothing about x: "
             "calling wait() for your own two messages is enough.",
             (RETURN, f"dist.barrier(group)\n    {RETURN}"),
             (BEFORE, "dist.barrier(group)")),
        Slip("The second call overwrites what the first returned: allocate new buffers inside the "
             "function on every call.",
             ("group=None", "group=None, kept={}", BUFFER,
              f"kept.setdefault((x.shape, x.dtype), {BUFFER})")),
    ), hints=(
        "A send can block until its receiver is ready. If all ranks send first, which rank "
        "receives?",
        "Start the send without waiting for it, receive, then wait: dist.isend returns a handle.",
        "dist.batch_isend_irecv([dist.P2POp(dist.isend, ...), dist.P2POp(dist.irecv, ...)]), then "
        "call wait() on each handle. A single rank has no neighbour: return a copy."))
