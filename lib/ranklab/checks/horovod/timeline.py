"""The check of timeline: is the file a trace, and does it show what happened?"""

import json
import tempfile
from collections import Counter
from pathlib import Path

import torch

from ranklab.checks.beside import expect, located
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import explain

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
SLIPS = {  # what a mistake writes for [start, end] in seconds: (ts and dur, a hint)
    "in milliseconds": (lambda start, end: (start * 1e3, (end - start) * 1e3),
                        "The format counts microseconds: seconds * 1e6."),
    "when it starts and when it ends": (lambda start, end: (start * 1e6, end * 1e6),
                                        '"dur" is how long it takes, end - start.'),
}


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
    rows, phases_of = _rows(_written(fn, events)), {tensor: [] for tensor, *_ in events}
    for tensor, *phase in events:
        phases_of[tensor].append(tuple(phase))
    expect(not events or {*rows} != {phase for _, phase, *_ in events},
           f"there is a row for each phase: {', '.join(rows)}", "A row is a tensor.")
    expect({*rows} == {*phases_of}, f"the rows are {sorted(rows)}, not {sorted(phases_of)}",
           "Each tensor has one row.")
    for tensor, phases in phases_of.items():
        _is_row(tensor, sorted(rows[tensor]), sorted(phases))


def _is_row(tensor, found, phases):
    """`found` is [(phase, ts, dur), ...], and `phases` [(phase, start, end), ...]."""
    counts, right = (Counter(phase for phase, *_ in each) for each in (found, phases))
    expect({*counts} != {tensor}, f"every phase in the row of {tensor!r} is called {tensor}",
           'The "name" of an event of kind X is its phase.')
    for phase in sorted(counts | right):
        hint = ("Write every event once." if counts[phase] > right[phase] else "A phase comes "
                "again in every step: write every event, and do not keep one for each name.")
        expect(counts[phase] == right[phase], f"in the row of {tensor!r} phase {phase} is there "
               f"{counts[phase]} times, not {right[phase]}", hint)
    for (phase, *times), (_, *both) in zip(found, phases):
        slips = {what: (torch.tensor(of(*both)), hint) for what, (of, hint) in SLIPS.items()}
        explain(f'["ts", "dur"] of {phase} in the row of {tensor!r}', torch.tensor(times).float(),
                torch.tensor([both[0] * 1e6, (both[1] - both[0]) * 1e6]), slips,
                "ts is the start and dur is end - start, both times 1e6.")


def _written(fn, events):
    """The entries of the file that fn(events, path) has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(OLD)
        fn(list(events), str(path))
        text = path.read_text()
    expect(not text.startswith(OLD), "what was in the file before is still there",
           'open(path, "w") begins anew, "a" goes on at its end.')
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
