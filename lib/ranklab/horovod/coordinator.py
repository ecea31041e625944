"""Rank 0's table: which ranks have asked for what, and what can be done now.

`negotiate` (negotiation.py) with all that a real run needs: requests that don't fit together are
an error on every rank, and a tensor that some ranks never ask for is reported with their numbers:
Horovod's stall inspector.
"""

import itertools
import sys
import time

from ranklab.horovod.requests import Response

ALIKE = ("kind", "dtype", "shape", "device", "op", "root", "prescale", "postscale")


class Coordinator:
    """Requests come in, responses go out, in one order for all ranks."""

    def __init__(self, ranks, settings, recorder):
        self.ranks, self.settings, self.recorder = range(ranks), settings, recorder
        self.table = {}  # name -> {rank: Request}, in the order in which names were first heard
        self.heard = {}  # name -> {rank: when}
        self.stop = ""  # why every rank shall stop
        self.reported = set()

    def hear(self, rank, requests):
        """`requests` of `rank` are in the table."""
        now = time.perf_counter()
        for request in requests:
            if request.kind == "shutdown":
                self.stop = self.stop or f"rank {rank} has called shutdown(), or has ended"
            else:
                self.table.setdefault(request.name, {})[rank] = request
                self.heard.setdefault(request.name, {})[rank] = now

    def answer(self):
        """The responses that are possible now; they leave the table."""
        complete = [name for name, asked in self.table.items() if not self._missing(asked)]
        return [self._response(name, self.table.pop(name)) for name in complete]

    def _missing(self, asked):
        """The ranks that still have to ask."""
        return [rank for rank in self.ranks if rank not in asked]

    def _response(self, name, asked):
        heard = self.heard.pop(name)
        self.reported.discard(name)
        first = asked[min(asked)]
        self.recorder.note(name, f"NEGOTIATE_{first.kind.upper()}", min(heard.values()))
        for rank, when in heard.items():
            self.recorder.note(name, f"rank {rank} is ready", when, when)
        error, rows = mismatch(asked), ()
        if first.kind == "allgather" and not error:
            rows = tuple(asked[rank].shape[0] for rank in sorted(asked))
        return Response(name, rows, error)

    def check_stalls(self):
        """A tensor that waits too long is reported once. If it waits much too long, all ranks stop.

        error  none here: `stop` then holds the sentence
        """
        now = time.perf_counter()
        for name, asked in self.table.items():
            since = min(self.heard[name].values())
            if now - since < self.settings.stall_check:
                continue
            text = (f"{name!r} has waited {now - since:.1f} s for {_ranks(self._missing(asked))}; "
                    f"{_ranks(asked)} asked for it")
            if name not in self.reported:
                self.reported.add(name)
                print(f"horovod: {text}", file=sys.stderr)
            if now - since >= self.settings.stall_shutdown:
                self.stop = self.stop or text


def mismatch(asked):
    """One sentence on how the requests of the ranks differ; "" when they fit together."""
    ranks = sorted(asked)
    first = asked[ranks[0]]
    for rank, what in itertools.product(ranks[1:], ALIKE):
        one, other = getattr(first, what), getattr(asked[rank], what)
        if what == "shape" and first.kind == "allgather" and len(one) == len(other):
            one, other = (("rows", *shape[1:]) for shape in (one, other))  # these may differ
        if one != other:
            return (f"{first.name!r} differs between ranks: {what} {one} on rank {ranks[0]}, "
                    f"{other} on rank {rank}")
    return ""


def _ranks(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
