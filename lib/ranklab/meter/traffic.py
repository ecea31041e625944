"""Traffic: a block in which every op of torch.distributed on this rank is counted."""

from collections import Counter
from contextlib import contextmanager, nullcontext

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ranklab.meter.ops import read_ops
from ranklab.meter.text import lined_up
from ranklab.meter.watcher import Watcher

_COLUMNS = ("op", "calls", "tensor bytes", "sent bytes", "received bytes", "messages")


class Traffic:
    """Count every torch.distributed op that this rank calls inside the block.

        with Traffic() as traffic:
            dist.all_reduce(gradient)
        traffic.sent_bytes

    Any caller counts: your code, torch DDP's backward, FSDP2, DTensor, pipelining.
    Point-to-point ops count what they send; collectives count by the ring formulas of
    ranklab.meter.costs. Blocks may be nested, and each counts; an object that is entered again
    continues its counts.

    Not seen: the work of another thread, unless that thread enters `in_thread()`; a replayed CUDA
    graph; kernels that access a peer's memory directly (torch's symmetric memory).
    Functions under torch.compile are seen, and stay compiled. A sparse tensor counts as dense.
    Torch's own extra messages count too: DDP sends broadcasts in its constructor and second step.
    Cost: nothing is sent; some microseconds for every tensor op in the block
    """

    def __init__(self):
        self.ops = []  # Op, in the order in which the calls returned
        self._open = []  # blocks entered and not left; empty outside, so that Traffic pickles

    def __enter__(self):
        self._open.append(self.in_thread())
        self._open[-1].__enter__()
        return self

    def __exit__(self, *error):
        return self._open.pop().__exit__(*error)

    @contextmanager
    def in_thread(self):
        """Count the work of the calling thread as well; enter this context inside that thread.

        Threads that torch starts for backward do not need it. In a thread that is already counted
        it changes nothing.
        """
        watching = any(getattr(mode, "owner", None) is self
                       for mode in _get_current_dispatch_mode_stack())
        with nullcontext() if watching else Watcher(self, self._count):
            yield self

    def _count(self, func, args, kwargs, result):
        self.ops += read_ops(func, args, kwargs)

    @property
    def calls(self):
        """Counter: name of the op -> number of calls."""
        return Counter(op.name for op in self.ops)

    @property
    def sent_bytes(self):
        return sum(op.sent_bytes for op in self.ops)

    @property
    def received_bytes(self):
        return sum(op.received_bytes for op in self.ops)

    @property
    def sent_messages(self):
        return sum(op.messages for op in self.ops)

    @property
    def bytes_to(self):
        """Counter: global rank -> bytes sent to it, by ops that name the receiver.

        Those are send, all_to_all, gather and scatter. Which ranks exchange messages in an
        all_reduce is the backend's choice.
        """
        sent = Counter()
        for op in self.ops:
            for rank, n in op.sent_to:
                sent[rank] += n
        return sent

    @property
    def bytes_in(self):
        """Counter: group, as the tuple of its global ranks -> bytes sent inside it."""
        sent = Counter()
        for op in self.ops:
            sent[op.group] += op.sent_bytes
        return sent

    def by_axis(self, mesh):
        """Return a Counter: axis of `mesh` -> bytes sent along it, by the group of each op.

        A group along several axes has a key such as "data x tensor"; any other group is "other".
        Pass a group to point-to-point ops as well: without one they count for the group of all
        ranks.
        """
        sent = Counter()
        for group, n in self.bytes_in.items():
            sent[" x ".join(mesh.axes_of(group)) or "other"] += n
        return sent

    def table(self):
        """Return a text table: one line per kind of op, and the sum."""
        rows = []
        for name, calls in self.calls.items():
            ops = [op for op in self.ops if op.name == name]
            rows.append((name, calls, sum(op.payload_bytes for op in ops),
                         sum(op.sent_bytes for op in ops), sum(op.received_bytes for op in ops),
                         sum(op.messages for op in ops)))
        sums = [sum(column) for column in zip(*(row[1:] for row in rows))] or [0] * 5
        rows.append(("sum", *sums))
        return lined_up(_COLUMNS, rows)
