"""The jobs that the check of diagnose looks at: made up, so that causes and numbers are known."""

import random
from dataclasses import dataclass
from statistics import mean, median

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
    steps: int = 5
    hiccup: float = 0.0  # ms that rank 1 computes longer in its third step
    noise: float = 0.0  # a step takes up to so much longer
    unit: float = 1e-3  # seconds

    def drawn(self):
        """[(ms of loading, of computing) of each rank] of each step."""
        draw, steps = random.Random(1), []
        for step in range(self.steps):
            longer = [1 + self.noise * draw.random() for _ in self.loads]
            steps.append([(load * times, compute * times + self.hiccup * ((step, rank) == (2, 1)))
                          for rank, (load, compute, times)
                          in enumerate(zip(self.loads, self.computes, longer))])
        return steps

    def timelines(self):
        """[[Event] of each rank], with a loader event at the end, as a DataLoader leaves it."""
        events, now = [[] for _ in self.loads], 0.0
        for step in self.drawn():
            ready = [now + load + compute for load, compute in step]
            end = max(ready) + self.transfer
            for of_rank, (load, _), done in zip(events, step, ready):
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
        """Medians over the steps, in ms: of each rank [loading], [computing], [exposed
        communication]; and a step's length."""
        steps = self.drawn()
        ends = [max(map(sum, step)) + self.transfer for step in steps]
        of_ranks = list(zip(*steps))  # [(loading, computing) of each step] of each rank
        loads = [median(load for load, _ in one) for one in of_ranks]
        computes = [median(compute for _, compute in one) for one in of_ranks]
        bare = [median(end - sum(work) for end, work in zip(ends, one)) for one in of_ranks]
        return loads, computes, bare, median(ends)

    def shares(self):
        """The oracle, from the numbers that the timelines are made of."""
        loads, computes, bare, length = self.usual()
        works = [load + compute for load, compute in zip(loads, computes)]
        return {"loader-bound": mean(loads) / length, "communication-bound": min(bare) / length,
                "straggler": more_than_others(works) / length}


def more_than_others(works):
    """What the busiest has more than the mean of the others; 0 where there are none."""
    if len(works) < 2:
        return 0.0
    return max(works) - (sum(works) - max(works)) / (len(works) - 1)


CLEAR = (
    Case("nothing is wrong", "healthy", (1, 1), (20, 20), 2),
    Case("all ranks load long", "loader-bound", (30, 28, 29), (20.5, 20, 20), 2),
    Case("half of the loading is beside the computing", "healthy", (8, 8), (30, 30), 2, beside=8),
    Case("transfers are long", "communication-bound", (1, 1, 1, 1), (20,) * 4, 25),
    Case("rank 2 computes longer", "straggler", (1, 1, 1), (20, 20, 70), 2),
    Case("rank 0 loads longer than the others", "straggler", (60, 1, 2, 6), (20,) * 4, 2),
    Case("all of a long transfer is hidden", "healthy", (1, 1), (40, 40), 2, hidden=38),
)
TWO_CAUSES = (  # both above a quarter: the larger one counts, whichever is asked first
    Case("long loading, longer transfers", "communication-bound", (30, 30), (30, 30), 40),
    Case("long transfers, rank 1 computes longer still", "straggler", (1, 1), (20, 60), 30),
    Case("rank 1 loads longest, but all load long", "loader-bound", (30, 60), (20, 20), 2),
    Case("two of three ranks are slow", "straggler", (1, 1, 1), (70, 70, 20), 2),
    Case("rank 0 loads long, rank 1 computes long", "straggler", (40, 1, 1), (20, 50, 20), 2),
)
ODD = (
    Case("one rank alone", "healthy", (1,), (20,), 0.5),
    Case("one rank alone, which loads long", "loader-bound", (30,), (20,), 0.5),
    Case("24.9% of the step is transfer", "healthy", (1, 1), (74.1, 74.1), 24.9),
    Case("25.1% of the step is transfer", "communication-bound", (1, 1), (73.9, 73.9), 25.1),
    Case("a quarter of the step is transfer", "communication-bound", (1, 1), (17, 17), 6,
         unit=2**-10),  # exact: no rounding decides
    Case("24.9% of the step is loading", "healthy", (24.9, 24.9), (70, 70), 5.1),
    Case("25.1% of the step is loading", "loader-bound", (25.1, 25.1), (70, 70), 4.9),
    Case("rank 1 has 24.9% of the step more to do", "healthy", (0.4, 0.4), (70.2, 95.1), 4.5),
    Case("rank 1 has 25.1% of the step more to do", "straggler", (0.4, 0.4), (70, 95.1), 4.5),
    Case("on a machine 100 times slower", "healthy", (1, 1), (20, 20), 2, unit=0.1),
    Case("on a machine 100 times faster", "straggler", (1, 1), (20, 70), 2, unit=1e-5),
)
NOISY = (
    Case("a hiccup in one step of rank 1", "healthy", (1, 1), (20, 20), 2, hiccup=400),
    Case("8 ranks, noise of 30%, nothing wrong", "healthy", (1,) * 8, (20,) * 8, 1, steps=9,
         noise=0.3),
    Case("8 ranks, noise of 30%, rank 5 is slow", "straggler", (1,) * 8,
         (20,) * 5 + (60,) + (20,) * 2, 1, steps=9, noise=0.3),
    Case("noise of 30%, slow loaders", "loader-bound", (40,) * 3, (20,) * 3, 1, steps=9,
         noise=0.3),
)  # fmt: skip
