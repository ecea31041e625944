"""The check of diagnose, on timelines that are made up: causes and numbers are known exactly."""

import math
import random
from dataclasses import dataclass
from statistics import median

from ranklab.course.exercise import Mistake
from ranklab.meter import Event

NAMES = ("loader-bound", "communication-bound", "straggler")


@dataclass(frozen=True)
class Case:
    """A job: of each rank the ms it loads and computes in a step, and the ms of a transfer that
    follow when the last rank is ready. Transfers begin `hidden` ms before a rank is ready."""

    name: str
    verdict: str
    loads: tuple
    computes: tuple
    transfer: float
    hidden: float = 2.0
    steps: int = 5
    hiccup: tuple = ()  # (rank, ms that its third step computes longer)
    noise: float = 0.0
    unit: float = 1e-3  # seconds

    def ranks(self):
        return range(len(self.loads))

    def drawn(self):
        """[(ms of loading, of computing) of each rank] of each step."""
        draw, all_steps = random.Random(1), []
        for step in range(self.steps):
            longer = [self.hiccup[1] if step == 2 and self.hiccup[:1] == (rank,) else 0
                      for rank in self.ranks()]
            all_steps.append([(load * (1 + self.noise * draw.random()),
                               compute * (1 + self.noise * draw.random()) + more)
                              for load, compute, more in zip(self.loads, self.computes, longer)])
        return all_steps

    def timelines(self):
        """[[Event] of each rank], with a loader event at the end, as a DataLoader leaves it."""
        events, now = [[] for _ in self.ranks()], 0.0
        for step in self.drawn():
            ready = [now + load + compute for load, compute in step]
            end = max(ready) + self.transfer
            for of_rank, (load, _), done in zip(events, step, ready):
                middle = (now + load + done) / 2
                for kind, a, b, lane in (
                        ("loader", now, now + load, "main"),
                        ("compute", now + load, middle, "main"),
                        ("compute", middle, done, "backward 1"),
                        ("communication", done - self.hidden, end - 0.1, "gloo 1"),
                        ("communication", done - self.hidden / 2, end, "gloo 2"),
                        ("wait", done, end, "main")):
                    of_rank.append(Event(kind, kind, 5 + a * self.unit, 5 + b * self.unit, lane))
            now = end
        for of_rank in events:
            last = 5 + now * self.unit
            of_rank.append(Event("loader", "loader", last, last + 1e-6, "main"))
        return events

    def usual(self):
        """Of each rank's median step, in ms: (loading, computing, exposed); and the length."""
        steps = self.drawn()
        ends = [max(sum(both) for both in step) + self.transfer for step in steps]
        of_ranks = [(median(step[r][0] for step in steps), median(step[r][1] for step in steps),
                     median(end - sum(step[r]) for end, step in zip(ends, steps)))
                    for r in self.ranks()]
        return of_ranks, median(ends)

    def shares(self):
        """The oracle, from the numbers that the timelines are made of."""
        of_ranks, length = self.usual()
        loads, _, bare = zip(*of_ranks)
        works = [load + compute for load, compute, _ in of_ranks]
        numbers = sum(loads) / len(loads), min(bare), more_than_others(works)
        return {name: number / length for name, number in zip(NAMES, numbers)}

    def straggler_of_sums(self):
        """The straggler's share from medians of loading + computing, not from their two medians:
        as good an answer, and with noise another number."""
        steps = self.drawn()
        works = [median(sum(step[rank]) for step in steps) for rank in self.ranks()]
        return more_than_others(works) / self.usual()[1]


def more_than_others(works):
    """What the busiest has more than the mean of the others; 0 where there are none."""
    if len(works) < 2:
        return 0.0
    return max(works) - (sum(works) - max(works)) / (len(works) - 1)


CLEAR = (
    Case("nothing is wrong", "healthy", (1, 1), (20, 20), 2),
    Case("all ranks load long", "loader-bound", (30, 28, 29), (20, 20, 20), 2),
    Case("transfers are long", "communication-bound", (1, 1, 1, 1), (20,) * 4, 25),
    Case("rank 2 computes longer", "straggler", (1, 1, 1), (20, 20, 70), 2),
    Case("rank 0 loads longer than the others", "straggler", (60, 1, 1, 1), (20,) * 4, 2),
    Case("all of a long transfer is hidden", "healthy", (1, 1), (40, 40), 2, hidden=38),
)
ODD = (
    Case("one rank alone", "healthy", (1,), (20,), 0.5),
    Case("one rank alone, which loads long", "loader-bound", (30,), (20,), 0.5),
    Case("24% of the step is transfer", "healthy", (1, 1), (18, 18), 6),
    Case("26% of the step is transfer", "communication-bound", (1, 1), (16.8, 16.8), 6.25),
    Case("on a machine 100 times slower", "healthy", (1, 1), (20, 20), 2, unit=0.1),
    Case("on a machine 100 times faster", "straggler", (1, 1), (20, 70), 2, unit=1e-5),
)
NOISY = (
    Case("a hiccup in one step of rank 1", "healthy", (1, 1), (20, 20), 2, hiccup=(1, 400)),
    Case("8 ranks, noise of 30%, nothing wrong", "healthy", (1,) * 8, (20,) * 8, 1, steps=9,
         noise=0.3),
    Case("8 ranks, noise of 30%, rank 5 is slow", "straggler", (1,) * 8,
         (20,) * 5 + (60,) + (20,) * 2, 1, steps=9, noise=0.3),
    Case("noise of 30%, slow loaders", "loader-bound", (40,) * 3, (20,) * 3, 1, steps=9,
         noise=0.3),
)  # fmt: skip


def check_diagnose(fn):
    for case in CLEAR:
        _compare(fn, case)
    yield "each cause is named; a hidden transfer is none, and neither is waiting for a straggler"
    for case in ODD:
        _compare(fn, case)
    yield "one rank alone; just below and above a quarter; fast and slow machines alike"
    for case in NOISY:
        _compare(fn, case)
    yield "a hiccup in one step, or noise of 30%, changes no verdict"


def _compare(fn, case):
    timelines = case.timelines()
    given = [list(events) for events in timelines]
    try:
        result = fn(timelines)
    except ZeroDivisionError:
        raise Mistake(f"{case.name}: a division by zero",
                      "With one rank there are no others: its straggler share is 0.") from None
    if timelines != given:
        raise Mistake("the timelines are changed", "Make new lists; steps_of does.")
    shares = _result(result)
    right = _nearest(case, shares)
    verdict = result[0]
    numbers = ", ".join(f"{name} {shares[name]:.2f}" for name in NAMES)
    wanted = ", ".join(f"{name} {right[name]:.2f}" for name in NAMES)
    if verdict != case.verdict:
        raise Mistake(f"{case.name}: the verdict is {verdict}, not {case.verdict}\n"
                      f"shares: {numbers}\nright:  {wanted}", _hint(case, shares, right, verdict))
    for name in NAMES:
        if not math.isclose(shares[name], right[name], rel_tol=1e-4, abs_tol=1e-4):
            raise Mistake(f"{case.name}: the verdict is right, but the share of {name} is "
                          f"{right[name]:.3f}, not {shares[name]:.3f}",
                          _hint(case, shares, right, verdict))


def _nearest(case, shares):
    """The right shares; of the two right ones of a straggler the nearer."""
    right = case.shares()
    both = right["straggler"], case.straggler_of_sums()
    return {**right, "straggler": min(both, key=lambda x: abs(x - shares["straggler"]))}


def _result(result):
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise Mistake(f"it returns {str(result)[:60]}, not a verdict and its shares",
                      "Return (verdict, shares): a string, and a dict of three numbers.")
    if set(result[1]) != set(NAMES):
        raise Mistake(f"the shares are called {', '.join(map(str, result[1]))}",
                      f"They are {', '.join(NAMES)}.")
    return result[1]


def _hint(case, shares, right, verdict):
    def is_near(name, value):
        return math.isclose(shares[name], value, rel_tol=1e-3, abs_tol=1e-4)

    off = [name for name in NAMES if not is_near(name, right[name])]
    if not off and case.verdict == "healthy":
        return "The shares are right. Below a quarter there is no culprit: the verdict is healthy."
    if not off:
        return "The shares are right: the verdict is the largest of them, from a quarter on."
    if case.hiccup or case.noise:
        return ("Take of each rank its median step: steps_of cuts the timeline, median() of what "
                "you measure in each step forgets the one that went wrong.")
    of_ranks, length = case.usual()
    if all(is_near(name, right[name] * length * case.unit) for name in off):
        return "Shares, not seconds: divide by the length of a step."
    if all(is_near(name, right[name] / case.steps) for name in off):
        return "Shares of one step: you divide by the length of all of them."
    return HINTS[off[0]](shares[off[0]] * length, of_ranks)


def _hint_loader(got, of_ranks):
    return "Loader: the mean over ranks of loading that no computing hides, over the step."


def _hint_communication(got, of_ranks):
    bare = [exposed for *_, exposed in of_ranks]
    for value in (max(bare), sum(bare) / len(bare)):
        if math.isclose(got, value, rel_tol=1e-3):
            return ("Ranks that are ready early only wait for the last one, inside their "
                    "all-reduce. The rank that has least exposed communication shows what "
                    "transfers cost: min over the ranks.")
    if got > min(bare):
        return ("Not all communication counts, but what no computing hides: "
                "exposed_communication(step).")
    return "Communication: the least exposed_communication of all ranks, over the step."


def _hint_straggler(got, of_ranks):
    computing = more_than_others([compute for _, compute, _ in of_ranks])
    if math.isclose(got, computing, rel_tol=1e-3, abs_tol=1e-3):
        return "A rank works when it computes or loads: compare the two together."
    return ("Straggler: the busiest rank's computing and loading, less the mean of the *other* "
            "ranks', over the length of a step. 0 for one rank.")


HINTS = dict(zip(NAMES, (_hint_loader, _hint_communication, _hint_straggler)))
