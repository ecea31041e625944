"""What a rank asks for, and what all ranks are told: the messages of the negotiation."""

import threading
import time
from typing import NamedTuple

import torch

Average, Sum, Adasum, Min, Max, Product = range(6)  # Horovod's own numbers
OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


class HorovodInternalError(RuntimeError):
    """A tensor could not be reduced, gathered or broadcast; the message says why."""


class Mismatch(HorovodInternalError, ValueError):
    """The ranks disagree about one tensor."""


class Request(NamedTuple):
    """One tensor that is ready on one rank: its name, and all that the ranks must agree on."""

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
    """The future of one tensor: poll() and synchronize() take it."""

    def __init__(self, request, tensor=None):
        self.request = request
        # The thread works on the tensor itself, and is not part of anybody's graph.
        self.tensor = self.output = None if tensor is None else tensor.detach()
        self.asked = time.perf_counter()
        self.is_sent = False  # the coordinator knows of it by name
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
