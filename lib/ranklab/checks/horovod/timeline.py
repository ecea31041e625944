"""The check of timeline: is the file a trace, and does it show what happened?"""

import json
import tempfile
from pathlib import Path

from ranklab.checks.beside import expect, located
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted

EVENTS = [
    ("w", "NEGOTIATE", 0.25, 1.0), ("b", "NEGOTIATE", 0.5, 1.0), ("w", "ALLREDUCE", 1.0, 2.5),
    ("b", "ALLREDUCE", 1.0, 2.5), ("w", "QUEUE", 1.0, 1.25), ("b", "GLOO_ALLREDUCE", 1.25, 2.25),
    ("w", "rank 1 is ready", 0.75, 0.75), ("w", "QUEUE", 3.0, 3.5),  # the next step
]
ODD_NAMES = [(name, "QUEUE", 0.0, 1.0)
             for name in ("0.weight", "1.weight", 'layer "a"', "back\\slash", "gr\u00f6sse")]
OLD = "an older file, which is longer than the trace is. " * 200
KEPT = ("The first call was right. Is something kept from call to call, in a default argument or "
        "in a global name? Each call begins with no rows.")
KEYS = {"M": {"pid", "name", "args"}, "X": {"pid", "name", "ts", "dur"}}
SLIPS = (  # (what a mistake makes of a row that is right, what it is, a hint)
    (lambda tensor, row: [(phase, ts / 1e3, dur / 1e3) for phase, ts, dur in row], "milliseconds",
     "The format counts microseconds: seconds * 1e6."),
    (lambda tensor, row: [(phase, ts, ts + dur) for phase, ts, dur in row], "each phase's end",
     '"dur" is how long it takes, end - start.'),
    (lambda tensor, row: [(tensor, *times) for _, *times in row], "the tensor's name as phase",
     'The "name" of an event of kind X is its phase.'),
    (lambda tensor, row: {phase: (phase, *times) for phase, *times in row}.values(),
     "one event of each phase", "A phase comes again in every step: write every event."),
    (lambda tensor, row: [*row, *row], "every event twice", "Write every event once."),
)


def check_timeline(fn):
    _is_right(fn, EVENTS)
    yield "the file is JSON, with a row for each tensor, as Perfetto and chrome://tracing want it"
    with hinted({"called again: .*": KEPT}):
        located("called again", _is_right, fn, EVENTS)
    yield "every phase is in its tensor's row, from start to end, in microseconds; none is missing"
    for events in ([], ODD_NAMES, EVENTS[::-1], EVENTS * 2):
        _is_right(fn, events)
    yield "any order, no events at all, names with quotes in them"


def _is_right(fn, events):
    rows, right = _rows(_written(fn, events)), {tensor: [] for tensor, *_ in events}
    for tensor, phase, start, end in sorted(events):
        right[tensor].append((phase, start * 1e6, (end - start) * 1e6))
    expect(not events or {*rows} != {phase for _, phase, *_ in events},
           f"there is a row for each phase: {', '.join(rows)}", "A row is a tensor.")
    expect({*rows} == {*right}, f"the rows are {sorted(rows)}, not {sorted(right)}",
           "Each tensor has one row.")
    for tensor, row in right.items():
        got = _rounded(rows[tensor])
        for of, what, hint in SLIPS if got != _rounded(row) else ():
            expect(got != _rounded(of(tensor, row)), f"the row of {tensor!r} has {what}", hint)
        expect(got == _rounded(row), f"[(phase, ts, dur)] of {tensor!r} is {got}, not {row}", "ts "
               "is the start and dur is end - start, both times 1e6; every event, and once.")


def _rounded(row):
    return sorted((phase, round(ts, 3), round(dur, 3)) for phase, ts, dur in row)


def _written(fn, events):
    """The entries of the file that fn(events, path) has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(OLD)
        fn(given := list(events), str(path))
        text = path.read_text()
    expect(given == events, "the list of events is changed", "Leave it as it is.")
    expect(not text.startswith(OLD), "what was in the file before is still there",
           'open(path, "w") starts afresh, "a" goes on at its end.')
    try:
        return json.loads(text)["traceEvents"]
    except ValueError as error:
        raise Mistake(f"the file is not JSON: {error}; it begins with {text[:40]!r}",
                      "json.dump(trace, file) writes quotes, commas and escapes as they must be. "
                      "str() of a dict is Python, not JSON.") from None
    except (LookupError, TypeError):
        raise Mistake('the file has no "traceEvents"', 'Write {"traceEvents": [...]}.') from None


def _rows(trace):
    """{row's name: [(phase, ts, dur), ...]}"""
    for entry in trace:
        lacks = KEYS.get(entry.get("ph"), {"ph"}) - {*entry}
        expect(not lacks, f"{entry} lacks {', '.join(lacks)}", "The docstring has both kinds.")
    names = [(entry["pid"], entry["args"]["name"]) for entry in trace
             if (entry["ph"], entry["name"]) == ("M", "process_name")]
    name_of, rows = dict(names), {name: [] for _, name in names}
    for is_so, what, hint in (
        (len(names) == len(rows), "there are two rows of one name", "A tensor keeps its row."),
        (len(names) == len(name_of), "one row has two names", "Its number is the pid."),
        ({entry["pid"] for entry in trace} <= {*name_of}, "a row has no name", "Name it once, by "
         "an entry of kind M called process_name."),
    ):
        expect(is_so, what, hint)
    for entry in trace:
        if entry["ph"] == "X":
            rows[name_of[entry["pid"]]].append((entry["name"], entry["ts"], entry["dur"]))
    return rows
