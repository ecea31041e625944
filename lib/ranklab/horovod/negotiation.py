"""Which tensors do all ranks have? `negotiate` is the short answer, Coordinator the complete one.

Requests that don't match are an error on every rank. A tensor that some ranks never request is
reported with the numbers of these ranks, as by Horovod's stall inspector.
"""

import itertools
import sys
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

Average, Sum, Adasum, Min, Max, Product = range(6)  # Horovod's own numbers
OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
ALIKE = ("kind", "dtype", "shape", "device", "op", "root", "prescale", "postscale")


def negotiate(ready, table, group=None):
    """Return the names that are ready on all ranks: the same list, in the same order, on each.

    ready: the names that became ready on this rank since the last call, in any order; may be empty.
    table: a dict that each rank keeps from call to call; on rank 0 it counts on how many ranks each
        name is ready. A name is removed once it is complete.

    Cost: each rank sends its new names to rank 0, which sends one list to all.
    Paper: Sergeev & Del Balso 2018, "Horovod: fast and easy distributed deep learning"
    Lab: 05
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lists = [None] * R if rank == 0 else None
    dist.gather_object(ready, lists, group=group, group_dst=0)
    complete = []
    for names in lists or ():  # only rank 0 has lists, and only its table is ever filled
        for name in names:
            table[name] = table.get(name, 0) + 1
            if table[name] == R:
                complete.append(name)
                del table[name]
    answer = [complete]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    return answer[0]


# --- what travels between the ranks ---------------------------------------------------------------

class HorovodInternalError(RuntimeError):
    """A tensor could not be reduced, gathered or broadcast; the message says why."""


class Mismatch(HorovodInternalError, ValueError):
    """The ranks disagree about one tensor."""


class Request(NamedTuple):
    """One tensor that is ready on one rank: its name, and the fields on which ranks must agree."""

    name: str
    kind: str  # "allreduce", "allgather", "broadcast", "barrier", "shutdown"
    shape: tuple = ()
    dtype: torch.dtype | None = None
    device: str = "cpu"
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0


class Response(NamedTuple):
    """One tensor that all ranks have, or why it can't be reduced, gathered or broadcast."""

    name: str
    rows: tuple = ()  # of an allgather: the first dimension on each rank
    error: str = ""


class Handle:
    """The future of one tensor, for poll() and synchronize()."""

    def __init__(self, request, tensor=None):
        self.request = request
        # The thread works on the tensor itself, and is not part of anybody's graph.
        self.tensor = self.output = None if tensor is None else tensor.detach()
        self.is_sent = False  # the coordinator has heard its name
        self.rows = ()  # as in Response
        self.error = None
        self.finished = threading.Event()
        self.computed = None
        if tensor is not None and tensor.is_cuda:  # its last kernel may still be in the queue
            self.computed = torch.cuda.Event()
            self.computed.record()

    def finish(self, error=None):
        self.error = error
        self.finished.set()


# --- rank 0's table -------------------------------------------------------------------------------

class Coordinator:
    """Collect the ranks' requests, and make responses in one order for all ranks."""

    def __init__(self, ranks, config, recorder):
        self.ranks, self.config, self.recorder = range(ranks), config, recorder
        self.table = {}  # name -> {rank: Request}, in the order in which names were first heard
        self.heard = {}  # name -> {rank: when}
        self.stop = ""  # why every rank must stop
        self.reported = set()

    def hear(self, rank, requests):
        """Enter the `requests` of `rank` into the table."""
        now = time.perf_counter()
        for request in requests:
            if request.kind == "shutdown":
                self.stop = self.stop or f"rank {rank} has called shutdown(), or has ended"
            else:
                self.table.setdefault(request.name, {})[rank] = request
                self.heard.setdefault(request.name, {})[rank] = now

    def answer(self):
        """Remove the tensors that all ranks have requested from the table; return the responses."""
        complete = [name for name, requests in self.table.items() if not self._missing(requests)]
        return [self._response(name, self.table.pop(name)) for name in complete]

    def _missing(self, requests):
        """List the ranks that have not sent their request yet."""
        return [rank for rank in self.ranks if rank not in requests]

    def _response(self, name, requests):
        heard = self.heard.pop(name)
        self.reported.discard(name)
        first = requests[min(requests)]
        self.recorder.note(name, f"NEGOTIATE_{first.kind.upper()}", min(heard.values()))
        for rank, when in heard.items():
            self.recorder.note(name, f"rank {rank} is ready", when, when)
        error, rows = mismatch(requests), ()
        if first.kind == "allgather" and not error:
            rows = tuple(requests[rank].shape[0] for rank in sorted(requests))
        return Response(name, rows, error)

    def check_stalls(self):
        """Report once each tensor that waits for stall_check seconds.

        After stall_shutdown seconds, set `stop` to the reason why all ranks must stop. Raises
        nothing.
        """
        now = time.perf_counter()
        for name, requests in self.table.items():
            since = min(self.heard[name].values())
            if now - since < self.config.stall_check:
                continue
            missing = _ranks(self._missing(requests))
            text = (f"{name!r} has waited {now - since:.1f} s for {missing}; "
                    f"{_ranks(requests)} asked for it")
            if name not in self.reported:
                self.reported.add(name)
                print(f"horovod: {text}", file=sys.stderr)
            if now - since >= self.config.stall_shutdown:
                self.stop = self.stop or text


def mismatch(requests):
    """Return one sentence on how the requests of the ranks differ; "" if they match."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    for rank, field in itertools.product(ranks[1:], ALIKE):
        one, other = getattr(first, field), getattr(requests[rank], field)
        if field == "shape" and first.kind == "allgather" and len(one) == len(other):
            one, other = (("rows", *shape[1:]) for shape in (one, other))  # these may differ
        if one != other:
            return (f"{first.name!r} differs between ranks: {field} {one} on rank {ranks[0]}, "
                    f"{other} on rank {rank}")
    return ""


def _ranks(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
