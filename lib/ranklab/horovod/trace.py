"""What happened to each tensor, as a trace to look at in Perfetto or chrome://tracing."""

import json
import time
from contextlib import contextmanager

from ranklab.files import whole_file


def timeline(events, path):
    """`path` holds `events` as a Chrome trace: one row for each tensor, phases nested in it.

    Each event is (tensor, phase, start, end), in seconds since the timeline began.

    lab    05
    """
    rows, trace = {}, []
    for tensor, phase, start, end in events:
        if tensor not in rows:
            rows[tensor] = len(rows) + 1
            trace.append({"ph": "M", "name": "process_name", "pid": rows[tensor], "tid": 0,
                          "args": {"name": tensor}})
        trace.append({"ph": "X", "name": phase, "pid": rows[tensor], "tid": 0,
                      "ts": start * 1e6, "dur": (end - start) * 1e6})  # the format wants us
    with open(path, "w") as file:
        json.dump({"traceEvents": trace}, file)


class Recorder:
    """Collects events while a timeline is on; costs nothing while it is off."""

    def __init__(self):
        self.path, self.events, self.began = None, None, 0.0

    def start(self, path):
        """From now on events are kept, for the file `path`."""
        open(path, "a").close()  # a path that can't be written is an error now, not at the end
        self.path, self.began, self.events = path, time.perf_counter(), []

    def note(self, tensor, phase, start, end=None):
        """`phase` went from `start` to `end` (now), in time.perf_counter()'s seconds."""
        events, end = self.events, time.perf_counter() if end is None else end
        if events is not None and start >= self.began:
            events.append((tensor, phase, start - self.began, end - self.began))

    @contextmanager
    def phase(self, tensors, phase, stream=None):
        """The block is `phase`, for each of `tensors`. `stream` is that of a GPU's block.

        Such a block only enqueues its kernels, so before it and after it we wait for the stream;
        but not while no timeline is on, since that takes time.
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
        """The file is there, if a timeline was on; until now it was the one before, whole."""
        events, self.events = self.events, None
        if events is not None:
            with whole_file(self.path) as part:  # another run may read or write the file now
                # A phase before what is inside it, also where both began at the same moment.
                timeline(sorted(events, key=lambda event: (event[2], -event[3])), part)
