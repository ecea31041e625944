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
ODD_NAMES = [(name, "QUEUE", 0.0, 1.0) for name in ('layer "a"', "back\\slash", "gr\u00f6sse")]


def check_timeline(fn):
    trace = _written(fn, EVENTS)
    yield "the file is JSON, with a list of events that Perfetto and chrome://tracing open"
    rows = _rows(trace, EVENTS)
    yield "one row for each tensor, with its name"
    _same_times(rows)
    try:
        _same_times(_rows(_written(fn, EVENTS), EVENTS))
    except Mistake as mistake:
        raise Mistake(f"called again, {mistake.what}", KEPT) from None
    yield "every phase is in its tensor's row, from start to end, in microseconds; none is missing"
    for events in ([], ODD_NAMES, EVENTS[::-1], EVENTS * 2):
        _rows(_written(fn, events), events)
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


def _rows(trace, events):
    """{tensor: [(phase, start, end) in us, ...]}: one row for each tensor of `events`."""
    names, phases = _names(trace), _phases(trace)
    rows = {}
    for row, found in phases.items():
        # Viewers look at these two only, and a process's name is that of all of its threads.
        name = names.get(row, names.get(row[0]))
        if name is None:
            raise Mistake("a row has no name, so nobody knows which tensor it is",
                          'Name it once: {"ph": "M", "name": "process_name", "pid": row, '
                          '"args": {"name": tensor}}.')
        if name in rows:
            raise Mistake(f"there are two rows named {name!r}",
                          "A tensor keeps its row: look it up, and begin one only for a new name.")
        rows[name] = found
    tensors = {tensor for tensor, *_ in events}
    if set(rows) == tensors:
        return rows
    if set(rows) == {phase for _, phase, *_ in events}:
        raise Mistake(f"there is a row for each phase: {', '.join(sorted(rows))}",
                      "A row is a tensor. Phases are what happens in it, one after the other.")
    missing = sorted(tensors - set(rows))
    raise Mistake(f"the rows are {sorted(map(str, rows))}, not {sorted(tensors)}",
                  f"{missing[0]!r} has none." if missing else "Each tensor has one row.")


def _names(trace):
    """{(pid, tid) of a thread, or pid of a process: its name}."""
    names = {}
    for event in trace:
        if event.get("ph") == "M" and "name" in event.get("args", {}):
            if event.get("name") == "process_name":
                names[event.get("pid")] = event["args"]["name"]
            if event.get("name") == "thread_name":
                names[event.get("pid"), event.get("tid")] = event["args"]["name"]
    return names


def _phases(trace):
    """{(pid, tid): [(phase, start, end) in us, ...]}, of events of kind X, or B and E."""
    phases, opened = {}, {}
    for event in trace:
        row, kind = (event.get("pid"), event.get("tid")), event.get("ph")
        if kind == "X":
            if "ts" not in event or "dur" not in event:
                raise Mistake(f"an event of kind X lacks {'dur' if 'ts' in event else 'ts'}",
                              'A whole phase is {"ph": "X", "name", "pid", "tid", "ts", "dur"}.')
            phases.setdefault(row, []).append(
                (event.get("name"), event["ts"], event["ts"] + event["dur"]))
        elif kind == "B":
            opened.setdefault(row, []).append((event.get("name"), event["ts"]))
        elif kind == "E" and opened.get(row):
            phases.setdefault(row, []).append((*opened[row].pop(), event["ts"]))
    return phases


def _same_times(rows):
    for name, phases in rows.items():
        for phase in {phase: None for tensor, phase, *_ in EVENTS if tensor == name}:
            right = sorted((start * 1e6, end * 1e6) for tensor, what, start, end in EVENTS
                           if (tensor, what) == (name, phase))
            found = sorted((start, end) for what, start, end in phases if what == phase)
            if len(found) != len(right):
                raise _wrong_count(name, phase, len(found), len(right), {p for p, *_ in phases})
            for times, wanted in zip(found, right):
                _one_phase(f"{phase} of {name!r}", *times, *wanted)


def _wrong_count(name, phase, found, right, phases):
    if phases == {name}:
        return Mistake(f"every phase in the row of {name!r} is called {name}",
                       'The "name" of an event of kind X is its phase; the tensor\'s name is the '
                       "row's.")
    if not found:
        return Mistake(f"the row of {name!r} has no phase {phase}", "Write every event.")
    return Mistake(f"the row of {name!r} has phase {phase} {found} times, not {right}",
                   "A phase comes again in every step: write every event, and do not keep one for "
                   "each name." if found < right else "Write every event once.")


def _one_phase(phase, a, b, start, end):
    if max(abs(a - start), abs(b - end)) < 1:
        return
    hint = '"ts" is the start and "dur" is end - start, both times 1e6.'
    if abs(a - start * 1e-3) < 1e-3 or abs(a - start * 1e-6) < 1e-6:
        hint = "The format counts microseconds: seconds * 1e6."
    elif abs(a - start) < 1 and abs(b - a - end) < 1:
        hint = '"dur" is how long it takes, end - start; not when it ends.'
    raise Mistake(f"{phase} goes from {a:g} to {b:g}, not from {start:g} to {end:g}", hint)
