"""exposed_communication, compared with a sum over all pairs of neighbouring moments."""

import random
from typing import NamedTuple

import torch

from ranklab.checks.prover import Must, Proof, Slip, Stage, Told
from ranklab.ddp import exposed_communication
from ranklab.meter import Event


def event(kind, start, end, lane="main"):
    return Event(kind, kind, start, end, lane)


class Events(NamedTuple):
    """Events at whole ticks; a tick's seconds and the clock's start are given."""

    name: str
    events: list
    kind: str = "communication"
    tick: float = 1e-3
    offset: float = 0.0

    def __str__(self):
        return self.name + ', kind="loader"' * (self.kind == "loader")


def _see(fn, case):
    events = [each._replace(start=case.offset + case.tick * each.start,
                            end=case.offset + case.tick * each.end) for each in case.events]
    before, unit = list(events), "ticks" if case.offset else "ms"
    seconds = fn(events, **({} if case.kind == "communication" else {"kind": case.kind}))
    is_number = isinstance(seconds, int | float)
    yield {f"the exposed {case.kind}": Told(
        round(seconds / case.tick, 3) if is_number else seconds, lambda got, due: (
            f"{got:.9g} {unit}, not {due:.9g}" if isinstance(got, float) else "")),
           "whether `events` is as before": Must(events == before, True)}


def by_gaps(events, kind="communication"):
    times = sorted({time for each in events for time in (each.start, each.end)})
    total = 0.0
    for start, end in zip(times, times[1:]):
        kinds = {each.kind for each in events if each.start <= start and end <= each.end}
        total += (end - start) * (kind in kinds and "compute" not in kinds)
    return total


WORK, SEND = event("compute", 10, 20), event("communication", 15, 40, "gloo 1")
BY_HAND = tuple(Events(name, events) for name, events in {
    "a transfer that begins inside a kernel and ends after it": [WORK, SEND],
    "the main thread waits meanwhile": [event("wait", 20, 40), WORK, SEND],
    "a batch is loaded meanwhile": [event("loader", 22, 28), WORK, SEND],
    "two transfers at the same time": [WORK, SEND, event("communication", 18, 30, "gloo 2")],
    "a kernel inside another one": [event("compute", 0, 30), event("compute", 5, 10, "b"), SEND],
    "computing on another lane": [event("compute", 16, 39, "stream 7"), SEND],
}.items())


def _random(seed):
    draw = random.Random(seed)
    kinds = draw.choices(("compute", "communication", "communication", "loader", "wait"), k=30)
    starts = [draw.randrange(180) for _ in kinds]
    return [event(kind, start, start + draw.randrange(1, 20), f"lane {start % 3}")
            for kind, start in zip(kinds, starts)]


def difference_of_sums(events, kind="communication"):
    both = [sum(e.end - e.start for e in events if e.kind == k) for k in (kind, "compute")]
    return max(0.0, both[0] - both[1])


def tick_by_tick(events, kind="communication"):
    ticks = range(*(round(1000 * time) for time in (min(e.start for e in events),
                                                    max(e.end for e in events))))
    sets = [{e.kind for e in events if e.start <= (t + 0.5) / 1000 < e.end} for t in ticks]
    return sum(kind in kinds and "compute" not in kinds for kinds in sets) / 1000


BARE, EVENTS = 'running[kind] and not running["compute"]', "for event in events\n"
ADDS = f"        if {BARE}:\n            exposed += time - last_time\n"
MOVES = "        last_time = time\n"
COUNTS = "        if edge_kind in running:\n            running[edge_kind] += change\n"
EXPOSED = Proof(
    exposed_communication,
    Stage("overlapping and nested events count once; only computing hides, on any lane", _see,
          BY_HAND, oracle=by_gaps),
    Stage('right for 20 random timelines, in any order; for kind="loader" as well', _see,
          tuple(Events(f"random events, seed {seed}", _random(seed), kind) for seed in range(20)
                for kind in ("communication", "loader")), oracle=by_gaps),
    Stage("on any clock: it need not begin at 0, nor tick in milliseconds", _see,
          tuple(Events(f"a clock that began long ago, seed {seed}", _random(seed), tick=1.37e-5,
                       offset=100.0) for seed in range(20, 24)), oracle=by_gaps),
    mistakes=(
        Slip("Don't count time in which a compute event runs on any lane.",
             (BARE, "running[kind]")),
        Slip("That is the hidden part, which overlaps with computing. Exposed time is the rest.",
             (BARE, 'running[kind] and running["compute"]')),
        Slip("Both conditions must hold: an event of `kind` is running, and no compute event is.",
             (BARE, 'running[kind] or not running["compute"]'), (BARE, 'not running["compute"]')),
        Slip("Computing on any lane counts, including streams and backward's thread.",
             (EVENTS, 'for event in events if event.lane == "main" or event.kind == kind\n')),
        Slip("Where two transfers overlap, count the time once, not once per transfer.",
             ("+= time - last_time", "+= running[kind] * (time - last_time)")),
        Slip("When two transfers or kernels overlap, the first end does not end both: count how "
             "many are running.",
             ("running[edge_kind] += change", "running[edge_kind] = change > 0")),
        Slip("First add the time up to this edge, then count what begins or ends there.",
             (ADDS + MOVES + COUNTS, COUNTS + ADDS + MOVES)),
        Slip("Update last_time at every edge, even where no time is added and at edges of other "
             "kinds.", (MOVES + COUNTS, f"{COUNTS}            last_time = time\n"),
             (ADDS + MOVES, f"{ADDS}            last_time = time\n"),
             (MOVES, "")),
        Slip("Loading is not communication: count only events of `kind`.",
             (COUNTS, '        if edge_kind != "wait":\n            running[kind if edge_kind == '
                      '"loader" else edge_kind] += change\n')),
        Slip("Waiting is not communication: count only events of `kind`.",
             (COUNTS, '        if edge_kind in running or edge_kind == "wait":\n            '
                      'running[kind if edge_kind == "wait" else edge_kind] += change\n')),
        Slip("Waiting and loading don't count as computing.",
             (COUNTS, '        running[edge_kind if edge_kind == kind else "compute"] += '
                      "change\n")),
        Slip("`kind` says which events to look for.",
             ("edges =", 'kind = "communication"\n    edges =')),
        Slip("Those are milliseconds; return seconds.",
             ("return exposed", "return 1000 * exposed")),
        Slip("Return the seconds.", ("return exposed", "exposed")),
        Slip("Keep all digits: Python's floats are precise enough, float32 is not.",
             ("time - last_time", "float(torch.tensor(time) - torch.tensor(last_time))"),
             torch=torch),
        Slip("Times can be any numbers: go from one edge to the next, not from tick to tick.",
             tick_by_tick),
        Slip("Do not round: times can be any numbers.",
             ("return exposed", "return round(exposed, 3)")),
        Slip("You subtract one sum from another, but a kernel hides only what runs at the same "
             "time.",
             difference_of_sums),
        Slip("`events` belongs to the caller: sort a copy with sorted(events).",
             ("    edges =", "    events.sort(key=lambda event: event.start)\n    edges =")),
    ), hints=(
        "Walk along the time axis and keep count of what is running. Things change only where an "
        "event starts or ends.",
        "Sort all starts (+1) and ends (-1) by time. Between two neighbours, if at least one "
        "transfer and no computing is running, add the time between them.",
        "edges = sorted((time, change, event.kind) for event in events for time, change in "
        "((event.start, 1), (event.end, -1))); running = {kind: 0, 'compute': 0}; for each edge: "
        "first add time - last_time if running[kind] and not running['compute'], then count.",
    ))
