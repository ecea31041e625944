"""What happened to each tensor, as a trace for Perfetto or chrome://tracing."""

import json
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ranklab.basics.files import whole_file


def timeline(events, path):
    """Write `events` to `path` as a Chrome trace: one row for each tensor, with nested phases.

    Each event is (tensor, phase, start, end), in seconds since the timeline began.

    Lab: 05
    """
    rows, trace = {}, []
    for tensor, phase, start, end in events:
        if tensor not in rows:
            rows[tensor] = len(rows) + 1
            trace.append({"ph": "M", "name": "process_name", "pid": rows[tensor], "tid": 0,
                          "args": {"name": tensor}})
        trace.append({"ph": "X", "name": phase, "pid": rows[tensor], "tid": 0,
                      "ts": start * 1e6, "dur": (end - start) * 1e6})  # microseconds
    with open(path, "w") as file:
        json.dump({"traceEvents": trace}, file)


class Recorder:
    """Collect events while a timeline is on; cost nothing while it is off."""

    def __init__(self):
        self.path, self.events, self.began = None, None, 0.0

    def start(self, path):
        """Start recording events, for the file `path`."""
        open(path, "a").close()  # a path that can't be written is an error now, not at the end
        self.path, self.began, self.events = path, time.perf_counter(), []

    def note(self, tensor, phase, start, end=None):
        """Record a `phase` from `start` to `end` (default: now), in time.perf_counter() seconds."""
        events, end = self.events, time.perf_counter() if end is None else end
        if events is not None and start >= self.began:
            events.append((tensor, phase, start - self.began, end - self.began))

    @contextmanager
    def phase(self, tensors, phase, stream=None):
        """Record the block as `phase`, for each of `tensors`.

        `stream` is the GPU stream on which the block launches kernels. It is synchronized before
        and after the block, but only while a timeline is on, since that takes time.
        """
        waits = stream is not None and self.events is not None
        if waits:
            stream.synchronize()
        start = time.perf_counter()
        yield
        if waits:
            stream.synchronize()
        end = time.perf_counter()
        for tensor in tensors:
            self.note(tensor, phase, start, end)

    def stop(self):
        """Write the file, if a timeline was on; until then an earlier file stays complete."""
        events, self.events = self.events, None
        if events is not None:
            with whole_file(self.path) as part:  # another run may read or write the file now
                # A phase comes before what is inside it, even if both began at the same moment.
                timeline(sorted(events, key=lambda event: (event[2], -event[3])), part)


# --- reading it, ours or the real Horovod's -------------------------------------------------------

class Phase(NamedTuple):
    """One phase of one tensor; seconds since the timeline began."""

    tensor: str
    name: str  # NEGOTIATE_ALLREDUCE, MEMCPY_IN_FUSION_BUFFER, GLOO_ALLREDUCE, ...
    start: float
    end: float

    @property
    def is_all_reduce(self):
        """Whether gradients are on the wire."""
        return self.name.endswith("_ALLREDUCE") and not self.name.startswith("NEGOTIATE")


def read_timeline(path):
    """Read the Phases of a timeline, in the order in which they began.

    Horovod's file has begin and end events, ours has durations. Horovod's may lack its closing
    bracket, if the job was killed.
    Raises: ValueError if the file is not a timeline.
    """
    try:
        text = Path(path).read_text().rstrip().rstrip(",")
        if text.startswith("[") and not text.endswith("]"):
            text = text[: text.rindex("}") + 1] + "]"
        events = json.loads(text)
        return _phases(events["traceEvents"] if isinstance(events, dict) else events)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no timeline: {type(error).__name__} {error}") from None


def _phases(events):
    tensor, open_phases, phases = {}, defaultdict(list), []
    for event in events:
        row, at = event["pid"], event.get("ts", 0) / 1e6
        if event["ph"] == "M" and "name" in event["args"]:
            tensor[row] = event["args"]["name"]
        elif event["ph"] == "B":
            open_phases[row].append((event["name"], at))
        elif event["ph"] == "E" and open_phases[row]:
            phases.append(Phase(tensor.get(row, str(row)), *open_phases[row].pop(), at))
        elif event["ph"] == "X" and event.get("dur"):
            phases.append(Phase(tensor[row], event["name"], at, at + event["dur"] / 1e6))
    return sorted(phases, key=lambda phase: (phase.start, -phase.end))


def all_reduces(phases):
    """Count the tensors in each all-reduce: [17, 24, ...].

    One thread runs all-reduces one after the other, so phases that overlap were fused into one.
    """
    carried, end = [], -1.0
    for phase in filter(lambda phase: phase.is_all_reduce, phases):
        if phase.start >= end:
            carried.append(0)
            end = phase.end
        carried[-1] += 1
    return carried


def one_step(phases):
    """Return the phases of the last step but one; a step begins when a tensor is requested again.

    Early steps negotiate by name, and the last step may be cut off.
    """
    steps, tensors = [[]], set()
    for phase in phases:
        if phase.name == "NEGOTIATE_ALLREDUCE":
            if phase.tensor in tensors:
                steps.append([])
                tensors = set()
            tensors.add(phase.tensor)
        steps[-1].append(phase)
    return steps[-2:][0]
