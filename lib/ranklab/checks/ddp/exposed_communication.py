"""The check of exposed_communication, against a count of whole milliseconds, one by one."""

import random

from ranklab.checks.ddp.calls import called
from ranklab.checks.trial import explain
from ranklab.meter import Event


def event(kind, start, end, lane="main"):
    return Event(kind, kind, start, end, lane)


def exposed_by_hand(events, kind):
    """The oracle: ticks in which `kind` runs and nothing is computed."""
    running = [{e.kind for e in events if e.start <= tick < e.end} for tick in range(200)]
    return sum(kind in kinds and "compute" not in kinds for kinds in running)


WORK, SEND = event("compute", 10, 20), event("communication", 15, 40, "gloo 1")
CASES = {  # what is seen, and the events, in ms
    "a transfer that begins inside a kernel and ends after it": [WORK, SEND],
    "two transfers at the same time": [WORK, SEND, event("communication", 18, 30, "gloo 2")],
    "a kernel inside another one": [event("compute", 0, 30), event("compute", 5, 10, "b"), SEND],
    "the main thread waits meanwhile": [event("wait", 20, 40), WORK, SEND],
    "a batch is loaded meanwhile": [event("loader", 22, 28), WORK, SEND],
    "computing on another lane": [event("compute", 16, 39, "stream 7"), SEND],
}
MUCH = "Too much: some moments count twice, or a kernel is forgotten."
LITTLE = "Too little: a kernel that ends inside a longer one does not end the computing."
CLOCK = ("Times are any numbers: go from one edge to the next, not from tick to tick, and keep "
         "all digits: Python's floats have enough, float32 has not.")
OTHER_KINDS = {"KeyError: '(compute|communication|loader|wait)'": "Other kinds are not counted: "
               "`if what in running`. And don't call the loop variable `kind`: that is the "
               "argument."}


def check_exposed_communication(fn):
    for name, events in CASES.items():
        _compare(fn, name, events)
    yield "overlapping and nested events count once; only computing hides, on any lane"
    for seed in range(20):
        for kind in ("communication", "loader"):
            _compare(fn, f"random events, seed {seed}", _random(seed), kind)
    yield 'right for 20 random timelines, in any order; for kind="loader" as well'
    for seed in range(20, 24):
        _compare(fn, f"a clock that began long ago, seed {seed}", _random(seed), tick=1.37e-5,
                 offset=100.0)
    yield "on any clock: it need not begin at 0, nor tick in milliseconds"


def _random(seed):
    draw = random.Random(seed)
    kinds = draw.choices(("compute", "communication", "communication", "loader", "wait"), k=30)
    starts = [draw.randrange(180) for _ in kinds]
    return [event(kind, start, start + draw.randrange(1, 20), f"lane {start % 3}")
            for kind, start in zip(kinds, starts)]


def _compare(fn, name, events, kind="communication", tick=1e-3, offset=0.0):
    def renamed(kinds, new):
        return exposed_by_hand([e._replace(kind=new) if e.kind in kinds else e for e in events],
                               kind)

    given = {"events": [e._replace(start=offset + tick * e.start, end=offset + tick * e.end)
                        for e in events]}
    options = {} if kind == "communication" else {"kind": kind}
    got = round(called(name, OTHER_KINDS, fn, given, **options) / tick, 3)
    right = exposed_by_hand(events, kind)
    on_main = [e for e in events if e.kind != "compute" or e.lane == "main"]
    whole, hiding = (sum(e.end - e.start for e in events if e.kind == what)
                     for what in (kind, "compute"))
    others = {"wait", "loader", "communication"} - {kind}
    explain(f"{name}: exposed {kind}, in {'ticks' if offset else 'ms'},", got, right, {
        "counted without other lanes": (exposed_by_hand(on_main, kind), "Computing on other lanes "
                                        "hides as well: streams, backward's thread."),
        "1000 times what is right": (1000 * right, "Those are milliseconds; return seconds."),
        "all of it": (whole, "Leave out the time in which a compute event runs, on any lane."),
        "the difference of two sums": (max(0, whole - hiding), "A kernel hides what runs with it."),
        "as if waiting and loading hid it": (renamed({"wait", "loader"} - {kind}, "compute"),
                                             "Waiting and loading don't count as computing."),
        "exposed communication": (exposed_by_hand(events, "communication"), "`kind` says which "
                                  "events to look for."),
    } | {f"with {other} events counted as well": (renamed({other}, kind), "")
         for other in sorted(others)}, CLOCK if offset else MUCH if got > right else LITTLE)
