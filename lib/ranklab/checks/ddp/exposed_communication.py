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
    "nothing is computed meanwhile": [SEND],
    "a transfer inside one long kernel": [event("compute", 0, 90), SEND],
    "a transfer that begins inside a kernel and ends after it": [WORK, SEND],
    "no transfer at all": [WORK, event("loader", 20, 30)],
    "no events": [],
    "two kernels in a transfer": [SEND, event("compute", 17, 22), event("compute", 30, 33)],
    "two transfers at the same time": [WORK, SEND, event("communication", 18, 30, "gloo 2")],
    "a kernel inside another one": [event("compute", 0, 30), event("compute", 5, 10, "b"), SEND],
    "kernels on two lanes at the same time": [WORK, event("compute", 12, 19, "backward 1"), SEND],
    "the main thread waits meanwhile": [event("wait", 20, 40), WORK, SEND],
    "a batch is loaded meanwhile": [event("loader", 22, 28), WORK, SEND],
    "computing on another lane": [event("compute", 16, 39, "stream 7"), SEND],
}
WALK = ("Go from edge to edge, and count what runs: a moment counts when transfers run, one or "
        "more, and kernels none.")
CLOCK = ("Times are any numbers: go from one edge to the next, not from tick to tick, and keep "
         "all digits: Python's floats have enough, float32 has not.")
DIFFERENCE = "It says nothing about when: a kernel hides only what runs at the same moment."
OTHER_KINDS = {"KeyError: '(compute|communication|loader|wait)'": "Other kinds are not counted: "
               "`if what in running`. And do not call the loop's variable kind."}


def check_exposed_communication(fn):
    for name, events in CASES.items():
        _compare(fn, name, events)
    yield "right for hidden, half hidden and bare transfers; 0 where there is none"
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
    draw, events = random.Random(seed), []
    for _ in range(30):
        start = draw.randrange(180)
        kind = draw.choice(("compute", "communication", "communication", "loader", "wait"))
        events.append(event(kind, start, start + draw.randrange(1, 20), f"lane {start % 3}"))
    return events


def _compare(fn, name, events, kind="communication", tick=1e-3, offset=0.0):
    given = {"events": [e._replace(start=offset + tick * e.start, end=offset + tick * e.end)
                        for e in events]}
    options = {} if kind == "communication" else {"kind": kind}
    got = round(called(name, OTHER_KINDS, fn, given, **options) / tick, 3)
    right = exposed_by_hand(events, kind)
    hint = "Too much: some moments count twice, or a kernel is forgotten." if got > right else \
        "Too little: a kernel that ends inside a longer one does not end the computing."
    explain(f"{name}: exposed {kind}, in {'ticks' if offset else 'ms'},", got, right,
            _slips(right, events, kind), CLOCK if offset else f"{hint} {WALK}")


def _slips(right, events, kind):
    def renamed(kinds, new):
        return exposed_by_hand([e._replace(kind=new) if e.kind in kinds else e for e in events],
                               kind)

    on_main = [e for e in events if e.kind != "compute" or e.lane == "main"]
    whole, hiding = (sum(e.end - e.start for e in events if e.kind == what)
                     for what in (kind, "compute"))
    slips = {
        "counted without other lanes": (exposed_by_hand(on_main, kind), "Computing on other lanes "
                                        "hides as well: streams, backward's thread."),
        "1000 times right": (1000 * right, "Those are milliseconds; seconds are asked."),
        "all of it": (whole, "Leave out the time in which a compute event runs, on whatever lane; "
                      "and where two overlap, count the time once."),
        "the difference of two sums": (whole - hiding, DIFFERENCE),
        "the difference of two sums, or 0": (max(0, whole - hiding), DIFFERENCE),
        "as if waiting and loading hid it": (
            renamed({"wait", "loader"} - {kind}, "compute"), "Waiting and loading are no "
            "computing: the wait is the very time that one would like to get rid of."),
        "exposed communication": (exposed_by_hand(events, "communication"), "`kind` says which "
                                  "events to look for; it is not always communication."),
    }
    others = {"wait", "loader", "communication"} - {kind}
    return slips | {f"with {other} events counted as well": (renamed({other}, kind), "")
                    for other in sorted(others)}
