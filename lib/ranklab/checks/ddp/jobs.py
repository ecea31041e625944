"""The jobs that the check of diagnose looks at: made up, so that causes and numbers are known."""

from dataclasses import dataclass
from statistics import mean

from ranklab.meter import Event


@dataclass(frozen=True)
class Case:
    """A job: of each rank the ms it loads and computes in a step, and the ms of a transfer that
    follow when the last rank is ready. Transfers begin `hidden` ms before a rank is ready, and
    loading goes on for `beside` ms beside the computing."""

    name: str
    verdict: str
    loads: tuple
    computes: tuple
    transfer: float
    hidden: float = 2.0
    beside: float = 0.0
    hiccups: tuple = (0,) * 5  # ms that rank 1 computes longer in each step; their median is 0
    unit: float = 1e-3  # seconds

    def timelines(self):
        """[[Event] of each rank], with a loader event at the end, as a DataLoader leaves it."""
        events, now = [[] for _ in self.loads], 0.0
        for hiccup in self.hiccups:
            ready = [now + load + compute + hiccup * (rank == 1)
                     for rank, (load, compute) in enumerate(zip(self.loads, self.computes))]
            end = max(ready) + self.transfer
            for of_rank, load, done in zip(events, self.loads, ready):
                middle = (now + load + done) / 2
                of_rank += [self._event(*each) for each in (
                    ("loader", now, now + load + self.beside, "main"),
                    ("compute", now + load, middle, "stream 7"),
                    ("compute", middle, done, "backward 1"),
                    ("communication", done - self.hidden, end - 0.125, "gloo 1"),
                    ("communication", done - self.hidden / 2, end, "gloo 2"),
                    ("wait", done + 0.25, end, "main"))]
            now = end
        return [[*of_rank, self._event("loader", now, now, "main")] for of_rank in events]

    def _event(self, kind, start, end, lane):
        return Event(kind, kind, 5 + start * self.unit, 5 + end * self.unit, lane)

    def usual(self):
        """In ms, of the median step: of each rank [computing and loading], [exposed
        communication]; and the step's length."""
        works = [load + compute for load, compute in zip(self.loads, self.computes)]
        length = max(works) + self.transfer
        return works, [length - work for work in works], length

    def shares(self):
        """The oracle, from the numbers that the timelines are made of."""
        works, bare, length = self.usual()
        return {"loader-bound": mean(self.loads) / length,
                "communication-bound": min(bare) / length,
                "straggler": more_than_others(works) / length}


def more_than_others(works):
    """What the busiest has more than the mean of the others; 0 where there are none."""
    if len(works) < 2:
        return 0.0
    return max(works) - (sum(works) - max(works)) / (len(works) - 1)


CASES = {  # what holds when a check has come so far: the jobs
    "each cause is named; a hidden transfer is none, and neither is waiting for a straggler": (
        Case("all ranks load long", "loader-bound", (30, 28, 29), (20.5, 20, 20), 2),
        Case("nothing is wrong", "healthy", (1, 1), (20, 20), 2),
        Case("half of the loading is beside the computing", "healthy", (8, 8), (30, 30), 2,
             beside=8),
        Case("transfers are long", "communication-bound", (1, 1, 1, 1), (20,) * 4, 25),
        Case("rank 2 computes longer", "straggler", (1, 1, 1), (20, 20, 70), 2),
        Case("rank 0 loads longer than the others", "straggler", (60, 1, 2, 6), (20,) * 4, 2),
        Case("all of a long transfer is hidden", "healthy", (1, 1), (40, 40), 2, hidden=38)),
    "of two causes the larger one; the busiest rank against all others": (
        Case("long loading, longer transfers", "communication-bound", (30, 30), (30, 30), 40),
        Case("long transfers, rank 1 computes longer still", "straggler", (1, 1), (20, 60), 30),
        Case("rank 1 loads longest, but all load long", "loader-bound", (30, 60), (20, 20), 2),
        Case("two of three ranks are slow", "straggler", (1, 1, 1), (70, 70, 20), 2),
        Case("rank 0 loads long, rank 1 computes long", "straggler", (40, 1, 1), (20, 50, 20), 2)),
    "one rank alone; just below and above a quarter; fast and slow machines alike": (
        Case("one rank alone", "healthy", (1,), (20,), 0.5),
        Case("one rank alone, which loads long", "loader-bound", (30,), (20,), 0.5),
        Case("24.9% of the step is transfer", "healthy", (1, 1), (74.1, 74.1), 24.9),
        Case("a quarter of the step is transfer", "communication-bound", (1, 1), (17, 17), 6,
             unit=2**-10),  # exact: no rounding decides
        Case("25.1% of the step is loading", "loader-bound", (25.1, 25.1), (70, 70), 4.9),
        Case("rank 1 has 24.9% of the step more to do", "healthy", (0.4, 0.4), (70.2, 95.1), 4.5),
        Case("on a machine 100 times slower", "healthy", (1, 1), (20, 20), 2, unit=0.1),
        Case("on a machine 100 times faster", "straggler", (1, 1), (20, 70), 2, unit=1e-5)),
    "longer and shorter steps beside the usual ones change nothing": (
        Case("hiccups of rank 1", "healthy", (1, 1), (20, 20), 2, hiccups=(-10, 0, 400, 0, 5)),
        Case("hiccups of rank 1, rank 2 is slow", "straggler", (1, 1, 1), (20, 20, 70), 2,
             hiccups=(-10, 0, 400, 0, 5))),
}
