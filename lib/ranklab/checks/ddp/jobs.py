"""The jobs for the check of diagnose: made up, so that causes and numbers are known."""

from dataclasses import dataclass

from ranklab.meter import Event


@dataclass(frozen=True)
class Job:
    """A job by the ms of a step: loading and computing on each rank, then one transfer of all.

    Another `hidden` ms of the transfer, and `beside` ms of loading, overlap with computing.
    """

    name: str
    verdict: str
    loads: tuple
    computes: tuple
    transfer: float
    hidden: float = 2.0
    beside: float = 0.0
    hiccups: tuple = (0, 0, 0)  # ms that rank 1 computes longer in each step; their median is 0
    unit: float = 1e-3  # seconds

    def __str__(self):
        return self.name

    def timelines(self):
        """Return [[Event] of each rank]."""
        events, now = [[] for _ in self.loads], 0.0
        for hiccup in self.hiccups:
            ready = [now + load + compute + hiccup * (rank == 1)
                     for rank, (load, compute) in enumerate(zip(self.loads, self.computes))]
            end = max(ready) + self.transfer
            for of_rank, load, time in zip(events, self.loads, ready):
                spans = (("loader", now, now + load + self.beside), ("compute", now + load, time),
                         ("communication", time - self.hidden, end), ("wait", time + 0.25, end))
                of_rank += [Event(kind, kind, 5 + a * self.unit, 5 + b * self.unit, kind)
                            for kind, a, b in spans]
            now = end
        return events


JOBS = (
    Job("all ranks load long", "loader-bound", (30, 28, 29), (20.5, 20, 20), 2),
    Job("much is hidden", "healthy", (8, 8), (40, 40), 2, hidden=38, beside=8),
    Job("transfers are long", "communication-bound", (1,) * 4, (20,) * 4, 25, unit=0.1),
    Job("rank 2 computes longer", "straggler", (1, 1, 1), (20, 20, 70), 2, unit=1e-5),
    Job("long loading, longer transfers", "communication-bound", (30, 30), (30, 30), 40),
    Job("two of three ranks are slow", "straggler", (1, 1, 1), (70, 70, 20), 2),
    Job("rank 0 loads long, rank 1 computes long", "straggler", (40, 1, 1), (20, 50, 20), 2),
    Job("one rank alone", "healthy", (1,), (20,), 0.5),
    Job("24.9% of the step is transfer", "healthy", (1, 1), (74.1, 74.1), 24.9),
    Job("a quarter is transfer", "communication-bound", (1, 1), (17, 17), 6, unit=2**-10),  # exact
    Job("hiccups of rank 1", "straggler", (1, 1, 1), (20, 20, 70), 2, hiccups=(-9, 0, 400)),
)
