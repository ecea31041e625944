"""The check of timeline: is the file a trace, and does it show the right events?"""

import itertools
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from ranklab.checks.prover import Proof, Slip, Stage, Told
from ranklab.horovod import timeline

EVENTS = tuple((tensor, phase, start / 64, end / 64) for tensor, phase, start, end in (
    ("w", "NEGOTIATE", 1, 4), ("b", "NEGOTIATE", 2, 4), ("w", "ALLREDUCE", 4, 10),
    ("b", "ALLREDUCE", 4, 10), ("w", "QUEUE", 4, 5), ("b", "GLOO_ALLREDUCE", 5, 9),
    ("w", "rank 1 is ready", 3, 3), ("w", "QUEUE", 12, 14)))  # 1/64 s is 15625 microseconds
ODD_NAMES = tuple((name, "QUEUE", 0.0, 1.0)
                  for name in ("0.weight", "1.weight", 'layer "a"', "back\\slash", "gr\u00f6sse"))
OLD = "an older file, which is longer than the trace is. " * 200
KEYS = {"M": {"pid", "name", "args"}, "X": {"pid", "name", "ts", "dur"}}
FILE, ROWS, CHANGED = "the file", "the names of the rows", "`events` afterwards"


class Case(NamedTuple):
    name: str
    events: tuple

    def __str__(self):
        return self.name


def _see(fn, case):
    text, events = _written(fn, case.events)
    trace, is_not = _read(text)
    rows, lacks = _rows(trace)
    yield {FILE: Told(is_not or lacks, lambda got, due: got),
           CHANGED: events,
           ROWS: sorted(rows),
           **{f"the row of {tensor!r}": Told(sorted(rows.get(tensor, ())), _in_words)
              for tensor, *_ in case.events}}


def _written(fn, events):
    """Return the file's content afterwards, and the list of events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(OLD)
        fn(argument := [*events], str(path))
        return path.read_text(), argument


def _in_words(got, due):
    """Say which event is wrong."""
    one, right = next(pair for pair in itertools.zip_longest(got, due) if pair[0] != pair[1])
    number = f"of {len(got)} events, not of {len(due)}" if len(got) != len(due) else "wrong"
    return (f"{number}: one, as (phase, ts, dur), is {one or 'missing'}, not "
            f"{right or 'in the events'}")


def _read(text):
    """Return the entries of the trace; and, if the file is no trace, what it is, else ""."""
    if text.startswith(OLD):
        return [], "what it was before" + ", and more after that" * (text != OLD)
    try:
        trace = json.loads(text)
    except ValueError:
        return [], f"not JSON: it begins with {text[:2]!r}" if text else "empty"
    if isinstance(trace, str):
        return [], "JSON, but only a single string"
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return [], 'JSON without a list called "traceEvents"'
    return trace["traceEvents"], ""


def _rows(trace):
    """Return {name of a row: [(phase, ts, dur), ...]}; and what is wrong with the trace, or ""."""
    for entry in trace:
        if not isinstance(entry, dict):
            return {}, "a trace with an entry that is not a dict"
        if lacks := sorted(KEYS.get(str(entry.get("ph")), {"ph"}) - {*entry}):
            return {}, f"a trace with an entry that lacks {', '.join(lacks)}"
        if type(entry.get("pid", 0)) is not int:
            return {}, "a trace in which a pid is not a number"
        if (entry["ph"], entry.get("name")) == ("M", "process_name") and (
                not isinstance(entry["args"], dict)
                or not isinstance(entry["args"].get("name"), str)):
            return {}, 'a trace in which the "args" of a row are not {"name": its tensor}'
    names = [(entry["pid"], entry["args"]["name"]) for entry in trace
             if (entry["ph"], entry.get("name")) == ("M", "process_name")]
    name_of, events = dict(names), [entry for entry in trace if entry["ph"] == "X"]
    rows = {name: [] for name in name_of.values()}
    for holds, otherwise in (
        (len(names) == len({*names}), "a trace in which a row is named twice"),
        (len({*names}) == len(name_of), "a trace in which a row has two names"),
        (len(rows) == len(name_of), "a trace in which two rows have one name"),
        (names or not events, "a trace in which no row has a name"),
        ({event["pid"] for event in events} <= {*name_of},
         "a trace with an event in a row that has no name"),
        ({type(event[key]) for event in events for key in ("ts", "dur")} <= {int, float},
         "a trace in which a time is not a number"),
    ):
        if not holds:
            return {}, otherwise
    for event in events:
        rows[name_of[event["pid"]]].append((str(event["name"]), event["ts"], event["dur"]))
    return rows, ""


# --- right for another reason ---------------------------------------------------------------------

def row_by_row(events, path):
    trace = []
    for row, tensor in enumerate(sorted({tensor for tensor, *_ in events})):
        trace += [{"ph": "M", "name": "process_name", "pid": row, "args": {"name": tensor}}]
        trace += [{"ph": "X", "name": phase, "pid": row, "ts": round(1e6 * start),
                   "dur": round(1e6 * end) - round(1e6 * start)}
                  for each, phase, start, end in events if each == tensor]
    Path(path).write_text(json.dumps({"traceEvents": trace}))


# --- mistakes -------------------------------------------------------------------------------------

DUMP = 'json.dump({"traceEvents": trace}, file)'
EACH = "for tensor, phase, start, end in events"
START, LENGTH = '"ts": start * 1e6', '"dur": (end - start) * 1e6'
FIRST, NUMBERED = "if tensor not in rows:", "rows[tensor] = len(rows) + 1"
BEGIN, EVENT = "rows, trace = {}, []", 'trace.append({"ph": "X"'
NAME = '"process_name", "pid": rows[tensor], "tid": 0'
PHASE = 'phase, "pid": rows[tensor], "tid": 0'
TIMELINE = Proof(
    timeline,
    Stage({"the file is JSON, with a row for each tensor, as Perfetto and chrome://tracing want "
           "it": (FILE, CHANGED, ROWS),
           "every phase is in its tensor's row, from start to end, in microseconds; none is "
           "missing": tuple(f"the row of {tensor!r}" for tensor in "wb")},
          _see, (Case("8 events of 2 tensors", EVENTS), Case("the same once more", EVENTS)),
          oracle=row_by_row),
    Stage("any order, no events at all, names with quotes in them", _see,
          (Case("no events", ()), Case("names with quotes in them", ODD_NAMES),
           Case("the last event comes first", EVENTS[::-1]), Case("each twice", EVENTS * 2)),
          oracle=row_by_row),
    mistakes=(
        # times
        Slip("The format is in microseconds: seconds * 1e6.",
             (START, START.replace("1e6", "1e3"), LENGTH, LENGTH.replace("1e6", "1e3")),
             (START, '"ts": start', LENGTH, '"dur": end - start'),
             (START, START.replace("1e6", "1e9"), LENGTH, LENGTH.replace("1e6", "1e9"))),
        Slip("A time is a number, not a string.", (START, '"ts": str(start * 1e6)'),
             (LENGTH, '"dur": f"{(end - start) * 1e6:.0f}"')),
        Slip("Keep times precise to a microsecond: a phase may take less than a millisecond.",
             *((START, f'"ts": {whole("start")}', LENGTH, f'"dur": {whole("end - start")}')
               for whole in ("round({}, 2) * 1e6".format, "round({}, 3) * 1e6".format,
                             "int(1e3 * ({})) * 1e3".format)),
             (START, '"ts": round(start, 3) * 1e6'),
             (LENGTH, '"dur": round(end - start, 3) * 1e6')),
        Slip('"dur" is in microseconds as well.', (LENGTH, '"dur": end - start')),
        Slip('"dur" is how long the phase takes, end - start, not when it ends.',
             (LENGTH, '"dur": end * 1e6')),
        Slip('"dur" is end - start, not the other way round.',
             (LENGTH, '"dur": (start - end) * 1e6')),
        Slip('"ts" is when the phase starts.', (START, '"ts": end * 1e6')),
        Slip("Times count from the start of the timeline, not from the first event.",
             (START, '"ts": (start - events[0][2]) * 1e6'),
             (START, '"ts": (start - min(each[2] for each in events)) * 1e6')),
        # which events
        Slip("A phase comes again in every step: write every event, not only the last of each "
             "phase.", (EACH, "for (tensor, phase), (start, end) in {(tensor, phase): times "
                        "for tensor, phase, *times in events}.items()")),
        Slip("A phase comes again in every step: write every event, not only the first of each "
             "phase.", (EACH, "for (tensor, phase), (start, end) in {(tensor, phase): times "
                        "for tensor, phase, *times in events[::-1]}.items()")),
        Slip("Write every event once.", (EACH, f"{EACH} * 2")),
        Slip("A phase that takes no time is still an event.",
             (EVENT, f"if end > start:\n            {EVENT}")),
        Slip("Write a tensor's first event as well, after the entry that names its row.",
             (EVENT, f"else:\n            {EVENT}")),
        Slip("Every event needs an entry, not only the first of its tensor.",
             (EVENT, f"    {EVENT}")),
        # rows
        Slip('The "name" of an event of kind X is its phase.', ('"name": phase', '"name": tensor')),
        Slip("A row is a tensor, not a phase: an event is (tensor, phase, start, end).",
             (EACH, "for phase, tensor, start, end in events")),
        Slip("Every row needs a name: when you first see its tensor, write an entry of kind M "
             'called "process_name".',
             ('"process_name"', "tensor"), ('"process_name"', '"thread_name"'),
             ('trace.append({"ph": "M"', 'dict({"ph": "M"')),
        Slip("A tensor keeps its row: give it a number only when you first see it.",
             (FIRST, "if True:", NUMBERED, "rows[tensor] = len(trace)")),
        Slip("Name a row only once, when you first see its tensor.",
             (FIRST, "if True:", NUMBERED, "rows.setdefault(tensor, len(rows) + 1)")),
        Slip('Each tensor has its own row: the next number, which is the "pid".',
             (NUMBERED, "rows[tensor] = 1"),
             (NAME, '"process_name", "pid": 0, "tid": rows[tensor]',
              PHASE, 'phase, "pid": 0, "tid": rows[tensor]')),
        Slip('The "pid" is a number: the row, not the name of the tensor.',
             (NAME, NAME.replace("rows[tensor]", "tensor"),
              PHASE, PHASE.replace("rows[tensor]", "tensor"))),
        Slip('In an entry of kind M, "args" is a dict: {"name": tensor}.',
             ('{"name": tensor}', "tensor"), ('{"name": tensor}', "[tensor]"),
             ('{"name": tensor}', "{tensor: tensor}")),
        Slip("The \"pid\" of an event is its tensor's row: the same \"pid\" as in the entry that "
             "names the row.", (NUMBERED, "rows[tensor] = len(rows)",
                     PHASE, PHASE.replace("rows[tensor]", "len(rows)"))),
        Slip("Each event needs the number of its own tensor's row, not of the newest row.",
             (PHASE, PHASE.replace("rows[tensor]", "len(rows)"))),
        Slip('An event is one entry of kind "X", which has a start and a duration.',
             ('"ph": "X"', '"ph": "B"')),
        Slip("Rows are left over from an earlier call: each call must begin without rows.",
             ("path):", "path, rows={}):", BEGIN, "trace = []")),
        Slip("Entries are left over from an earlier call: each call must begin with an empty "
             "trace.",
             ("path):", "path, trace=[]):", BEGIN, "rows = {}")),
        Slip("Leave the list of events as it is: sorted() makes a new list, sort() does not.",
             (BEGIN, f"events.sort(key=lambda event: event[2])\n    {BEGIN}")),
        # the file
        Slip("str() of a dict is Python syntax, not JSON: use json.dump().",
             (DUMP, 'file.write(str({"traceEvents": trace}))')),
        Slip("Don't make JSON by replacing quotes: json.dump writes quotes, commas and escapes "
             "correctly.",
             (DUMP, """file.write(str({"traceEvents": trace}).replace("'", '"'))""")),
        Slip("json.dumps() already returns JSON: write that string as it is, or pass the dict to "
             "json.dump(). Using both gives JSON inside JSON.",
             (DUMP, 'json.dump(json.dumps({"traceEvents": trace}), file)')),
        Slip('Write {"traceEvents": [...]}: a dict with the list under exactly this name.',
             (DUMP, "json.dump(trace, file)"),
             (DUMP, 'json.dump({"events": trace}, file)')),
        Slip("Write one JSON document: a single json.dump with all entries.",
             (DUMP, 'file.writelines(json.dumps(each) + "\\n" for each in trace)')),
        Slip('Nothing is written to `path`: with open(path, "w") as file, then '
             'json.dump({"traceEvents": trace}, file).',
             (DUMP, 'json.dumps({"traceEvents": trace})'), (DUMP, "return trace"),
             ('with open(path, "w") as file:', "if True:",
              DUMP, 'return json.dumps({"traceEvents": trace})')),
        Slip('open(path, "w") replaces the old file; "a" appends to it.',
             ('"w"', '"a"')),
    ), hints=(
        "A row is a number, the pid. Give each tensor the next number when you first see it, and "
        "name the row once.",
        "rows.setdefault is not enough: a new row also needs the entry with its name.",
        'At the end json.dump({"traceEvents": trace}, file). ts = start * 1e6, dur = '
        '(end - start) * 1e6.',
    ))
