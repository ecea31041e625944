"""The check of exposed_communication, against a count of whole milliseconds, one by one."""

import math
import random

from ranklab.checks.exercise import Mistake
from ranklab.meter import Event

MS = 1e-3


def event(kind, start, end, lane="main"):
    return Event(kind, kind, start * MS, end * MS, lane)


def exposed_by_hand(events, kind):
    """The oracle: milliseconds in which `kind` runs and nothing is computed."""
    count = 0
    for t in range(200):
        running = {e.kind for e in events if e.start < (t + 0.5) * MS < e.end}
        count += kind in running and "compute" not in running
    return count * MS


WORK, SEND = event("compute", 10, 20), event("communication", 15, 40, "gloo 1")
CASES = (  # what is seen, and the events
    ("nothing is computed meanwhile", [SEND]),
    ("a transfer inside one long kernel", [event("compute", 0, 90), SEND]),
    ("a transfer that begins inside a kernel and ends after it", [WORK, SEND]),
    ("no transfer at all", [WORK, event("loader", 20, 30)]),
    ("no events", []),
    ("a transfer with two kernels in it", [SEND, event("compute", 17, 22),
                                           event("compute", 30, 33)]),
    ("two transfers at the same time", [WORK, SEND, event("communication", 18, 30, "gloo 2")]),
    ("a kernel inside another one", [event("compute", 0, 30), event("compute", 5, 10, "stream 7"),
                                     SEND]),
    ("kernels on two lanes at the same time", [WORK, event("compute", 12, 19, "backward 1"), SEND]),
    ("the main thread waits meanwhile", [event("wait", 20, 40), WORK, SEND]),
    ("a batch is loaded meanwhile", [event("loader", 22, 28), WORK, SEND]),
    ("computing on another lane", [event("compute", 16, 39, "stream 7"), SEND]),
)  # fmt: skip
WALK = ("Go through all starts and ends in order of time, and keep count of what runs: a moment "
        "counts when transfers run, one or more, and kernels none.")


def check_exposed_communication(fn):
    for name, events in CASES[:5]:
        _compare(fn, name, events)
    yield "right for hidden, half hidden and bare transfers; 0 where there is none"
    for name, events in CASES[5:]:
        _compare(fn, name, events)
    yield "overlapping and nested events count once; only computing hides, on any lane"
    for seed in range(20):
        for kind in ("communication", "loader"):
            _compare(fn, f"random events, seed {seed}", _random(seed), kind)
    yield 'right for 20 random timelines, in any order; for kind="loader" as well'
    for seed in range(20, 24):
        _compare(fn, f"microseconds on a clock that began long ago, seed {seed}", _random(seed),
                 scale=0.0137, offset=1000.0)
    yield "on any clock: it need not begin at 0, nor tick in milliseconds"


def _random(seed):
    draw, events = random.Random(seed), []
    for _ in range(30):
        start = draw.randrange(180)
        kind = draw.choice(("compute", "communication", "communication", "loader", "wait"))
        events.append(event(kind, start, start + draw.randrange(1, 20), f"lane {start % 3}"))
    return events


def _compare(fn, name, events, kind="communication", scale=1, offset=0):
    given = [e._replace(start=offset + scale * e.start, end=offset + scale * e.end)
             for e in events]  # fmt: skip
    before = list(given)
    try:
        got = fn(given) if kind == "communication" else fn(given, kind=kind)
    except KeyError as error:
        if error.args[0] not in {event.kind for event in events}:
            raise
        raise Mistake(f"{name}: it raised KeyError: {error}, a kind of event",
                      "Other kinds are not counted: `if what in running`. And do not call the "
                      "loop's variable kind: it would overwrite the parameter.") from None
    if given != before:
        raise Mistake("the list of events is changed", "sorted(events) makes a new list.")
    if not isinstance(got, (int, float)):
        raise Mistake(f"it returns {got!r}, not seconds", "Return one number.")
    right = scale * exposed_by_hand(events, kind)
    if math.isclose(got, right, abs_tol=1e-8 if offset else 1e-9):
        return
    hint = ("Times are any numbers: go from one edge to the next, whatever lies between, and not "
            "from tick to tick.")
    raise Mistake(f"{name}: {got / MS:g} ms of {kind} are exposed, it says, but it is "
                  f"{right / MS:g} ms", hint if offset else _hint(got, right, events, kind))


def _hint(got, right, events, kind):
    if abs(got - right) < 0.01 * MS:
        return "Nearly: keep all digits. Python's floats have enough, float32 has not."
    for value, hint in _slips(right, events, kind):
        if math.isclose(got, value, abs_tol=1e-9):
            return hint
    if got > right:
        return f"Too much: some moments count twice, or a kernel is forgotten. {WALK}"
    return f"Too little: a kernel that ends inside a longer one does not end the computing. {WALK}"


def _slips(right, events, kind):
    """(what a usual mistake gets, a hint about it)."""

    def renamed(kinds, new):
        return exposed_by_hand([e._replace(kind=new) if e.kind in kinds else e for e in events],
                               kind)

    on_main = [e for e in events if e.kind != "compute" or e.lane == "main"]
    whole, hiding = (sum(e.end - e.start for e in events if e.kind == what)
                     for what in (kind, "compute"))
    difference = ("The difference of two sums says nothing about when: a kernel hides only what "
                  "runs at the same moment.")
    another = f"Another kind of event is counted as well: only {kind!r} is asked."
    return (
        (exposed_by_hand(on_main, kind),
         "Computing on other lanes hides as well: streams, backward's thread."),
        (1000 * right, "Those are milliseconds; seconds are asked, as the events have them."),
        (whole, "That is all of it. Leave out the time in which a compute event runs, on whatever "
                "lane; and where two overlap, count the time once."),
        (whole - hiding, difference),
        (max(0, whole - hiding), difference),
        (renamed({"wait", "loader"} - {kind}, "compute"),
         "Waiting and loading are no computing: they hide nothing. The wait is the very time that "
         "one would like to get rid of."),
        *((renamed({other}, kind), another) for other in ("wait", "loader", "communication")),
        (exposed_by_hand(events, "communication"),
         "`kind` says which events to look for; it is not always communication."),
    )
