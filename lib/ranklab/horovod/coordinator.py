"""Rank 0's table: which ranks have asked for what, and what can be done now.

`negotiate` (negotiation.py) with all that a real run needs: requests that don't fit together are
an error on every rank. Ranks that have joined count as ready for anything. A tensor that some ranks
never ask for is reported with their numbers: Horovod's stall inspector.
"""

import sys
import time

from ranklab.horovod.requests import JOIN, Response

ALIKE = ("kind", "dtype", "shape", "device", "op", "root", "prescale", "postscale", "process_set")


class Coordinator:
    """Requests come in, responses go out, in one order for all ranks.

    `sets` maps the number of each process set to the ranks in it; 0 is all ranks.
    """

    def __init__(self, sets, settings, recorder):
        self.sets, self.settings, self.recorder = sets, settings, recorder
        self.table = {}  # name -> {rank: Request}, in the order in which names were first heard
        self.heard = {}  # name -> {rank: when}
        self.joined = []  # ranks in the order in which they joined
        self.refused = {}  # name, of a process set that is not known -> ranks that were told so
        self.stop = ""  # why every rank shall stop
        self.reported = set()
        self.active = time.perf_counter()  # when there was last something to do

    def hear(self, rank, requests):
        """`requests` of `rank` are in the table."""
        now = time.perf_counter()
        for request in requests:
            if request.kind == "join":
                self.joined.append(rank)
            elif request.kind == "shutdown":
                self.stop = self.stop or f"rank {rank} has called shutdown(), or has ended"
            else:
                self.table.setdefault(request.name, {})[rank] = request
                self.heard.setdefault(request.name, {})[rank] = now

    def answer(self):
        """The responses that are possible now; they leave the table."""
        complete = [name for name, asked in self.table.items() if not self._missing(asked)]
        responses = [self._response(name, self.table.pop(name)) for name in complete]
        if len(self.joined) == len(self.sets[0]):
            responses.append(Response(JOIN, (self.joined[-1],)))
            self.joined.clear()
        if responses:
            self.note_activity()
        return responses

    def note_activity(self):
        """Something is done now: the ranks that have not joined are at work."""
        self.active = time.perf_counter()

    def _missing(self, asked):
        """The ranks that still have to ask; a process set not known here yet lacks rank 0, except
        where rank 0 was refused already and this rank asks a moment later.
        """
        first = next(iter(asked.values()))
        told = self.refused.get(first.name)
        if first.process_set not in self.sets and told and told.isdisjoint(asked):
            return []
        members = self.sets.get(first.process_set, (0,))
        return [r for r in members if r not in asked and r not in self.joined]

    def _response(self, name, asked):
        heard = self.heard.pop(name)
        self.reported.discard(name)
        first = asked[min(asked)]
        self.recorder.note(name, f"NEGOTIATE_{first.kind.upper()}", min(heard.values()))
        for rank, when in heard.items():
            self.recorder.note(name, f"rank {rank} is ready", when, when)
        error = mismatch(asked) or self._impossible(first, asked)
        sizes = ()
        if first.kind == "allgather" and not error:
            sizes = tuple(asked[rank].shape[0] for rank in sorted(asked))
        return Response(first, sizes, error)

    def _impossible(self, first, asked):
        """Why no rank can do what all asked for; "" when they can."""
        if first.process_set not in self.sets:
            told = set() if 0 in asked else self.refused.get(first.name, set())
            self.refused[first.name] = told | set(asked)
            return (f"{first.name!r}: process set {first.process_set} was not added since init(); "
                    f"there are {sorted(self.sets)}")
        joined = [rank for rank in self.joined if rank in self.sets[first.process_set]]
        if joined and first.kind in ("allgather", "broadcast"):
            return (f"{first.kind} of {first.name!r}: {_ranks(joined)} joined, and a rank that has "
                    "joined takes part in all-reduces only")
        return ""

    def check_stalls(self):
        """A tensor that waits too long is reported once. If it waits much too long, all ranks stop.

        error  none here: `stop` then holds the sentence
        """
        now = time.perf_counter()
        waiting = {name: (min(self.heard[name].values()), list(asked), self._missing(asked))
                   for name, asked in self.table.items()}
        if self.joined and not waiting:
            others = [r for r in self.sets[0] if r not in self.joined]
            waiting["join"] = (self.active, self.joined, others)
        for name, (since, ready, missing) in waiting.items():
            if now - since < self.settings.stall_check:
                continue
            text = (f"{name!r} has waited {now - since:.1f} s for {_ranks(missing)}; "
                    f"{_ranks(ready)} asked for it")
            if name not in self.reported:
                self.reported.add(name)
                print(f"horovod: {text}", file=sys.stderr)
            if now - since >= self.settings.stall_shutdown:
                self.stop = self.stop or text


def mismatch(asked):
    """One sentence on how the requests of the ranks differ; "" when they fit together."""
    ranks = sorted(asked)
    first = asked[ranks[0]]
    for rank in ranks[1:]:
        for what in ALIKE:
            one, other = getattr(first, what), getattr(asked[rank], what)
            if what == "shape" and first.kind == "allgather":  # only its rows may differ
                if one[1:] == other[1:] and len(one) == len(other):
                    continue
            if one != other:
                return (f"{first.name!r} differs between ranks: {what} {one} on rank {ranks[0]}, "
                        f"{other} on rank {rank}")
    return ""


def _ranks(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
