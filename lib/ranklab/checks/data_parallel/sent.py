"""A rank's messages in collectives: which tensors, to whom, and whether somebody waits for them."""

import torch
import torch.distributed as dist

from ranklab.checks.handles import HeldWork, Waits
from ranklab.checks.prover import AtMost, Must
from ranklab.meter import Traffic

OUTSIDE = "what it calls of ranks outside the group"
BYTES, CALLS, OTHERS = ("the number of bytes that travel", "calls for them",
                        "what it calls of other collectives")
UNENDED, DIVIDED = "handles that nobody waited for", "tensors divided while they travel"
COST = BYTES, CALLS, OTHERS  # told after the values; what nobody waited for is told before them


class Sent:
    """In `with`, record the tensors of every dist.<verb>, with a HeldWork if in transit.

    note       is called with each tensor and its HeldWork, or None
    waited     is called when somebody waits for one of them
    rehearsed  nothing is sent: ranks with different calls would wait, or crash
    """

    def __init__(self, verb="all_reduce", note=lambda *_: None, waited=lambda: None,
                 rehearsed=False):
        self.verb, self.note, self.waited, self.rehearsed = verb, note, waited, rehearsed
        self.tensors, self.handles, self.ranks = [], [], set()
        self.traffic, self.waits = Traffic(), Waits()

    def __enter__(self):
        self.collective = getattr(dist, self.verb)
        setattr(dist, self.verb, self._call)
        self.traffic.__enter__()
        self.waits.__enter__()
        return self

    def __exit__(self, *error):
        self.waits.__exit__(*error)
        self.traffic.__exit__(*error)
        setattr(dist, self.verb, self.collective)

    def _call(self, tensor, *args, **kwargs):
        group = kwargs.get("group", args[1] if len(args) > 1 else None)
        self.ranks |= {*dist.get_process_group_ranks(group)}
        handle, is_async = None, kwargs.get("async_op", args[2] if len(args) > 2 else False)
        if is_async:
            result = tensor.detach().clone()  # keeps the strides
            work = Done() if self.rehearsed else self.collective(result, *args, **kwargs)
            handle = HeldWork(work, tensor, result, self.waited)
            self.handles.append(handle)
        elif not self.rehearsed:
            self.collective(tensor, *args, **kwargs)
        self.tensors.append(tensor)
        self.note(tensor, handle)
        return handle

    def cost(self, tensors, ranks):
        """Return the observations for a function that must send each of `tensors` whole, once."""
        calls, nbytes = self.traffic.calls, sum(op.payload_bytes for op in self.traffic.ops)
        number = calls.pop(self.verb, 0)
        if self.rehearsed:
            nbytes += sum(tensor.nbytes for tensor in self.tensors)
            number += len(self.tensors)
        return self.ended(ranks) | {
            BYTES: Must(nbytes, sum(tensor.nbytes for tensor in tensors)),
            CALLS: AtMost(number, len(tensors)), OTHERS: Must(sorted(calls), [])}

    def ended(self, ranks):
        """Return the observations for a function that must wait for all messages it began."""
        missing = max(sum(not work.is_here for work in self.handles), 0 if self.rehearsed else
                      self.waits.missing(self.traffic.calls.total()))
        return {UNENDED: AtMost(missing, 0),
                DIVIDED: AtMost(sum(work.is_divided for work in self.handles), 0),
                OUTSIDE: Must(sorted(self.ranks - {*ranks.members}), [])}


class Done:
    """The handle of a message that is never sent."""

    def wait(self, *_):
        return True

    is_completed = wait

    def get_future(self):
        future = torch.futures.Future()
        future.set_result([])
        return future
