"""The check of timeline: does a viewer understand the file, and does it show what happened?"""

import json
import tempfile
from pathlib import Path

from ranklab.checks.exercise import Mistake

EVENTS = [
    ("w", "NEGOTIATE", 0.25, 1.0), ("b", "NEGOTIATE", 0.5, 1.0), ("w", "ALLREDUCE", 1.0, 2.5),
    ("b", "ALLREDUCE", 1.0, 2.5), ("w", "QUEUE", 1.0, 1.25), ("b", "QUEUE", 1.0, 1.25),
    ("w", "GLOO_ALLREDUCE", 1.25, 2.25), ("b", "GLOO_ALLREDUCE", 1.25, 2.25),
    ("w", "rank 1 is ready", 0.75, 0.75), ("w", "QUEUE", 3.0, 3.5),  # the next step
]
OLD = "an older file, which is longer than the trace is. " * 200
KEPT = ("The first call was well. Is something kept from call to call, in a default argument or in "
        "a global name? Each call begins with no rows.")
ODD_NAMES = [('layer "a"', "QUEUE", 0.0, 1.0), ("back\\slash", "QUEUE", 0.0, 1.0),
             ("gr\u00f6sse", "QUEUE", 0.0, 1.0)]


def check_timeline(fn):
    trace = _written(fn, EVENTS)
    yield "the file is JSON, with a list of events that Perfetto and chrome://tracing open"
    rows = _rows(trace)
    _same_rows(rows, EVENTS)
    yield "one row for each tensor, with its name"
    for name, phases in rows.items():
        _same_times(name, phases, EVENTS)
    _again(fn)
    yield "every phase is in its tensor's row, from start to end, in microseconds; none is missing"
    for events in ([], ODD_NAMES, EVENTS[::-1], EVENTS * 2):
        _same_rows(_rows(_written(fn, events)), events)
    yield "any order, no events at all, names with quotes in them"


def _written(fn, events):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(OLD)
        given = list(events)
        fn(given, str(path))
        if given != list(events):
            raise Mistake("the list of events is changed", "Read it, and leave it as it is.")
        text = path.read_text() if path.exists() else OLD
        if text == OLD:
            raise Mistake("no file is written", "Open `path` for writing and json.dump into it.")
    if text.startswith(OLD):
        raise Mistake("what was in the file before is still there", 'The file holds these events, '
                      'and no others: open(path, "w") begins anew, "a" goes on at its end.')
    try:
        trace = json.loads(text)
    except ValueError as error:
        raise Mistake(f"the file is not JSON: {error}; it begins with {text[:40]!r}",
                      "json.dump(trace, file) writes quotes, commas and escapes as they must be. "
                      "str() of a dict is Python, not JSON.") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(one, dict) for one in events):
        raise Mistake("there is no list of events in the file",
                      'Write {"traceEvents": [...]}: that is where viewers look.')
    return events


def _again(fn):
    try:
        rows = _rows(_written(fn, EVENTS))
        _same_rows(rows, EVENTS)
        for name, phases in rows.items():
            _same_times(name, phases, EVENTS)
    except Mistake as mistake:
        raise Mistake(f"called again, {mistake.what}", KEPT) from None


def _rows(trace):
    """{row's name: [(phase, start, end) in us, ...]}."""
    names, phases, opened = {}, {}, {}
    for event in trace:
        row = event.get("pid"), event.get("tid")
        if event.get("ph") == "M" and "name" in event.get("args", {}):
            # Viewers look at these two only, and a process's name is that of all of its threads.
            if event.get("name") == "process_name":
                names[event.get("pid")] = event["args"]["name"]
            if event.get("name") == "thread_name":
                names[row] = event["args"]["name"]
        elif event.get("ph") == "X":
            if "ts" not in event or "dur" not in event:
                raise Mistake(f"an event of kind X lacks {'dur' if 'ts' in event else 'ts'}",
                              'A whole phase is {"ph": "X", "name", "pid", "tid", "ts", "dur"}.')
            phases.setdefault(row, []).append(
                (event.get("name"), event["ts"], event["ts"] + event["dur"]))
        elif event.get("ph") == "B":
            opened.setdefault(row, []).append((event.get("name"), event["ts"]))
        elif event.get("ph") == "E" and opened.get(row):
            phases.setdefault(row, []).append((*opened[row].pop(), event["ts"]))
    nameless = [row for row in phases if row not in names and row[0] not in names]
    if nameless:
        raise Mistake("a row has no name, so nobody knows which tensor it is",
                      'Name it once: {"ph": "M", "name": "process_name", "pid": row, '
                      '"args": {"name": tensor}}.')
    rows = {}
    for row, found in phases.items():
        name = names.get(row, names.get(row[0]))
        if name in rows:
            raise Mistake(f"there are two rows named {name!r}",
                          "A tensor keeps its row: look it up, and begin one only for a new name.")
        rows[name] = found
    return rows


def _same_rows(rows, events):
    tensors = {tensor for tensor, *_ in events}
    if set(rows) == tensors:
        return
    if set(rows) == {phase for _, phase, *_ in events}:
        raise Mistake(f"there is a row for each phase: {', '.join(sorted(rows))}",
                      "A row is a tensor. Phases are what happens in it, one after the other.")
    missing = tensors - set(rows)
    raise Mistake(f"the rows are {sorted(map(str, rows))}, not {sorted(tensors)}",
                  f"{sorted(missing)[0]!r} has none." if missing else "Each tensor has one row.")


def _same_times(name, phases, events):
    wanted = {}
    for tensor, phase, start, end in events:
        if tensor == name:
            wanted.setdefault(phase, []).append((start * 1e6, end * 1e6))
    for phase, right in wanted.items():
        found = sorted((a, b) for what, a, b in phases if what == phase)
        if len(found) != len(right):
            raise _wrong_count(name, phase, len(found), len(right), {what for what, *_ in phases})
        for a_and_b, times in zip(found, sorted(right)):
            _one_phase(f"{phase} of {name!r}", *a_and_b, *times)


def _wrong_count(name, phase, found, right, phases):
    if phases == {name}:
        return Mistake(f"every phase in the row of {name!r} is called {name}",
                       'The "name" of an event of kind X is its phase; the tensor\'s name is the '
                       "row's.")
    if not found:
        return Mistake(f"the row of {name!r} has no phase {phase}", "Write every event.")
    what = f"the row of {name!r} has phase {phase} {found} times, not {right}"
    if found < right:
        return Mistake(what, "A phase comes again in every step: write every event, and do not "
                             "keep one for each name.")
    return Mistake(what, "Write every event once.")


def _one_phase(phase, a, b, start, end):
    if max(abs(a - start), abs(b - end)) < 1:
        return
    what = f"{phase} goes from {a:g} to {b:g}, not from {start:g} to {end:g}"
    if abs(a - start * 1e-3) < 1e-3 or abs(a - start * 1e-6) < 1e-6:
        raise Mistake(what, "The format counts microseconds: seconds * 1e6.")
    if abs(a - start) < 1 and abs(b - a - end) < 1:
        raise Mistake(what, '"dur" is how long it takes, end - start; not when it ends.')
    raise Mistake(what, '"ts" is the start and "dur" is end - start, both times 1e6.')
